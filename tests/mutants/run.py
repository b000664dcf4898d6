"""Break the package in every way of the table, and see which test notices: `make mutants`.

Each mutant is applied to a copy of the working tree, and the tests named for its file run there until one fails. That test is then asked
again without the mutant: it counts if it passes. What came out is kept, and taken again while the mutant, its file and its tests are as
they were; so a run that was stopped goes on.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from queue import Queue

import hypothesis
import pytest
import torch
import transformers
from table import MUTANTS
from table import TESTS
from table import Mutant
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "runs" / "mutants.json"
PAGE = ROOT / "docs" / "benchmarks" / "mutants.md"
LIMIT = 900
"""Seconds after which a mutant counts as noticed: no file of the default run takes so long."""
PRELOADED = [
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.trainer",
    "transformers.modeling_utils",
    "datasets",
    "accelerate",
]
SAID, FAILED = "said.txt", "failed.txt"


def main() -> int:
    """Run the mutants, write the page, and return 1 if any was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name or file contains this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    given = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if given.only in f"{mutant.file} {mutant.name}"]
    if not chosen:
        parser.error(f"--only {given.only!r} is in no name and no file of {len(MUTANTS)} mutants")
    preload()
    found = run_all(chosen, given.jobs)
    survivors = [mutant.name for mutant in chosen if found[mutant.name]["test"] is None]
    if len(chosen) == len(MUTANTS):
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed")
    for name in survivors:
        print(f"not noticed: {name}")
    return bool(survivors)


def run_all(mutants: list[Mutant], jobs: int) -> dict[str, dict]:
    """Return what came out of each mutant, by name; nothing is run twice."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    known = {mutant.name: kept.get(digest(mutant)) for mutant in mutants}
    waiting = [mutant for mutant in mutants if known[mutant.name] is None]
    with copies(jobs if waiting else 0) as folders, ThreadPoolExecutor(jobs) as pool:

        def work(mutant: Mutant) -> tuple[Mutant, dict]:
            folder = folders.get()
            try:
                return mutant, run_one(mutant, folder)
            finally:
                folders.put(folder)

        for mutant, result in tqdm(pool.map(work, waiting), "Mutants", len(waiting)):
            known[mutant.name] = kept[digest(mutant)] = result
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return known  # pyright: ignore[reportReturnType]


def tests_of(mutant: Mutant) -> list[str]:
    """Return the files of tests that are asked, in order."""
    return [f"tests/test_{name}.py" for name in dict.fromkeys((*mutant.tests, *TESTS[mutant.file]))]


def digest(mutant: Mutant) -> str:
    """Return a digest of the mutant, its file and its tests."""
    files = [ROOT / "hf_relpos" / mutant.file, *(ROOT / test for test in tests_of(mutant))]
    content = "\n".join([repr(mutant), *(file.read_text(encoding="utf-8") for file in files)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def run_one(mutant: Mutant, folder: Path) -> dict:
    """Apply a mutant in a copy, and return the test that noticed it, None if none did, and the seconds that took.

    A RuntimeError says which test fails without the mutant too.
    """
    path, started = folder / "hf_relpos" / mutant.file, time.perf_counter()
    whole = path.read_text(encoding="utf-8")
    if whole.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: its piece stands {whole.count(mutant.old)} times in {mutant.file}, not once"
        )
    path.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        test = first_failure(tests_of(mutant), folder)
    finally:
        path.write_text(whole, encoding="utf-8")
    if test is not None and test.startswith("tests/") and first_failure([test], folder) is not None:
        raise RuntimeError(f"{test} fails without the mutant {mutant.name!r} too: mend it, then begin again")
    return {"test": test, "seconds": round(time.perf_counter() - started)}


def first_failure(tests: list[str], folder: Path) -> str | None:
    """Run files of tests or single tests, each in a process of its own, until one fails, and return its name; None if none does."""
    for test in tests:
        (folder / FAILED).unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=ask, args=(test, str(folder)))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            return f"no end within {LIMIT} s"
        if process.exitcode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            if not (folder / FAILED).is_file():
                said = (folder / SAID).read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"{test} ended with {process.exitcode}: {said[-2000:]}")
            return (folder / FAILED).read_text(encoding="utf-8")
    return None


def ask(test: str, folder: str) -> None:
    """Run one file of tests, or one test, in a copy, in a process that has torch and transformers already."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    sys.path[:0] = [folder, f"{folder}/tests"]
    sys.dont_write_bytecode = True
    with open(SAID, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        hypothesis.settings.register_profile(
            "mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate), database=None
        )
        hypothesis.settings.load_profile("mutants")  # a failure is enough: making it small takes minutes
        code = pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=no", test], [WriteFailed(Path(FAILED))])
        sys.stdout.flush()
    os._exit(code)


class WriteFailed:
    """Writes the whole name of a test, or of a file that cannot be read, that fails into a file."""

    def __init__(self, file: Path) -> None:
        self.file = file.absolute()

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.file.write_text(report.nodeid, encoding="utf-8")

    pytest_collectreport = pytest_runtest_logreport


def preload() -> None:
    """Start the process that all others are forked from, with what they import in common."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


@contextmanager
def copies(count: int) -> Iterator["Queue[Path]"]:
    """Give copies of the tracked files of the working tree, which are removed in the end."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutants_") as room:
        folders: Queue[Path] = Queue()
        for number in range(count):
            folder = Path(room, str(number), "copy")
            for name in filter(None, listed.split("\0")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
            folders.put(folder)
        yield folders


def page(found: dict[str, dict]) -> str:
    """Return the page of documentation."""
    caught = [mutant for mutant in MUTANTS if found[mutant.name]["test"] is not None]
    files = Counter(mutant.file for mutant in MUTANTS)
    noticed = Counter(mutant.file for mutant in caught)
    rows = [f"| `{file}` | {noticed[file]} of {count} |" for file, count in files.items()]
    listed = [f"| `{m.file}` | {m.name} | {_named(found[m.name]['test'])} |" for m in MUTANTS]
    lines = [
        "# Which ways of breaking the code the tests notice",
        "",
        f"**Conclusion: the tests of the default run notice {len(caught)} of {len(MUTANTS)} ways to break the package.**",
        "",
        "Each mutant replaces one piece of one file, in a copy. The tests for that file then run until one fails. `make mutants` does "
        "it again; the ways stand in `tests/mutants/table.py`.",
        "",
        f"Measured on {date.today()} with Python {platform.python_version()}, torch {torch.__version__} and transformers "
        f"{transformers.__version__}.",
        "",
        "| file | noticed |",
        "|---|---|",
        *rows,
        "",
        "## Every mutant",
        "",
        "| file | what is broken | test that notices it |",
        "|---|---|---|",
        *listed,
    ]
    return "\n".join(lines) + "\n"


def _named(test: str | None) -> str:
    if test is None:
        return "**none**"
    return "`{}`".format(test.removeprefix("tests/").replace("|", r"\|")) if test.startswith("tests/") else test


if __name__ == "__main__":
    sys.exit(main())
