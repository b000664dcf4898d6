"""How much memory and time it takes to prepare a text, and to begin to train on it.

    python tests/benchmarks/data_scale.py                    # 10 and 100 MB
    python tests/benchmarks/data_scale.py --sizes 1000 --tokenizers byte --kinds ours

The text is the standard library's sources again and again, each document with a running number, so that no two are the same: JSON
lines, or one long document (`--shape txt`). Every measurement is a process of its own with an empty cache. It prepares the text
(reads, splits, describes, tokenizes and cuts it), takes three steps with a tiny model that has segment memory, and prepares the text
a second time. Beside it stands run_clm's way of grouping texts. Memory is the largest resident set of the process (`VmHWM`); it
counts mapped files, and torch and transformers alone take about 500 MiB.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = ["--config_overrides", "hidden_size=16,num_hidden_layers=1,num_attention_heads=2", "--block_size", "256"]
TINY += ["--max_steps", "3", "--per_device_train_batch_size", "4", "--report_to", "none", "--disable_tqdm", "true"]
TINY += ["--save_strategy", "no", "--eval_strategy", "no", "--sample_tokens", "0", "--use_cpu", "true", "--mem_len", "64"]
LIMIT = 1536  # MiB, at every size
HEAD = "| text, MB | way | tokenizer | processes | MB/s | preparation, MiB | largest worker, MiB | first steps, MiB | second start, s |"


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


def peak() -> float:
    """Return the largest resident set of this process since the last call, in MiB."""
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split()[0]) / 1024


def ours(path: Path, tokenizer: str, processes: int, folder: Path) -> dict[str, float]:
    """Prepare the text twice and train a few steps."""
    from hf_relpos.training.run import prepare

    argv = ["--train_file", str(path), "--tokenizer_name", tokenizer, "--preprocessing_num_workers", str(processes), *TINY]
    argv += ["--do_train", "--do_eval", "--output_dir", str(folder / "run")]
    start = time.perf_counter()
    job = prepare(argv)
    found = {"seconds": time.perf_counter() - start, "preparation": peak()}
    job.trainer.train()
    found["steps"] = peak()
    start = time.perf_counter()
    prepare(argv)
    return found | {"again": time.perf_counter() - start}


def run_clm(path: Path, tokenizer: str, processes: int, folder: Path) -> dict[str, float]:
    """Tokenize and group as transformers' example does."""
    from datasets import load_dataset

    from hf_relpos.data.tokenizers import load_tokenizer

    start = time.perf_counter()
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
    return {"seconds": time.perf_counter() - start, "preparation": peak()}


def measure(kind: str, path: Path, tokenizer: str, processes: int) -> dict[str, float]:
    """Run one measurement in a process with an empty cache; a row of numbers, none if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HF_HOME": folder, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TMPDIR": folder}
        argv = [sys.executable, __file__, "--one", kind, str(path), tokenizer, str(processes), folder]
        done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:] or f"ended by signal {-done.returncode}", file=sys.stderr)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every size, tokenizer and number of processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100], help="megabytes (default: 10 100)")
    parser.add_argument("--shape", choices=["jsonl", "txt"], default="jsonl")
    parser.add_argument("--tokenizers", nargs="+", default=["byte", "bpe"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", default=["ours", "run_clm"])
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kind, path, tokenizer, processes, folder = given.one
        found = {"ours": ours, "run_clm": run_clm}[kind](Path(path), tokenizer, int(processes), Path(folder))
        found["workers"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(json.dumps(found))
        return
    print(HEAD, "|" + "---|" * HEAD[1:].count("|"), sep="\n")
    exceeded = False
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"text.{given.shape}")
            write_text(path, size)
            runs = [
                (kind, tokenizer, number)
                for kind in given.kinds
                for tokenizer in given.tokenizers
                for number in given.processes
            ]
            for kind, tokenizer, processes in runs:
                row = measure(kind, path, tokenizer, processes)
                peaks = [row.get(name, 0.0) for name in ("preparation", "workers", "steps")]
                exceeded |= kind == "ours" and not (row and max(peaks) < LIMIT)
                cells = [
                    f"{size / row['seconds']:.2f}" if row else "failed",
                    *(f"{value:,.0f}" if value else "" for value in peaks),
                ]
                cells.append(f"{row['again']:.1f}" if "again" in row else "")
                print(f"| {size} | {kind} | {tokenizer} | {processes} |", " | ".join(cells), "|", flush=True)
    sys.exit(f"a peak is not below {LIMIT} MiB" if exceeded else 0)


if __name__ == "__main__":
    main()
