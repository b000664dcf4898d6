"""Speed and memory of every scheme against the baseline and against named peers.

    python tests/benchmarks/speed.py all --output_dir runs/speed               # steps, memory and decoding; hours
    python tests/benchmarks/speed.py steps --lengths 512 2048 --threads 2 --output_dir runs/speed
    python tests/benchmarks/speed.py memory --schemes t5 alibi --peers t5 bloom --output_dir runs/speed
    python tests/benchmarks/speed.py report --output_dir runs/speed            # tables and plots again
    python tests/benchmarks/speed.py all --quick --output_dir /tmp/speed       # does it run? its numbers mean nothing

The baseline is the same model when positions are free. Everything is interleaved in one process, and the paths that are measured
must first give what the eager path gives. README.md beside this file has the rules. Writes results.json, a table and a plot for each part.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decode_times
import gate
import peak_memory
import step_times
import torch
from contestants import PATHS
from contestants import Contestant
from contestants import Sizes
from contestants import baselines
from contestants import ours
from measuring import environment
from measuring import right_padding
from peers import PEERS
from peers import peers
from speed_report import write_report
from tqdm import tqdm

from hf_relpos import SCHEMES

PARTS = ("steps", "memory", "decode")
QUICK = {
    "sizes": Sizes(layers=2, width=32, heads=2, vocab=64), "tokens": 256, "lengths": [128, 256], "rounds": 2, "least_seconds": 0.0,
    "memory_lengths": [128, 256], "contexts": [64], "new_tokens": 2, "timeout": 60.0,
}  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The setting of all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="+", choices=(*PARTS, "all", "report"))
    add("--output_dir", type=Path, required=True)
    add("--schemes", nargs="+", default=["all"], choices=("all", *SCHEMES), metavar="SCHEME")
    add(
        "--families",
        choices=("native", "decoder", "encoder", "both"),
        default="native",
        help="native: decoder if there is one",
    )
    add("--paths", nargs="+", default=["auto"], choices=PATHS)
    add("--peers", nargs="+", default=["all"], choices=("all", "none", *PEERS), metavar="PEER", help=", ".join(PEERS))
    add("--lengths", type=int, nargs="+", default=[512, 2048], help="of steps")
    add("--tokens", type=int, default=2048, help="in a step: the batch is tokens / length, at least 1")
    add("--phases", nargs="+", default=["train", "forward"], choices=("train", "forward"))
    add("--padded", action="store_true", help="rows padded on the right, baselines too")
    add("--longest_peer", type=int, default=4096, help="the length up to which peers make steps beside the others")
    add("--rounds", type=int, default=7)
    add("--least_seconds", type=float, default=0.3, help="a measurement repeats its call until it takes so long")
    add("--baseline_every", type=int, default=4, help="contestants between two measurements of the baseline")
    add("--memory_lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    add("--limit_gib", type=float, default=12.0, help="memory that a step may take")
    add("--timeout", type=float, default=600.0, help="seconds that a child may take")
    add("--contexts", type=int, nargs="+", default=[1024, 4096], help="of decoding")
    add("--new_tokens", type=int, default=32, help="decoded in a measurement")
    add("--threads", type=int, default=1)
    add("--dtype", choices=("float32", "bfloat16", "autocast"), default="float32", help="autocast: to bfloat16")
    add("--device", default="cpu")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="tiny sizes")
    parser.set_defaults(sizes=Sizes())
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)  # what the command line says still wins
    arguments = parser.parse_args(argv)
    arguments.parts = list(PARTS) if "all" in arguments.parts else arguments.parts
    return arguments


class Results:
    """What has been found so far; every addition is written, so that nothing is lost with a run that is stopped."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "results.json"
        self.parts: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {}

    def save(self, part: str, content: dict[str, Any]) -> None:
        """Replace one part."""
        self.parts[part] = content
        self.file.write_text(json.dumps(self.parts, indent=1) + "\n", encoding="utf-8")


def describe(setting: argparse.Namespace) -> dict[str, Any]:
    """The setting as JSON: the machine, versions and every argument but the folder."""
    fields = {name: value for name, value in vars(setting).items() if name not in ("output_dir", "parts", "sizes")}
    started = time.strftime("%Y-%m-%d %H:%M")
    return environment() | fields | {"sizes": vars(setting.sizes), "started": started, "optimizer": "AdamW"}


def admit(chosen: list[Contestant], setting: argparse.Namespace) -> tuple[list[Contestant], dict[str, Any]]:
    """The contestants that pass the gate, and its report: errors of those that do, reasons of those that do not."""
    passed, report = [], {"tolerance": gate.TOLERANCE, "errors": {}, "refused": {}}
    mask = right_padding(gate.BATCH, gate.LENGTH) if setting.padded else None
    for contestant in tqdm([*baselines(), *chosen], desc="gate", leave=False):
        try:
            report["errors"][contestant.name] = gate.check(contestant, mask)
        except (ValueError, RuntimeError) as error:
            report["refused"][contestant.name] = str(error).splitlines()[0]
            tqdm.write(f"refused: {contestant.name}: {error}")
        else:
            passed.append(contestant)
    if broken := [baseline.name for baseline in baselines() if baseline.name in report["refused"]]:
        raise SystemExit(f"without a baseline there is nothing to compare with: {', '.join(broken)}")
    return [one for one in passed if one.kind != "baseline"], report


def key_of(part: str, setting: argparse.Namespace) -> str:
    """The name of a part in the results: other threads, types, devices and padding stand beside the default, not in its place."""
    threads = f"{setting.threads}-threads" if setting.threads > 1 else ""
    kind = "" if setting.dtype == "float32" else setting.dtype
    device = "" if setting.device == "cpu" else setting.device.replace(":", "")
    return "-".join(filter(None, [part, threads, kind, device, "padded" if setting.padded else ""]))


def run_part(part: str, contestants: list[Contestant], setting: argparse.Namespace, save: Callable[[list[Any]], None]) -> None:
    """Measure one part; what is found is saved after every length, or every contestant."""
    if part == "memory":
        peak_memory.measure_all(contestants, setting, save)
        return
    rows: list[dict[str, Any]] = []
    measure, sizes = {
        "steps": (step_times.measure, setting.lengths),
        "decode": (decode_times.measure, setting.contexts),
    }[part]
    for size in tqdm(sizes, desc=part):
        rows += measure(contestants, setting, size)
        save(rows)


def main(argv: list[str] | None = None) -> None:
    setting = parse(argv)
    torch.set_num_threads(setting.threads)
    results = Results(setting.output_dir)
    parts = [part for part in setting.parts if part != "report"]
    if parts:
        own, report = admit(ours(setting.schemes, setting.families, setting.paths), setting)
        others, missing = peers(setting.peers)
        head = {"setting": describe(setting), "gate": report, "missing_peers": missing}
        for part in parts:
            key = key_of(part, setting)
            run_part(part, [*own, *others], setting, lambda rows, key=key: results.save(key, head | {"rows": rows}))
    write_report(results.parts, setting.output_dir)


if __name__ == "__main__":
    main()
