"""What a scheme costs, for the report of a comparison: tables, quality beside cost, and quality at equal time."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_relpos.evaluation.findings import UNITS
from hf_relpos.evaluation.findings import figure_name
from hf_relpos.evaluation.findings import headline
from hf_relpos.evaluation.findings import mean_curves
from hf_relpos.evaluation.findings import mean_of
from hf_relpos.evaluation.page import Heading
from hf_relpos.evaluation.page import Part
from hf_relpos.evaluation.page import Plot
from hf_relpos.evaluation.page import Table
from hf_relpos.evaluation.plan import Comparison
from hf_relpos.evaluation.plots import scatter_plot
from hf_relpos.evaluation.table import cost_means
from hf_relpos.evaluation.table import values_of

Rows = list[dict[str, Any]]


def cost_parts(comparison: Comparison, rows: Rows, costs: Rows, curves: Rows) -> list[Part]:
    """Return what each scheme costs, its quality beside its cost, and the quality at equal time."""
    parts: list[Part] = [Heading("Cost")]
    for task in comparison.tasks:
        parameters = cost_means(costs, task, "parameters")
        found = headline(rows, task)
        if not parameters or found is None:
            continue
        columns = {
            name: cost_means(costs, task, name) for name in ("flops", "peak_memory", "process_seconds", "ratio_to_baseline")
        }
        scales = {"flops": 1e9, "peak_memory": 2**20, "process_seconds": 1e-3, "ratio_to_baseline": 1}
        lines = [
            (
                name,
                f"{parameters[name]:.0f}",
                *(f"{column[name] / scales[key]:.3g}" if name in column else "" for key, column in columns.items()),
            )
            for name in sorted(parameters, key=lambda name: columns["ratio_to_baseline"].get(name, 0.0))
        ]
        ratio = f"ratio to {comparison.baselines[task]}"
        head = ("scheme", "parameters", "operations (G)", "peak memory (MiB)", "processor time (ms)", ratio)
        parts.append(Table(f"{task}: cost of a training step, mean over seeds.", head, tuple(lines)))
        metric, lengths = found
        values = values_of(rows, task, metric, lengths[0])
        points = {name: (one, mean_of(values, name)) for name, one in columns["ratio_to_baseline"].items() if name in values}
        if points:
            caption = f"{task}: quality at the trained length against processor time of a step."
            plot = scatter_plot(points, f"processor time of a step ({ratio})", UNITS[metric], comparison.schemes)
            parts.append(Plot(figure_name(task, "cost"), caption, plot))
            parts += _equal_time(task, [one for one in curves if one["task"] == task], columns["ratio_to_baseline"])
    return parts


def _equal_time(task: str, curves: Rows, ratios: Mapping[str, float]) -> list[Part]:
    """Return the validation loss where every scheme has had the time that the cheapest one took for all of its steps."""
    lines = []
    found = mean_curves(curves, "validation", "step", "eval_loss")
    found = {name: points for name, points in found.items() if name in ratios and len(points) > 1}
    for name, points in found.items():
        steps, losses = [point[0] for point in points], [point[1] for point in points]
        reached = steps[-1] * min(ratios[other] for other in found) / ratios[name]
        if reached >= steps[0]:
            lines.append((float(np.interp(reached, steps, losses)), name, reached, losses[-1]))
    if not lines:
        return []
    table = tuple((name, f"{reached:.0f}", f"{loss:.4f}", f"{last:.4f}") for loss, name, reached, last in sorted(lines))
    caption = (
        f"{task}: validation loss (nats a token) at equal processor time, read off the curve of one run, beside that at equal steps. "
        "It depends on the machine."
    )
    return [Table(caption, ("scheme", "steps in that time", "at equal time", "at equal steps"), table)]
