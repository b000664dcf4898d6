"""Read what was measured about the schemes from the tables of `docs/benchmarks`, where each number is written once."""

from pathlib import Path
from typing import NamedTuple

Row = dict[str, str]


class Measurement(NamedTuple):
    """One column of a table of results.

    Attributes:
        page: Markdown file under `docs/benchmarks`.
        table: what the head of the table begins with.
        column: head of the column.
        label: what is measured, in words; the first words, in brackets, become the link to the page.
        unit: what the number is in.
    """

    page: str
    table: str
    column: str
    label: str
    unit: str


LOSS = Measurement("scheme_losses.md", "scheme", "validation loss", "[validation loss] on tinyshakespeare", "nats a character")
STEP_512 = Measurement(
    "step_cost.md", "scheme", "train step, 512 tokens", "[train step] of 512 tokens", "ratio to the baseline"
)
STEP_2048 = Measurement(
    "step_cost.md", "scheme", "train step, 2,048 tokens", "[train step] of 2,048 tokens", "ratio to the baseline"
)
TOKEN = Measurement(
    "step_cost.md", "scheme", "decoded token behind 4,096", "[decoded token] behind 4,096 tokens", "ratio to the baseline"
)
PEAK = Measurement("peak_memory.md", "model", "2,048", "[peak memory] of a train step of 2,048 tokens", "MiB")
MEASUREMENTS = (LOSS, STEP_512, STEP_2048, TOKEN, PEAK)


def read_table(page: Path, first: str) -> dict[str, Row]:
    """Read the first table of a Markdown page whose first column has the given head.

    Returns:
        For the text of each first cell, without backquotes, the cells of its row by the head of their column; empty if there is
        no such page or table.
    """
    found: dict[str, Row] = {}
    head: list[str] | None = None
    for line in page.read_text(encoding="utf-8").splitlines() if page.is_file() else []:
        if not line.startswith("|"):
            if found:
                break
            head = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if head is None:
            head = cells if cells[0] == first else []
        elif head and not set(line) <= set("|-: "):
            found[cells[0].replace("`", "")] = dict(zip(head, cells, strict=True))
    return found


def read_column(benchmarks: Path, measurement: Measurement) -> dict[str, str]:
    """Read the cells of a measurement that are not empty, by the name of their row."""
    rows = read_table(benchmarks / measurement.page, measurement.table)
    return {name: row[measurement.column] for name, row in rows.items() if row[measurement.column]}


def results_table(name: str, benchmarks: Path) -> str:
    """Return a Markdown table of what was measured about a scheme; empty if nothing was.

    Args:
        name: the scheme.
        benchmarks: the folder `docs/benchmarks`, beside the folder of the scheme's page.
    """
    lines = []
    for measurement in MEASUREMENTS:
        column = read_column(benchmarks, measurement)
        encoder = name not in column
        value = column.get(f"{name} (encoder)" if encoder else name)
        if value is None:
            continue
        link = f"](../benchmarks/{measurement.page})"
        label = measurement.label.replace("]", link, 1)
        lines.append(f"| {label}, {measurement.unit} | {value} | {_compared_with(column, encoder)} |")
    head = "| measured | this scheme | to compare |\n|---|---|---|\n"
    return head + "\n".join(lines) + "\n" if lines else ""


def _compared_with(column: dict[str, str], encoder: bool) -> str:
    """Return the baseline's cell, or the best and the worst one where there is no baseline."""
    if baseline := column.get("baseline, bidirectional" if encoder else "baseline, causal"):
        return f"baseline {baseline}"
    ranked = sorted(column, key=lambda name: float(column[name]))
    return f"best `{ranked[0]}` {column[ranked[0]]}, worst `{ranked[-1]}` {column[ranked[-1]]}"
