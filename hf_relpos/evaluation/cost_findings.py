"""What a scheme costs, for the report of a comparison: tables, quality beside cost, and quality at equal cost."""

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
    """Return what each scheme costs, its quality beside its cost, and the quality at equal cost."""
    parts: list[Part] = [Heading("Cost")]
    for task in comparison.tasks:
        parameters = cost_means(costs, task, "parameters")
        found = headline(rows, task)
        if not parameters or found is None:
            continue
        baseline = comparison.baselines[task]
        columns = {
            name: cost_means(costs, task, name) for name in ("flops", "peak_memory", "process_seconds", "ratio_to_baseline")
        }
        scales = {"flops": 1e9, "peak_memory": 2**20, "process_seconds": 1e-3, "ratio_to_baseline": 1}
        lines = [
            (
                name,
                f"{parameters[name]:.0f}",
                f"{parameters[name] / parameters[baseline]:.3f}" if baseline in parameters else "",
                *(f"{column[name] / scales[key]:.3g}" if name in column else "" for key, column in columns.items()),
            )
            for name in sorted(parameters, key=lambda name: columns["ratio_to_baseline"].get(name, 0.0))
        ]
        ratio = f"time / {baseline}"
        head = (
            "scheme",
            "parameters",
            f"parameters / {baseline}",
            "operations (G)",
            "peak memory (MiB)",
            "processor time (ms)",
            ratio,
        )
        parts.append(Table(f"{task}: cost of a training step, mean over seeds.", head, tuple(lines)))
        metric, lengths = found
        values = values_of(rows, task, metric, lengths[0])
        points = {name: (one, mean_of(values, name)) for name, one in columns["ratio_to_baseline"].items() if name in values}
        if points:
            caption = f"{task}: quality at the trained length against processor time of a step."
            plot = scatter_plot(points, f"processor time of a step ({ratio})", UNITS[metric], comparison.schemes)
            parts.append(Plot(figure_name(task, "cost"), caption, plot))
        ways = {"time": columns["ratio_to_baseline"], "operations": columns["flops"]}
        parts += _equal_cost_table(task, [one for one in curves if one["task"] == task], ways)
    return parts


def _equal_cost_table(task: str, curves: Rows, costs: Mapping[str, Mapping[str, float]]) -> list[Part]:
    """Return the validation loss where every scheme has had the cost that the cheapest one took for all of its steps.

    Args:
        task: the task.
        curves: of its cells.
        costs: what a step of each scheme costs, for each way to count it.
    """
    found = mean_curves(curves, "validation", "step", "eval_loss")
    found = {name: points for name, points in found.items() if len(points) > 1}
    reached = {way: equal_cost(found, by_scheme) for way, by_scheme in costs.items()}
    reached = {way: places for way, places in reached.items() if places}
    if not reached:
        return []
    names = sorted(found, key=lambda name: min(places[name][1] if name in places else np.inf for places in reached.values()))
    lines = []
    for name in names:
        cells = [
            cell
            for places in reached.values()
            for cell in ((f"{places[name][0]:.0f}", f"{places[name][1]:.4f}") if name in places else ("", ""))
        ]
        lines.append((name, *cells, f"{found[name][-1][1]:.4f}"))
    head = [cell for way in reached for cell in (f"steps at equal {way}", f"loss at equal {way}")]
    caption = (
        f"{task}: validation loss (nats a token) at the cost of all steps of the cheapest scheme, read off the curve of one run, "
        "beside that at equal steps. Processor time depends on the machine, operations do not."
    )
    return [Table(caption, ("scheme", *head, "loss at equal steps"), tuple(lines))]


def equal_cost(curves: Mapping[str, list[Any]], costs: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the step that each scheme reaches at the cost of the cheapest one's run, and its loss there."""
    known = {name: points for name, points in curves.items() if costs.get(name)}
    found = {}
    for name, points in known.items():
        steps, losses = [point[0] for point in points], [point[1] for point in points]
        step = steps[-1] * min(costs[other] for other in known) / costs[name]
        if step >= steps[0]:
            found[name] = step, float(np.interp(step, steps, losses))
    return found
