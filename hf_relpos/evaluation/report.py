"""The report of a comparison: what to conclude first, then tables and plots, then how it was made."""

import json
import platform
import shlex
from typing import Any

import torch
import transformers

from hf_relpos.evaluation.cells import CellFolder
from hf_relpos.evaluation.cells import code_digest
from hf_relpos.evaluation.cells import write_bytes
from hf_relpos.evaluation.comparison import cells_root
from hf_relpos.evaluation.cost_findings import cost_parts
from hf_relpos.evaluation.findings import conclusions
from hf_relpos.evaluation.findings import task_parts
from hf_relpos.evaluation.page import Code
from hf_relpos.evaluation.page import Heading
from hf_relpos.evaluation.page import Part
from hf_relpos.evaluation.page import Plot
from hf_relpos.evaluation.page import Points
from hf_relpos.evaluation.page import Table
from hf_relpos.evaluation.page import Text
from hf_relpos.evaluation.page import as_html
from hf_relpos.evaluation.page import as_markdown
from hf_relpos.evaluation.plan import Comparison
from hf_relpos.evaluation.table import COSTS
from hf_relpos.evaluation.table import RESULTS
from hf_relpos.evaluation.table import cost_rows
from hf_relpos.evaluation.table import reasons
from hf_relpos.evaluation.table import result_rows
from hf_relpos.evaluation.table import write_table

SIZES = {
    None: "Models of a task have the same shape, so their parameters differ by what a scheme adds; the tables of costs say by how much.",
    "parameters": "Models of a task have the same number of parameters within 1 %: a wider feed-forward makes up for what a scheme "
    "has fewer.",
}
METHOD = (
    "Values are means over seeds with their 95 % interval (Student's t). A difference is paired by seed: the same data in the same "
    "order. Its noise is pooled over all pairs of schemes, and p-values are corrected by Holm's method within each task, metric and "
    "length. Ranks are the places that a scheme may take given all pairs: schemes inside the noise share them.",
    "At every length the same tokens are scored, without training again: a longer length gives them more context. Models with "
    "memory read segments of the trained length.",
    "Operations are those of the matrix products of a training step where every query meets every key. Processor time is that of a "
    "step beside a step of the baseline in the same process; it and peak memory depend on the machine.",
)


def write_results(comparison: Comparison) -> str:
    """Write `table.parquet`, `cost.parquet`, `curves.json`, `report.md` and `report.html`.

    Returns:
        A summary in words.
    """
    output = comparison.output
    rows, costs = result_rows(comparison), cost_rows(comparison)
    curves = read_curves(comparison)
    (output / "figures").mkdir(parents=True, exist_ok=True)
    write_table(output / "table.parquet", rows, RESULTS)
    write_table(output / "cost.parquet", costs, COSTS)
    write_bytes(output / "curves.json", (json.dumps(curves, indent=1) + "\n").encode())
    parts = report_parts(comparison, rows, costs, curves)
    for part in parts:
        if isinstance(part, Plot):
            write_bytes(output / "figures" / f"{part.name}.svg", part.svg.encode())
    write_bytes(output / "report.md", as_markdown(comparison.title, parts).encode())
    write_bytes(output / "report.html", as_html(comparison.title, parts).encode())
    return "\n".join(
        [*conclusions(comparison, rows), "", f"Report: {output / 'report.html'}, numbers: {output / 'table.parquet'}"]
    )


def read_curves(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the raw curves of every finished cell, with the digest of its data and its notes."""
    found = []
    for cell in comparison.cells:
        result = CellFolder(cells_root(comparison), cell).result
        if result is not None:
            kept = {name: value for name, value in result.items() if name != "rows"}
            found.append({"task": cell.task, "scheme": cell.scheme, "seed": cell.seed, "cell": cell.name} | kept)
    return found


def _only_costs(comparison: Comparison) -> str:
    """Return a sentence on baselines that were not run."""
    absent = dict.fromkeys(name for name in comparison.baselines.values() if name not in comparison.schemes)
    return "".join(f" The baseline {name} is none of the schemes: only costs are given relative to it." for name in absent)


def report_parts(
    comparison: Comparison, rows: list[dict[str, Any]], costs: list[dict[str, Any]], curves: list[dict[str, Any]]
) -> list[Part]:
    """Return the whole report."""
    parts: list[Part] = [
        Heading("What to conclude"),
        Points(tuple(conclusions(comparison, rows))),
        Text(
            f"{len(comparison.schemes)} schemes, {len(comparison.seeds)} seeds ({', '.join(map(str, comparison.seeds))}), "
            f"{len(comparison.tasks)} tasks. {SIZES[comparison.match]}{_only_costs(comparison)}"
        ),
    ]
    for task in comparison.tasks:
        parts += task_parts(comparison, task, rows, curves)
    parts += cost_parts(comparison, rows, costs, curves)
    without = reasons(rows)
    if without:
        parts += [Heading("What has no number"), Table("Cells and lengths without a result, with the reason.",
                  ("task", "scheme", "where", "reason"), tuple(without))]  # fmt: skip
    return [*parts, *_origin(comparison, costs, curves)]


def _origin(comparison: Comparison, costs: list[dict[str, Any]], curves: list[dict[str, Any]]) -> list[Part]:
    """Return how the report was made: command, versions, settings, digests of the data."""
    command = (
        f"python -m hf_relpos compare {shlex.quote(str(comparison.file))} --output_dir {shlex.quote(str(comparison.output))}"
    )
    texts = {cell.task: cell.text for cell in comparison.cells if cell.text}
    digests = [
        (task, split, str(facts["bytes"]), facts["sha256"])
        for task, text in texts.items()
        for split, facts in text.items()
        if isinstance(facts, dict)
    ]
    seen: dict[tuple[str, str, str, str], None] = {}
    for one in curves:
        if one["task"] not in texts:
            seen[(one["task"], f"training examples, seed {one['seed']}", "", one["data"])] = None
    notes = sorted({f"{one['task']}: {note}" for one in curves for note in one["notes"]})
    versions = f"Code {code_digest()}, Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}."
    machines = sorted({one["machine"] for one in costs if "machine" in one})
    return [
        Heading("How it was made"),
        *map(Text, METHOD),
        Code(command),
        Text("To run one row anew, remove its folder under `cells` and give the command again."),
        Text(" ".join([versions, *(f"Run on {machine}." for machine in machines)])),
        *([Points(tuple(notes))] if notes else []),
        Table("Data: bytes and SHA-256.", ("task", "data", "bytes", "SHA-256"), tuple([*digests, *seen])),
        Code(comparison.file.read_text(encoding="utf-8")),
    ]
