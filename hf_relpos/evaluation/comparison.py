"""Run the cells of a comparison: one after another in this process, side by side with others that share the folder."""

import contextlib
import dataclasses
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from hf_relpos.evaluation.cells import COST
from hf_relpos.evaluation.cells import ERROR
from hf_relpos.evaluation.cells import Cell
from hf_relpos.evaluation.cells import CellFolder
from hf_relpos.evaluation.cells import read_json
from hf_relpos.evaluation.outcome import Output
from hf_relpos.evaluation.plan import Comparison
from hf_relpos.evaluation.tasks import run_cell

# Steps that are timed for the estimate of a task of which no cell is finished.
TIMED_STEPS = 2
Run = Callable[[Cell], Output]


def cells_root(comparison: Comparison) -> Path:
    """Return the folder of all cells."""
    return comparison.output / "cells"


def applicable(comparison: Comparison) -> list[Cell]:
    """Return the cells that can be run at all."""
    return [cell for cell in comparison.cells if cell.not_applicable is None]


def run_cells(comparison: Comparison, run: Run = run_cell) -> None:
    """Run what is not finished and what nobody else works on; a cell that failed before is tried once more.

    A failed cell leaves its error and stops no other.
    """
    root, began = cells_root(comparison), time.time()
    root.mkdir(parents=True, exist_ok=True)
    with errors_only("hf_relpos"):  # what there is to say of the text was said for the plan
        for cell in tqdm(applicable(comparison), desc="cells", disable=None):
            folder = CellFolder(root, cell)
            error = folder.path / ERROR
            failed_meanwhile = error.is_file() and error.stat().st_mtime >= began  # another process has just tried
            if not failed_meanwhile and folder.claim():
                run_claimed(folder, cell, run)


def failed_cells(comparison: Comparison) -> list[CellFolder]:
    """Return the folders of the cells whose last try failed."""
    folders = (CellFolder(cells_root(comparison), cell) for cell in applicable(comparison))
    return [folder for folder in folders if folder.error]


def run_claimed(folder: CellFolder, cell: Cell, run: Run) -> None:
    """Run one cell, write its results or its error, and let go of it."""
    try:
        with (folder.path / "log.txt").open("w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            folder.write(*run(cell))
    except Exception as stop:  # whatever it is, the other cells go on
        folder.write_error(stop)
        print(f"{cell.name} failed: {folder.error}", file=sys.stderr)
    finally:
        folder.release()


@contextlib.contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Let a logger say errors only, for a while."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def start_others(comparison: Comparison, count: int) -> list[subprocess.Popen[bytes]]:
    """Start more processes that work on the same folder."""
    words = ["compare", str(comparison.file), "--output_dir", str(comparison.output)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "hf_relpos", *words]
    return [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(count)]


def estimate_seconds(comparison: Comparison, run: Run = run_cell) -> dict[str, float]:
    """Return the seconds of a cell of each task: recorded ones of finished cells, else from a few timed steps."""
    root, found = cells_root(comparison), {}
    for task in comparison.tasks:
        cells = [cell for cell in applicable(comparison) if cell.task == task]
        known = [cost["seconds"] for cell in cells if (cost := read_json(root / cell.name / COST))]
        found[task] = statistics.mean(known) if known else _time(cells[0], run) if cells else 0.0
    return found


def _time(cell: Cell, run: Run) -> float:
    """Estimate the seconds of a cell from its first steps; evaluation and measurement of its cost are made in full."""
    settings = {**cell.settings, "max_steps": TIMED_STEPS, "eval_strategy": "no"}
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        _, cost = run(dataclasses.replace(cell, settings=settings))
    steps = cell.settings["max_steps"] / TIMED_STEPS
    return cost["seconds"] + (steps - 1) * cost["train_seconds"]


def format_plan(comparison: Comparison, seconds: dict[str, float]) -> str:
    """Format what is to be run, and about how long it takes one process, as Markdown."""
    root = cells_root(comparison)
    lines = [
        f"{len(comparison.schemes)} schemes x {len(comparison.seeds)} seeds x {len(comparison.tasks)} tasks, "
        f"in {comparison.output}",
        "",
        "| task | cells | not applicable | finished | to run | seconds a cell | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    total = 0.0
    for task in comparison.tasks:
        cells = [cell for cell in comparison.cells if cell.task == task]
        able = [cell for cell in cells if cell.not_applicable is None]
        left = sum(not CellFolder(root, cell).finished for cell in able)
        minutes = left * seconds[task] / 60
        total += minutes
        cells_of = f"{len(cells)} | {len(cells) - len(able)} | {len(able) - left} | {left}"
        lines.append(f"| {task} | {cells_of} | {seconds[task]:.1f} | {minutes:.1f} |")
    held = [holder for cell in applicable(comparison) if (holder := CellFolder(root, cell).holder())]
    lines += ["", f"About {total:.0f} minutes for one process; processes that share the folder share the time."]
    return "\n".join([*lines, *(f"Claimed by {holder}." for holder in held)]) + "\n"
