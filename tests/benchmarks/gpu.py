"""All that is to be known of a GPU, by one command: `make gpu`.

    make gpu                                          # all parts, about 8 minutes
    make gpu ARGS='--part correctness'                # one of correctness, speed, memory, train, kernels
    make gpu ARGS='--device cpu --quick'              # does it run? its numbers mean nothing

Every cell is written when it is measured, and taken from there afterwards: a run that was stopped goes on. Cells for which no time is
left (`--minutes`) are named in the report, and measured by the next call. Writes results.json, report.md, and what `speed.py` writes.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decode_times
import gpu_correctness
import peak_memory
import speed
import speed_report
import step_times
import torch
from contestants import baselines_of
from contestants import ours
from measuring import Trainer
from measuring import environment
from peers import peers
from tqdm import tqdm

from hf_relpos import SCHEMES

ROOT = Path(__file__).parents[2]
PARTS = ("correctness", "speed", "memory", "train", "kernels")
LENGTHS = {False: [512, 2048, 8192, 32768], True: [128, 256]}
CONTEXTS = {False: [4096], True: [64]}
STEPS = {False: 60, True: 2}
"""Train steps of the default run."""
BLOCK = {False: 256, True: 64}
"""Tokens of its rows."""
TRAINED = {
    "steps": "steps",
    "seconds": "train_runtime",
    "steps a second": "train_steps_per_second",
    "tokens a second": "train_tokens_per_second",
}
"""Columns of the default run, and what holds them."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", nargs="+", default=list(PARTS), choices=PARTS)
    add("--device", default="cuda")
    add("--quick", action="store_true", help="tiny sizes and few cells")
    add("--minutes", type=float, default=8.0, help="after which no cell is begun")
    add("--schemes", nargs="+", default=["all"], choices=("all", *SCHEMES), metavar="SCHEME")
    add("--peers", nargs="+", default=None, metavar="PEER", help="as of speed.py; none with --quick")
    add("--output_dir", type=Path, default=ROOT / "runs" / "gpu")
    given = parser.parse_args(argv)
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error(
            f"--device {given.device}: torch {torch.__version__} finds no GPU; --device cpu --quick tries the command"
        )
    return given


class Cells:
    """What was measured so far, by part and name.

    Args:
        folder: where it is kept.
        minutes: after which nothing new is begun.
    """

    def __init__(self, folder: Path, minutes: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file, self.end = folder, folder / "results.json", time.monotonic() + 60 * minutes
        self.found: dict[str, dict[str, Any]] = (
            json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {}
        )
        self.left_out: list[str] = []

    def measure(self, part: str, name: str, work: Callable[[], Any]) -> None:
        """Measure a cell, unless it went through before or no time is left; what stops it is its result."""
        cells = self.found.setdefault(part, {})
        if name in cells and "failed" not in cells[name]["result"]:
            return
        if time.monotonic() > self.end:
            self.left_out.append(f"{part}: {name}")
            return
        started = time.monotonic()
        try:
            result = work()
        except Exception as error:  # one cell stops no other
            result = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        cells[name] = {"result": result, "seconds": round(time.monotonic() - started, 1)}
        self.file.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def results(self, part: str) -> dict[str, Any]:
        """What was measured of a part, by name."""
        return {name: cell["result"] for name, cell in self.found.get(part, {}).items()}


def setting_of(given: argparse.Namespace, part: str) -> argparse.Namespace:
    """The setting of `speed.py` for a part."""
    words = [part, "--device", given.device, "--output_dir", str(given.output_dir), "--schemes", *given.schemes]
    words += (
        ["--quick"]
        if given.quick
        else ["--dtype", "autocast", "--rounds", "5", "--least_seconds", "0.05", "--tokens", "32768"]
    )
    words += ["--longest_peer", "8192"]
    return speed.parse(words)


def contestants_of(given: argparse.Namespace) -> list[Any]:
    """Our schemes and the peers that are at hand."""
    return [*ours(given.schemes, "native", ["auto"]), *peers(given.peers or (["none"] if given.quick else ["all"]))[0]]


def correctness(cells: Cells, given: argparse.Namespace) -> None:
    """The tests marked `gpu`, and every scheme's paths beside plain attention in float64."""
    if given.device != "cpu":
        cells.measure("correctness", "tests marked gpu", marked_tests)
    wanted = [cell for cell in gpu_correctness.cells(given.quick) if given.schemes == ["all"] or cell[0] in given.schemes]
    compare_paths(cells, given, wanted)


def compare_paths(cells: Cells, given: argparse.Namespace, wanted: list[tuple[str, bool, str, str]]) -> None:
    """Schemes on paths, beside plain attention in float64."""
    for scheme, causal, path, dtype in tqdm(wanted, "correctness"):
        name = f"{scheme}, {'decoder' if causal else 'encoder'}, {path}, {dtype}"
        work = (scheme, causal, path, dtype, given.device)
        cells.measure("correctness", name, lambda work=work: gpu_correctness.measure(*work))


def marked_tests() -> dict[str, Any]:
    """Run the tests that need an accelerator."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-o", "addopts=", "-m", "gpu", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    return {"said": last} | ({"failed": done.stdout[-3000:]} if done.returncode else {})


def steps_and_decoding(cells: Cells, given: argparse.Namespace) -> None:
    """Train steps, forward passes and decoding, as ratios to the baseline measured beside them."""
    chosen = contestants_of(given)
    for length in tqdm(LENGTHS[given.quick], "steps"):
        cells.measure(
            "steps", str(length), lambda length=length: step_times.measure(chosen, setting_of(given, "steps"), length)
        )
    for context in tqdm(CONTEXTS[given.quick], "decoding"):
        cells.measure(
            "decode", str(context), lambda context=context: decode_times.measure(chosen, setting_of(given, "decode"), context)
        )


def memory(cells: Cells, given: argparse.Namespace) -> None:
    """Peak memory of a train step of one row, in this process: an accelerator counts what each step takes."""
    peaks(cells, given, contestants_of(given))


def peaks(cells: Cells, given: argparse.Namespace, chosen: list[Any]) -> None:
    """Peak memory of some models and their baselines."""
    setting = setting_of(given, "memory")
    for length in LENGTHS[given.quick]:
        for one in tqdm([*baselines_of(chosen), *chosen], f"memory, {length}"):
            cells.measure("memory", f"{one.name}, {length}", lambda one=one, length=length: peak(one, setting, length))


def kernels(cells: Cells, given: argparse.Namespace) -> None:
    """The kernels of `attn_implementation="triton"`: equality, and rows of their own in the tables of steps and of memory."""
    named = [
        cell for cell in gpu_correctness.kernel_cells(given.quick) if given.schemes == ["all"] or cell[0] in given.schemes
    ]
    compare_paths(cells, given, named)
    if given.device == "cpu" or not named:
        return
    chosen = ours([scheme for scheme, *_ in named], "native", ["triton"])
    for length in tqdm(LENGTHS[given.quick], "steps of the kernels"):
        work = (chosen, setting_of(given, "steps"), length)
        cells.measure("steps", f"{length}, kernels", lambda work=work: step_times.measure(*work))
    peaks(cells, given, chosen)


def peak(one: Any, setting: argparse.Namespace, length: int) -> dict[str, Any]:
    """The peak of one step above what the model, its gradients and the optimizer hold."""
    trainer = Trainer(one, setting, 1, length)
    trainer.warm_up(["train"])
    return one.describe() | {"length": length, "peak_mib": peak_memory.peak_above(trainer.train)[0]}


def train(cells: Cells, given: argparse.Namespace) -> None:
    """Tokens per second of the default run, with memory and without."""
    for mem_len in (None, 0):
        name = "default run" if mem_len is None else f"default run, mem_len {mem_len}"
        cells.measure("train", name, lambda mem_len=mem_len: train_some(given, mem_len))


def train_some(given: argparse.Namespace, mem_len: int | None) -> dict[str, Any]:
    """Train some steps of the default run by `train_lm.py`."""
    folder = given.output_dir / f"train_{mem_len}"
    fixed = {"max_steps": STEPS[given.quick], "output_dir": folder, "overwrite_output_dir": "true", "do_train": "true"}
    fixed |= {"do_eval": "false", "eval_strategy": "no", "save_strategy": "no", "report_to": "none"}
    words = [word for name, value in fixed.items() for word in (f"--{name}", value)]
    words += [] if mem_len is None else ["--mem_len", mem_len]
    words += ["--use_cpu", "true"] if given.device == "cpu" else []
    words += ["--block_size", BLOCK[given.quick], *(["--per_device_train_batch_size", 1] if given.quick else [])]
    command = [sys.executable, "train_lm.py", "configs/default.yaml", *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["train_lm.py ended with an error"])[-1])
    found = json.loads((folder / "train_results.json").read_text(encoding="utf-8"))
    tokens = {"train_tokens_per_second": round(BLOCK[given.quick] * found["train_samples_per_second"])}
    return {"steps": STEPS[given.quick]} | tokens | {name: value for name, value in found.items() if name.startswith("train_")}


def write_report(cells: Cells, given: argparse.Namespace) -> list[str]:
    """Write report.md, and what `speed.py` writes of steps and decoding; return what failed."""
    rows = [row for row in cells.results("correctness").values() if "errors" in row]
    failed = [f"{part}: {name}: {found['failed']}" for part in cells.found for name, found in cells.results(part).items()
              if isinstance(found, dict) and "failed" in found]  # fmt: skip
    parts = {}
    for part in ("steps", "decode"):
        found = [row for result in cells.results(part).values() if isinstance(result, list) for row in result]
        if found:
            head = {"setting": speed.describe(setting_of(given, part)), "gate": {"refused": {}}, "missing_peers": {}}
            parts[part] = head | {"rows": found}
    speed_report.write_report(parts, cells.folder)
    said, marked = environment(), cells.results("correctness").get("tests marked gpu", {}).get("said")
    lines = [
        f"# What was measured on {said['accelerator'] or said['processor']}",
        "",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, driver {driver()}; {', '.join(f'{k} {v}' for k, v in said['versions'].items())}; commit {said['commit']}. "
        + ("Tiny sizes: numbers mean nothing." if given.quick else ""),
        "",
        "## Failed",
        "",
        *([f"- {each}" for each in failed] or ["Nothing failed."]),
        *([f"- left out, no time: {each}" for each in cells.left_out]),
        "",
        "## Correctness",
        "",
        "Largest error of states and gradients over all kinds of input, relative to the largest entry; bold beyond the tolerance.",
        "",
        speed_report.table(*gpu_correctness.table_of(rows)) if rows else "",
        *([f"Tests marked `gpu`: {marked}"] if marked else []),
        *(f"\nSee [{part}.md]({part}.md)." for part in parts),
        "",
        "## Peak memory of a train step, MiB",
        "",
        speed_report.table(*memory_table(cells, given)),
        "## Default run",
        "",
        speed_report.table(["run", *TRAINED], [[name, *(found.get(key) for key in TRAINED.values())] for name, found in cells.results("train").items()]),
    ]  # fmt: skip
    (cells.folder / "report.md").write_text("\n".join(lines), encoding="utf-8")
    return failed


def memory_table(cells: Cells, given: argparse.Namespace) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of peaks, with ratios to the baseline."""
    found = {(row["name"], row["length"]): row["peak_mib"] for row in cells.results("memory").values() if "peak_mib" in row}
    base = {row["name"]: row["baseline"] for row in cells.results("memory").values() if "peak_mib" in row}
    names, lines = list(dict.fromkeys(name for name, _ in found)), []
    for name in names:
        line = [name]
        for length in LENGTHS[given.quick]:
            own, beside = found.get((name, length)), found.get((base[name], length))
            line.append("" if own is None else f"{own:.0f}" + (f" ({own / beside:.2f})" if beside else ""))
        lines.append(line)
    return ["model", *(f"{length:,} tokens (ratio to the baseline)" for length in LENGTHS[given.quick])], lines


def driver() -> str:
    """The version of the GPU's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "none"
    except OSError:
        return "none"


def main(argv: list[str] | None = None) -> int:
    """Measure what is asked for, write the report, and return 1 if anything failed."""
    given = parse(argv)
    if given.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cells = Cells(given.output_dir, given.minutes)
    works = {"correctness": correctness, "speed": steps_and_decoding, "memory": memory, "train": train, "kernels": kernels}
    for part in given.part:
        works[part](cells, given)
    failed = write_report(cells, given)
    print(f"written: {cells.folder / 'report.md'}; {len(failed)} failed, {len(cells.left_out)} left out for lack of time")
    for each in failed:
        print(f"failed: {each}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
