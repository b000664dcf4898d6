"""How much memory and time it takes to prepare a text, and to begin to train on it.

    python tests/benchmarks/data_scale.py                    # 10 and 100 MB
    python tests/benchmarks/data_scale.py --sizes 1000 --tokenizers byte --processes 2 --kinds ours
    python tests/benchmarks/data_scale.py --rows rows.jsonl  # goes on where it was stopped, cell by cell

The text is the standard library's sources again and again, each document with a running number, so that no two are the same: JSON
lines, or one long document (`--shape txt`). Every measurement is a process of its own with an empty cache. It prepares the text
(reads, splits, describes, tokenizes and cuts it), takes three steps with a tiny model that has segment memory, and prepares the text
a second time. Beside it stands run_clm's way of grouping texts.

Two kinds of memory are told apart. Anonymous memory (`RssAnon`, looked at every 10 ms) belongs to the process, and only it can run
out. The largest resident set (`VmHWM`) also counts mapped files, whose pages the system drops when it needs room. torch and
transformers alone take about 370 MiB of the one and 520 MiB of the other.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = ["--config_overrides", "hidden_size=16,num_hidden_layers=1,num_attention_heads=2", "--block_size", "256"]
TINY += ["--max_steps", "3", "--per_device_train_batch_size", "4", "--report_to", "none", "--disable_tqdm", "true"]
TINY += ["--save_strategy", "no", "--eval_strategy", "no", "--sample_tokens", "0", "--use_cpu", "true", "--mem_len", "64"]
LIMIT = 1536  # MiB, at every size
COLUMNS = ("text, MB", "way", "tokenizer", "processes", "MB/s", "MB per CPU second", "preparation: anonymous", "resident")
COLUMNS += ("largest worker", "first steps: anonymous", "resident", "second start, s")


def write_text(path: Path, megabytes: int) -> None:
    """Write documents until the file has so many megabytes."""
    from hf_relpos.data.sources import load_files
    from hf_relpos.data.sources import stdlib_files

    sources = list(load_files(stdlib_files()["train"])["text"])
    with path.open("w", encoding="utf-8") as file:
        number = 0
        while file.tell() < megabytes * 10**6:
            text = f"# document {number}\n{sources[number % len(sources)]}"
            file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text)
            number += 1


class Memory:
    """Watches the memory of this process from a thread, in MiB."""

    def __init__(self) -> None:
        self._anonymous = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._anonymous = max(self._anonymous, self._read("RssAnon"))
            time.sleep(0.01)

    def _read(self, name: str) -> float:
        return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024

    def peak(self, stage: str) -> dict[str, float]:
        """Return the most that this process had since the last call, under names that begin with the stage."""
        found = {f"{stage}_anonymous": self._anonymous, f"{stage}_resident": self._read("VmHWM")}
        Path("/proc/self/clear_refs").write_text("5")
        self._anonymous = self._read("RssAnon")
        return found


def clock() -> dict[str, float]:
    """Return the seconds that have passed, and those that processors computed for this process and those it has started."""
    return {"seconds": time.perf_counter(), "cpu": sum(os.times()[:4])}


def since(begin: dict[str, float]) -> dict[str, float]:
    """Return the seconds of both kinds since an earlier reading of the clock."""
    return {name: now - begin[name] for name, now in clock().items()}


def ours(path: Path, tokenizer: str, processes: int, folder: Path) -> dict[str, float]:
    """Prepare the text twice and train a few steps."""
    from hf_relpos.training.run import prepare

    argv = ["--train_file", str(path), "--tokenizer_name", tokenizer, "--preprocessing_num_workers", str(processes), *TINY]
    argv += ["--do_train", "--do_eval", "--output_dir", str(folder / "run")]
    memory, begin = Memory(), clock()
    job = prepare(argv)
    found = since(begin) | memory.peak("preparation")
    job.trainer.train()
    found |= memory.peak("steps")
    begin = clock()
    prepare(argv)
    return found | {"again": since(begin)["seconds"]}


def run_clm(path: Path, tokenizer: str, processes: int, folder: Path) -> dict[str, float]:
    """Tokenize and group as transformers' example does."""
    from datasets import load_dataset

    from hf_relpos.data.tokenizers import load_tokenizer

    memory, begin = Memory(), clock()
    table: Any = load_dataset("json" if path.suffix == ".jsonl" else "text", data_files=str(path), split="train")
    one = load_tokenizer(tokenizer, (row["text"] for row in table), 4096)
    options = {"batched": True, "num_proc": processes if processes > 1 else None}

    def group(rows: dict[str, list]) -> dict[str, list]:
        joined = {name: [i for row in lists for i in row] for name, lists in rows.items()}
        total = len(joined["input_ids"]) // 256 * 256
        cut = {name: [values[at : at + 256] for at in range(0, total, 256)] for name, values in joined.items()}
        return cut | {"labels": cut["input_ids"]}

    tokens = table.map(lambda rows: one(rows["text"]), remove_columns=table.column_names, **options)
    blocks = tokens.map(group, **options)
    blocks.with_format("torch")[:8]
    return since(begin) | memory.peak("preparation")


def measure(kind: str, path: Path, tokenizer: str, processes: int) -> dict[str, float]:
    """Run one measurement in a process with an empty cache; a row of numbers, none if it failed."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        environment = os.environ | {"HF_HOME": folder, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TMPDIR": folder}
        argv = [sys.executable, __file__, "--one", kind, str(path), tokenizer, str(processes), folder]
        done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:] or f"ended by signal {-done.returncode}", file=sys.stderr)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def format_row(size: int, kind: str, tokenizer: str, processes: int, row: dict[str, float]) -> str:
    """Return a row of the table."""
    cells = [f"{size / row[name]:.2f}" if row else "failed" for name in ("seconds", "cpu")]
    names = ("preparation_anonymous", "preparation_resident", "workers", "steps_anonymous", "steps_resident")
    cells += [f"{row[name]:,.0f}" if row.get(name) else "" for name in names]
    cells.append(f"{row['again']:.1f}" if "again" in row else "")
    return " | ".join([f"| {size:,} | {kind} | {tokenizer} | {processes}", *cells]) + " |"


def main() -> None:
    """Measure every size, tokenizer and number of processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100], help="megabytes (default: 10 100)")
    parser.add_argument("--shape", choices=["jsonl", "txt"], default="jsonl")
    parser.add_argument("--tokenizers", nargs="+", default=["byte", "bpe"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", default=["ours", "run_clm"])
    parser.add_argument("--folder", help="where texts and caches are written (default: the system's for temporary files)")
    parser.add_argument("--rows", type=Path, help="JSON lines of finished measurements, which are not measured again")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kind, path, tokenizer, processes, folder = given.one
        found = {"ours": ours, "run_clm": run_clm}[kind](Path(path), tokenizer, int(processes), Path(folder))
        if int(processes) > 1:
            found["workers"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(json.dumps(found))
        return
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
    below = []
    for size in given.sizes:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            path = Path(folder, f"text.{given.shape}")
            cells = product(given.kinds, given.tokenizers, given.processes)
            below += [measure_cell(given, path, size, *cell) for cell in cells]
    if not all(below):
        sys.exit(f"a measurement failed, or its peak is not below {LIMIT} MiB")


def measure_cell(given: argparse.Namespace, path: Path, size: int, kind: str, tokenizer: str, processes: int) -> bool:
    """Measure one cell, unless it was before, and print it; return whether its peaks are below the limit."""
    cell = [given.shape, size, kind, tokenizer, processes]
    known = [json.loads(line) for line in given.rows.read_text().splitlines()] if given.rows and given.rows.exists() else []
    row = next((row for before, row in known if before == cell), None)
    if row is None:
        if not path.exists():
            write_text(path, size)
        row = measure(kind, path, tokenizer, processes)
        if given.rows and row:
            with given.rows.open("a") as file:
                file.write(json.dumps([cell, row]) + "\n")
    print(format_row(size, kind, tokenizer, processes, row), flush=True)
    peaks = [value for name, value in row.items() if name.endswith(("resident", "workers"))]
    return kind != "ours" or (bool(row) and max(peaks) < LIMIT)


if __name__ == "__main__":
    main()
