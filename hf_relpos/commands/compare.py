"""`compare`: all cells of a comparison file, or one `train_lm.py` run for each choice and seed."""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_relpos.data.sources import Documents
from hf_relpos.evaluation.cells import ERROR
from hf_relpos.evaluation.comparison import estimate_seconds
from hf_relpos.evaluation.comparison import failed_cells
from hf_relpos.evaluation.comparison import format_plan
from hf_relpos.evaluation.comparison import run_cells
from hf_relpos.evaluation.comparison import start_others
from hf_relpos.evaluation.plan import read_comparison
from hf_relpos.evaluation.report import write_results
from hf_relpos.evaluation.statistics import interval
from hf_relpos.evaluation.statistics import ranks
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.run import carries_memory
from hf_relpos.training.run import plan_run
from hf_relpos.training.run_folder import RECORD
from hf_relpos.training.run_folder import WATCHED
from hf_relpos.training.run_folder import differences
from hf_relpos.training.run_folder import find_progress
from hf_relpos.training.run_folder import holds_work
from hf_relpos.training.run_folder import read_record
from hf_relpos.training.texts import needed_documents

RUN = "import hf_relpos; from hf_relpos.training.run import main; main()"
ALL_SCHEMES = {"all": [name for name, kind in SCHEMES.items() if "causal" not in kind.refuses]}


@dataclass(frozen=True)
class Choice:
    """One row of the table: the arguments that it sets, by name."""

    settings: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """Return the values as the table and the folders show them."""
        return "-".join(value for _, value in self.settings)

    @property
    def argv(self) -> list[str]:
        """Return the arguments for `train_lm.py`."""
        return [word for key, value in self.settings for word in (f"--{key}", value)]


def choices(varied: Sequence[str]) -> list[Choice]:
    """Return all combinations of `argument=value,value,...`; `position_scheme=all` stands for every decoder scheme.

    Raises:
        ValueError: a piece that is not of that form.
    """
    axes = []
    for text in varied:
        key, mark, values = text.partition("=")
        if not mark or not values:
            raise ValueError(f"--vary {text!r} is not of the form argument=value,value,...")
        listed = ALL_SCHEMES.get(values, values.split(",")) if key == "position_scheme" else values.split(",")
        axes.append([(key, value) for value in listed])
    return [Choice(combination) for combination in itertools.product(*axes)]


@dataclass(frozen=True)
class Task:
    """One run of a comparison: its choice, its seed, its folder, and its command line for `train_lm.py`."""

    choice: Choice
    seed: int
    folder: Path
    argv: tuple[str, ...]


def tasks_of(config: str, varied: Sequence[Choice], seeds: Sequence[int], output: Path, rest: Sequence[str]) -> list[Task]:
    """Return the runs of a comparison.

    Raises:
        ValueError: two of them would share a folder.
    """
    tasks = []
    for choice, seed in itertools.product(varied, seeds):
        folder = output / f"{choice.name}-seed{seed}"
        own = ["--seed", str(seed), "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
        argv = [config, *choice.argv, *own, "--disable_tqdm", "true", "--sample_tokens", "0", *rest]
        tasks.append(Task(choice, seed, folder, tuple(argv)))
    folders = [task.folder for task in tasks]
    if doubled := sorted({str(folder) for folder in folders if folders.count(folder) > 1}):
        raise ValueError(f"two runs would share the folder {doubled[0]}: vary or seeds name the same values twice")
    return tasks


def known_results(task: Task, load: Callable[[DataArguments, RunArguments], Documents]) -> dict[str, Any] | None:
    """Return the metrics of a run that was made before, None if it is yet to be made or finished.

    Args:
        task: the run.
        load: loads the text that its arguments name.

    Raises:
        ValueError: the folder holds a run of other settings, text or weights, or one of which that is unknown.
    """
    plan = plan_run(list(task.argv), load)
    if not holds_work(task.folder):
        return None
    way_out = "choose another --output_dir, or remove the folder to run it again"
    if not (task.folder / RECORD).is_file():
        raise ValueError(f"{task.folder} holds results whose settings are not known (it has no {RECORD}): {way_out}")
    old = read_record(task.folder)
    changed = [
        f"{name}: {was!r} there, {value!r} here" for name, (was, value) in differences(old, plan.record, WATCHED).items()
    ]
    changed += [f"its settings were changed at step {resumed['step']}" for resumed in old.get("resumed", [])]
    if changed:
        raise ValueError(f"{task.folder} holds a run of other settings ({'; '.join(changed)}): {way_out}")
    finished = not plan.args.do_train or find_progress(plan.args, memory=carries_memory(plan.config))[1]
    results = task.folder / "all_results.json"
    found = json.loads(results.read_text(encoding="utf-8")) if finished and results.is_file() else {}
    return found if "eval_loss" in found else None


def run_one(task: Task) -> dict[str, Any]:
    """Train one choice with one seed, or go on with it; returns its metrics.

    Raises:
        ValueError: the run failed; the message ends with its last line.
    """
    command = [sys.executable, "-c", RUN, *task.argv]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    results = task.folder / "all_results.json"
    if done.returncode or not results.is_file():
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise ValueError(f"the run {task.folder.name} failed: {' '.join(last)}")
    return json.loads(results.read_text(encoding="utf-8"))


def summarise(found: dict[Choice, list[dict[str, Any]]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row a choice, the best mean of the validation loss first: means over seeds, and the places that it may take.

    Args:
        found: the metrics of each choice, one for each seed.
        seeds: the seeds.
    """

    def mean(runs: list[dict[str, Any]], key: str) -> float | None:
        values = [run[key] for run in runs if key in run]
        return statistics.mean(values) if values else None

    losses = {
        choice.name: {seed: run["eval_loss"] for seed, run in zip(seeds, runs, strict=True)} for choice, runs in found.items()
    }
    places = ranks(losses, lower_is_better=True)
    rows = []
    for choice, runs in found.items():
        loss, rank = interval(list(losses[choice.name].values())), places[choice.name]
        row = dict(choice.settings) | {"seeds": len(runs), "eval_loss": loss.mean}
        row["rank"] = None if loss.high is None else f"{rank.first}-{rank.last}" if rank.first < rank.last else str(rank.first)
        row["interval"] = None if loss.high is None else loss.high - loss.mean
        row |= {key: mean(runs, key) for key in ("eval_bits_per_byte", "eval_perplexity", "eval_accuracy", "train_runtime")}
        rows.append(row)
    return sorted(rows, key=lambda row: row["eval_loss"])


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table; leave out columns without a number."""
    columns = [column for column in rows[0] if any(row[column] is not None for row in rows)]

    def cell(value: Any) -> str:
        return (
            ""
            if value is None
            else f"{value:.4g}"
            if isinstance(value, float) and value >= 10
            else (f"{value:.4f}" if isinstance(value, float) else str(value))
        )

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(cell(row[column]) for column in columns) + " |" for row in rows]) + "\n"


def draw(found: dict[Choice, list[dict[str, Any]]], path: Path) -> None:
    """Draw a dot for each run: validation loss across, choices down, the best on top."""
    from matplotlib.figure import Figure

    ordered = sorted(found, key=lambda choice: -statistics.mean(run["eval_loss"] for run in found[choice]))
    figure = Figure(figsize=(6, 0.8 + 0.3 * len(ordered)), layout="constrained")
    axes = figure.add_subplot()
    for place, choice in enumerate(ordered):
        losses = [run["eval_loss"] for run in found[choice]]
        axes.plot(losses, [place] * len(losses), "o", color="tab:blue", alpha=0.7)
    axes.set_yticks(range(len(ordered)), [choice.name for choice in ordered])
    axes.set_xlabel("validation loss (nats a token)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)


def add_compare(commands: Any) -> None:
    """Add `compare`, which runs a comparison from its file, or several choices and seeds of one run."""
    parser = commands.add_parser("compare", help="compare schemes over seeds and tasks, or the choices of --vary over seeds")
    parser.add_argument(
        "config",
        help="comparison, such as configs/compare/quick.yaml; with --vary, YAML file of train_lm.py that all runs share",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be run and about how long it takes")
    parser.add_argument("--vary", action="append", metavar="ARGUMENT=VALUE,VALUE", help="what differs; may be given twice")
    parser.add_argument("--seeds", type=int, nargs="+", help="with --vary: seeds of each choice (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--output_dir", help="folder for the runs and what comes out (default: that of the comparison)")
    parser.epilog = "With --vary, what stands after -- are further arguments of train_lm.py for all runs."
    parser.set_defaults(run=run_compare)


def run_compare(arguments: argparse.Namespace) -> None:
    """Run a comparison, or the choices of `--vary`; what is finished is not repeated."""
    if arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs} must be at least 1")
    if arguments.vary:
        if arguments.output_dir is None or arguments.dry_run:
            raise ValueError("--vary needs --output_dir, and has no --dry-run")
        run_choices(arguments)
    elif arguments.seeds or arguments.rest:
        raise ValueError("--seeds and arguments after -- belong to --vary; a comparison has them in its file")
    else:
        run_file(arguments)


def run_file(arguments: argparse.Namespace) -> None:
    """Run the cells of a comparison file, then write its tables and reports."""
    comparison = read_comparison(arguments.config, arguments.output_dir)
    if arguments.dry_run:
        print(format_plan(comparison, estimate_seconds(comparison)))
        return
    others = start_others(comparison, arguments.jobs - 1)
    try:
        run_cells(comparison)
    finally:
        for other in others:
            other.wait()
    print(write_results(comparison))
    if failed := failed_cells(comparison):
        raise ValueError(f"{len(failed)} cells failed, such as {failed[0].path / ERROR}; the same command tries them again")


def run_choices(arguments: argparse.Namespace) -> None:
    """Run what is missing, then write the table; finished runs of the same settings are not repeated."""
    output = Path(arguments.output_dir)
    tasks = tasks_of(arguments.config, choices(arguments.vary), arguments.seeds or [0], output, arguments.rest)
    load = _load_once()
    known = [known_results(task, load) for task in tasks]  # before the first run, not in the middle of the last

    def run(task: Task, metrics: dict[str, Any] | None) -> dict[str, Any]:
        return run_one(task) if metrics is None else metrics

    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(tqdm(pool.map(run, tasks, known), total=len(tasks), desc="runs"))
    found: dict[Choice, list[dict[str, Any]]] = {}
    for task, metrics in zip(tasks, results, strict=True):
        found.setdefault(task.choice, []).append(metrics)
    rows = summarise(found, arguments.seeds or [0])
    (output / "comparison.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    (output / "comparison.md").write_text(as_markdown(rows), encoding="utf-8")
    draw(found, output / "comparison.png")
    print(as_markdown(rows))


def _load_once() -> Callable[[DataArguments, RunArguments], Documents]:
    """Return a loader that reads each text once, however many runs share it."""
    kept: dict[str, Documents] = {}

    def load(data: DataArguments, args: RunArguments) -> Documents:
        key = repr((data, args.do_train, args.do_eval, args.do_predict))
        if key not in kept:
            kept[key] = needed_documents(data, args)
        return kept[key]

    return load
