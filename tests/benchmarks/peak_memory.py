"""Peak memory of one train step, each in a process of its own so that peaks do not mix.

A server process imports everything once and forks a child for each measurement. The child makes one step on a few tokens, which
allocates gradients and the state of AdamW, then resets the kernel's record of its peak, and makes the step that counts: reported is
the peak above the level before it.
"""

import ctypes
import gc
import math
import multiprocessing
import os
import resource
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contestants import PATHS
from contestants import Contestant
from contestants import baselines
from contestants import baselines_of
from contestants import ours
from measuring import Trainer
from measuring import Work
from measuring import read_clocks
from peers import PEERS
from tqdm import tqdm

MIB = 2**20
WARM_UP = 64
STATUS = Path("/proc/self/status")


def every_contestant() -> dict[str, Contestant]:
    """All that can be measured, by name: functions do not travel between processes."""
    return {one.name: one for one in [*baselines(), *ours(["all"], "both", PATHS), *PEERS.values()]}


def status(field: str) -> int:
    """KiB of one field of the process's status, such as VmHWM, the peak of its resident memory."""
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak_above(work: Callable[[], Any]) -> tuple[float, float]:
    """MiB that a call needs at its peak above what the process holds before it, and the seconds that it takes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        level, highest, unit = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, 1
    elif STATUS.is_file():
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # what the allocator kept from before would hide what the call needs
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        level, highest, unit = partial(status, "VmRSS"), partial(status, "VmHWM"), 1024
    else:  # a system without it keeps one peak for the life of the process
        level = highest = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else 1024
    before = level()
    wall = read_clocks(Work(work))["wall"]
    return unit * (highest() - before) / MIB, wall


def limit_memory(gib: float) -> None:
    """Let the process allocate so much more than it has now; more raises instead of taking the machine down."""
    if STATUS.is_file():
        most = 1024 * status("VmSize") + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def in_child(name: str, length: int, setting: Any, sender: Any) -> None:
    """Measure one step of one sequence, and send the outcome."""
    torch.set_num_threads(setting.threads)
    outcome: dict[str, Any]
    try:
        trainer = Trainer(every_contestant()[name], setting, 1, length)
        trainer.load(1, min(WARM_UP, length), setting)
        trainer.warm_up(["train"])
        trainer.load(1, length, setting)
        limit_memory(setting.limit_gib)
        highest, seconds = peak_above(trainer.train)
        outcome = {"peak_mib": highest, "seconds": seconds, "model": trainer.describe()}
    except (MemoryError, torch.OutOfMemoryError) as error:
        outcome = {"failed": f"more than {setting.limit_gib:g} GiB ({type(error).__name__})"}
    except Exception as error:  # whatever stops a measurement is its outcome
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        outcome = {"failed": f"more than {setting.limit_gib:g} GiB" if "allocate memory" in str(error) else text}
    sender.send(outcome)


def start_server() -> Any:
    """The context whose server has imported everything, and computed nothing, before it forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, sys.path)
    )  # the server does not take over sys.path before Python 3.13
    return context


def peak(context: Any, name: str, length: int, setting: Any) -> dict[str, Any]:
    """The outcome of one child: a peak and seconds, or why there is none."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=in_child, args=(name, length, setting, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(setting.timeout):
            return {"failed": f"more than {setting.timeout:g} s"}
        return receiver.recv()
    except EOFError:
        process.join()
        return {"failed": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        receiver.close()


def measure(one: Contestant, setting: Any, context: Any, bar: Any) -> dict[str, Any]:
    """The peaks of one contestant at all lengths, until it fails, and how they grow."""
    row: dict[str, Any] = one.describe() | {"peaks_mib": {}, "seconds": {}}
    for length in sorted(setting.memory_lengths):
        bar.set_postfix_str(f"{one.name}, length {length}")
        if "failed" not in row:
            outcome = peak(context, one.name, length, setting)
            if "failed" in outcome:
                row |= {"failed": outcome["failed"], "failed_at": length}
            else:
                row["peaks_mib"][str(length)] = outcome["peak_mib"]
                row["seconds"][str(length)] = outcome["seconds"]
                row["model"] = outcome["model"]
        bar.update()
    return row | growth({int(length): value for length, value in row["peaks_mib"].items()})


def measure_all(contestants: list[Contestant], setting: Any, save: Callable[[list[dict[str, Any]]], None]) -> None:
    """Measure baselines and contestants one after the other, and save the rows after each."""
    both = [*baselines_of(contestants), *contestants]
    context, rows = start_server(), []
    with tqdm(total=len(both) * len(setting.memory_lengths), desc="peak memory") as bar:
        for one in both:
            rows.append(measure(one, setting, context, bar))
            save(rows)


def growth(peaks: dict[int, float]) -> dict[str, float]:
    """The exponent of the growth with the length, and MiB for 1024 tokens more; nothing from fewer than two peaks."""
    points = [(length, value) for length, value in peaks.items() if value > 0]
    if len(points) < 2:
        return {}
    lengths, values = zip(*points, strict=True)
    line = statistics.linear_regression(lengths, values)
    exponent = statistics.linear_regression([math.log(x) for x in lengths], [math.log(y) for y in values]).slope
    residuals = [abs(line.intercept + line.slope * x - y) / y for x, y in points]
    return {"exponent": exponent, "mib_per_1024": 1024 * line.slope, "largest_residual_of_linear_fit": max(residuals)}
