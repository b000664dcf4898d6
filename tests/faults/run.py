"""Try faults on runs, comparisons, conversions and uploads, and see whether what is run again ends as if there had been none.

    python tests/faults/run.py --times 20 --seed 0        # make faults: the long run, which writes the page

What came out of each try is kept while the code stands as it is, so a run that was stopped goes on. A failure says its kind, job and
seed: `--only KIND --job JOB --seed N --times 1` tries it again.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import as_completed
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from hub import Skipped
from kinds import KINDS
from running import LATE
from tqdm import tqdm
from tries import Try
from tries import Whole
from tries import run_whole

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "runs" / "faults.json"
PAGE = ROOT / "docs" / "benchmarks" / "faults.md"
HUB = ROOT.parent / "shared" / "tools" / "hub_server.py"
BY_HAND, TABLE = "## What the faults found", "## Every row"
"""Headings of the page: the section between them is written by hand, and kept."""
PRELOADED = [
    "hf_relpos",
    "hf_relpos.__main__",
    "hf_relpos.training.run",
    "hf_relpos.training.segment_trainer",
    "transformers.trainer",
]
PRELOADED += [
    "transformers.models.gpt2.modeling_gpt2",
    "datasets",
    "accelerate",
    "torch._dynamo",
    "matplotlib.figure",
    "psutil",
]


def main() -> int:
    """Try the faults, write the page, and return 1 if any try failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="tries of each kind of fault with each job")
    parser.add_argument("--seed", type=int, default=0, help="of the first try")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--job", default="", help="jobs whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    parser.add_argument("--hub", type=Path, default=HUB, help="script that plays the Hub")
    given = parser.parse_args()
    rows = [(kind, job) for kind, (_, jobs) in KINDS.items() for job in jobs if given.only in kind and given.job in job]
    if not rows:
        parser.error(f"--only {given.only!r} with --job {given.job!r} is none of {', '.join(KINDS)}")
    preload()
    found = try_all(rows, range(given.seed, given.seed + given.times), given.jobs, given.hub)
    failed = [f"{kind}, {job}, seed {seed}: {what}" for (kind, job, seed), what in found.items() if what.startswith("FAILED")]
    if not (given.only or given.job):
        PAGE.write_text(page(found, given, written_by_hand()), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")
    counts = Counter("failed" if what.startswith("FAILED") else what for what in found.values())
    print(f"{len(found)} tries: {dict(counts)}")
    print("\n".join(failed))
    return bool(failed)


def try_all(rows: list[tuple[str, str]], seeds: range, jobs: int, hub: Path) -> dict[tuple[str, str, int], str]:
    """Return what came out of each try of each row, by kind, job and seed; nothing is tried twice."""
    code, kept = code_digest(), json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    wanted = [(kind, job, seed) for seed in seeds for kind, job in rows]
    known = {key: kept[f"{code} {key}"] for key in wanted if f"{code} {key}" in kept}
    with tempfile.TemporaryDirectory(prefix="faults_") as made, ThreadPoolExecutor(jobs) as pool:
        folder, wholes = Path(made), {}
        waiting = [key for key in wanted if key not in known]
        for job in dict.fromkeys(job for _, job, _ in waiting):
            wholes[job] = whole_of(job, folder, hub)

        def work(key: tuple[str, str, int]) -> str:
            kind, job, seed = key
            return try_one(kind, job, seed, folder, wholes[job], hub)

        futures = {pool.submit(work, key): key for key in waiting}
        for future in tqdm(as_completed(futures), "Tries", len(waiting)):
            key, what = futures[future], future.result()
            known[key] = what
            if what.startswith("FAILED"):
                tqdm.write(f"{key}: {what}")
            else:
                kept[f"{code} {key}"] = what
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return {key: known[key] for key in wanted}


def whole_of(job: str, folder: Path, hub: Path) -> Whole | str:
    """Run a job undisturbed, twice: its second time is that of a machine that has read all files; or say why it cannot be."""
    try:
        name = job.replace(" ", "_")
        first, second = (run_whole(job, folder / f"begun_{name}", folder / f"whole_{name}_{turn}", hub) for turn in "12")
        assert first.outcome == second.outcome, f"{job} does not give the same bits twice"
        return second
    except Skipped as reason:
        return str(reason)


def try_one(kind: str, job: str, seed: int, folder: Path, whole: Whole | str, hub: Path) -> str:
    """Return what came of one try: a word of the fault, `skipped` with the reason, or `FAILED` with what was wrong."""
    if isinstance(whole, str):
        return f"skipped: {whole}"
    room = folder / hashlib.sha256(f"{kind} {job} {seed}".encode()).hexdigest()[:12] / "room"
    room.parent.mkdir()
    try:
        return KINDS[kind][0](Try(job, room, random.Random(f"{kind} {job} {seed}"), whole, hub))
    except Skipped as reason:
        return f"skipped: {reason}"
    except AssertionError as error:
        return f"FAILED: {error}"
    except Exception:
        return f"FAILED: {traceback.format_exc()[-1500:]}"
    finally:
        shutil.rmtree(room.parent, ignore_errors=True)


def code_digest() -> str:
    """Return a digest of the package and of the faults: what came out of other code does not count."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "hf_relpos").rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def preload() -> None:
    """Start the process that all jobs are forked from, with what they import in common."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    sys.path[:0] = [str(ROOT)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def written_by_hand() -> str:
    """Return the section of the page that says what the faults found, which no run can write."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    return text[text.index(BY_HAND) : text.index(TABLE)] if BY_HAND in text and TABLE in text else ""


def page(found: dict[tuple[str, str, int], str], given: Any, by_hand: str) -> str:
    """Return the page of documentation, with the section written by hand in its middle."""
    failed = sum(what.startswith("FAILED") for what in found.values())
    late = sum(what == LATE for what in found.values())
    skipped = {what for what in found.values() if what.startswith("skipped")}
    rows = []
    for kind, job in dict.fromkeys((kind, job) for kind, job, _ in found):
        words = Counter(what.partition(":")[0] for (k, j, _), what in found.items() if (k, j) == (kind, job))
        count = words.pop("FAILED", 0)
        rows.append(
            f"| {kind} | {job} | {given.times} | {', '.join(f'{n} {word}' for word, n in words.most_common())} | {count} |"
        )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__} and datasets {datasets.__version__}"
    lines = [
        "# What faults do to runs",
        "",
        f"**Conclusion: of {len(found):,} tries, {failed} failed.** In {late} of them the job had finished before the fault came.",
        "",
        "Each try lets a tiny job meet one fault, then runs the same command again. A try is good if the newest whole checkpoint is still "
        "there, and if the job ends with the bits of an undisturbed one: weights, optimizer, log and results. A fault that cannot be "
        "repaired must be refused, by one line that names the file or the value. `make faults` does it again, and "
        "`tests/faults/kinds.py` leads to what each kind does.",
        "",
        f"{given.times} tries of each row, seeds {given.seed} to {given.seed + given.times - 1}, measured on {date.today()} with Python "
        f"{platform.python_version()}, {versions}. Moments are drawn from the time of the job, so other runs meet other moments.",
        "",
        *(f"Not tried here ({reason.removeprefix('skipped: ')}).\n" for reason in sorted(skipped)),
        f"{by_hand}{TABLE}",
        "",
        "| fault | job | tries | what came of them | failed |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
