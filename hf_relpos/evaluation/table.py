"""The results of a comparison as tidy tables: one row for each scheme, seed, task, length and metric."""

import io
from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hf_relpos.evaluation.cells import COST
from hf_relpos.evaluation.cells import CellFolder
from hf_relpos.evaluation.cells import read_json
from hf_relpos.evaluation.cells import write_bytes
from hf_relpos.evaluation.comparison import cells_root
from hf_relpos.evaluation.plan import Comparison

Row = dict[str, Any]

RESULTS = pa.schema(
    [
        *[("task", pa.string()), ("scheme", pa.string()), ("seed", pa.int64()), ("length", pa.int64())],
        *[("metric", pa.string()), ("value", pa.float64()), ("reason", pa.string())],
    ]
)
COSTS = pa.schema(
    [
        *[("task", pa.string()), ("scheme", pa.string()), ("seed", pa.int64()), ("parameters", pa.int64())],
        *[("flops", pa.int64()), ("peak_memory", pa.int64()), ("process_seconds", pa.float64())],
        *[("ratio_to_baseline", pa.float64()), ("train_seconds", pa.float64()), ("seconds", pa.float64())],
    ]
)

HIGHER_IS_BETTER = ("accuracy", "macro_f1", "exact_match", "effective_context")


def result_rows(comparison: Comparison) -> list[Row]:
    """Return the rows of all cells, in the order of the plan; a cell without numbers is a row with the reason."""
    rows: list[Row] = []
    for cell in comparison.cells:
        own = {"task": cell.task, "scheme": cell.scheme, "seed": cell.seed}
        folder = CellFolder(cells_root(comparison), cell)
        result = folder.result
        if result is not None:
            guesses = [row | {"metric": f"chance_{row['metric']}"} for row in result.get("chance", ())]
            rows += [{"length": None, "reason": None} | own | row for row in [*result["rows"], *guesses]]
            continue
        error = folder.error
        reason = cell.not_applicable or (f"failed: {error}" if error else "not finished")
        rows.append(own | {"length": None, "metric": None, "value": None, "reason": reason})
    return rows


def cost_rows(comparison: Comparison) -> list[Row]:
    """Return what each finished cell cost."""
    found = []
    for cell in comparison.cells:
        folder = CellFolder(cells_root(comparison), cell)
        cost = read_json(folder.path / COST) if folder.finished else None
        if cost:
            found.append({"task": cell.task, "scheme": cell.scheme, "seed": cell.seed} | cost)
    return found


def write_table(path: Path, rows: list[Row], schema: pa.Schema) -> None:
    """Write rows as Parquet; the same rows give the same bytes."""
    columns = {name: [row.get(name) for row in rows] for name in schema.names}
    target = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), target)
    write_bytes(path, target.getvalue())


def values_of(rows: Iterable[Row], task: str, metric: str, length: int | None) -> dict[str, dict[int, float]]:
    """Return a metric by scheme and seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if (row["task"], row["metric"], row["length"]) == (task, metric, length) and row["value"] is not None:
            found.setdefault(row["scheme"], {})[row["seed"]] = row["value"]
    return found


def measured(rows: Iterable[Row], task: str) -> dict[str, list[int]]:
    """Return the metrics of a task and the lengths at which they were measured."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if row["task"] == task and row["metric"]:
            lengths = found.setdefault(row["metric"], [])
            if row["length"] not in lengths:
                lengths.append(row["length"])
    return {metric: sorted(lengths) for metric, lengths in found.items()}


def reasons(rows: Iterable[Row]) -> list[tuple[str, str, str, str]]:
    """Return what has no number, each once: task, scheme, where, and the reason."""
    found: dict[tuple[str, str, str, str], None] = {}
    for row in rows:
        if row["reason"]:
            where = "all" if row["length"] is None else f"length {row['length']}"
            found[(row["task"], row["scheme"], where, row["reason"])] = None
    return list(found)


def why_empty(rows: Iterable[Row], task: str) -> dict[tuple[str, int | None], str]:
    """Return, by scheme and length (None: all of them), a word for why there is no number: n/a, failed or not finished."""
    words = {"failed": "failed", "not fi": "not finished"}
    return {
        (row["scheme"], row["length"]): words.get(row["reason"][:6], "n/a")
        for row in rows
        if row["task"] == task and row["reason"]
    }


def lower_is_better(metric: str) -> bool:
    """Return whether a smaller value of a metric is the better one."""
    return metric not in HIGHER_IS_BETTER


def cost_means(rows: Iterable[Mapping[str, Any]], task: str, column: str) -> dict[str, float]:
    """Return the mean of a cost over seeds, by scheme."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["task"] == task and row.get(column) is not None:
            found.setdefault(row["scheme"], []).append(row[column])
    return {scheme: sum(values) / len(values) for scheme, values in found.items()}
