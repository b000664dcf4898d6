"""What the numbers of a comparison say: sentences, tables and plots of each task, and what a scheme costs."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_relpos.evaluation.cells import Cell
from hf_relpos.evaluation.page import Heading
from hf_relpos.evaluation.page import Part
from hf_relpos.evaluation.page import Plot
from hf_relpos.evaluation.page import Table
from hf_relpos.evaluation.page import Text
from hf_relpos.evaluation.plan import Comparison
from hf_relpos.evaluation.plots import dot_plot
from hf_relpos.evaluation.plots import line_plot
from hf_relpos.evaluation.statistics import against
from hf_relpos.evaluation.statistics import best
from hf_relpos.evaluation.statistics import interval
from hf_relpos.evaluation.statistics import ranks
from hf_relpos.evaluation.table import lower_is_better
from hf_relpos.evaluation.table import measured
from hf_relpos.evaluation.table import values_of
from hf_relpos.evaluation.table import why_empty

Rows = list[dict[str, Any]]
UNITS = {
    "bits_per_byte": "bits per byte",
    "loss": "loss (nats a token)",
    "accuracy": "accuracy (share of what is asked)",
    "macro_f1": "macro-F1 (mean of the F1 of each class)",
    "exact_match": "exact match (share of whole examples)",
    "effective_context": "effective context (tokens)",
}
# The metric of a task is the first of these that it has.
HEADLINES = ("bits_per_byte", "loss", "macro_f1", "accuracy")
# Names that a sentence lists; there may be more.
LISTED = 6


def headline(rows: Rows, task: str) -> tuple[str, list[int]] | None:
    """Return the metric that a task is decided by, and its lengths; None without numbers."""
    found = measured(rows, task)
    return next(((metric, found[metric]) for metric in HEADLINES if metric in found), None)


def conclusions(comparison: Comparison, rows: Rows) -> list[str]:
    """Return a sentence for each task at its trained length and at its greatest one, and what is missing."""
    lines = []
    for task in comparison.tasks:
        found = headline(rows, task)
        if found is None:
            lines.append(f"{task}: no numbers yet.")
            continue
        metric, lengths = found
        ends = [(lengths[0], "the trained length"), (lengths[-1], f"{lengths[-1] / lengths[0]:g} times it")]
        lines += [
            f"{task}, {UNITS[metric].partition(' (')[0]} at {name} ({length}): {_conclude(comparison, rows, task, metric, length)}"
            for length, name in ends[: len(lengths)]
        ]
    failed = sum("failed:" in (row["reason"] or "") for row in rows)
    missing = sum(row["reason"] == "not finished" for row in rows)
    if failed or missing:
        lines.append(f"Not complete: {failed} cells failed and {missing} are not finished; the same command goes on.")
    return lines


def _conclude(comparison: Comparison, rows: Rows, task: str, metric: str, length: int) -> str:
    """Return who leads, who shares the lead, and how many differ from the baseline."""
    values, lower = values_of(rows, task, metric, length), lower_is_better(metric)
    if not values:
        return "no scheme has a number."
    guess, cell = chance(rows, task, metric, length), cell_of(comparison, task)
    what, by = ("chance", " by more than a lucky draw of examples") if cell.kind == "probe" else ("the majority class", "")
    spans = [interval(list(by_seed.values())) for by_seed in values.values()]
    least = lucky_guess(cell, guess or 0.0)
    above = sum((span.mean if span.low is None else span.low) > least for span in spans)
    if guess is not None and not above:
        return f"nothing was learned: no scheme is above {what} ({guess:.3g}){by}."
    places = ranks(values, lower)
    first = sorted(
        (name for name in values if places[name].first == 1), key=lambda name: mean_of(values, name) * (1 if lower else -1)
    )
    leader = best(values, lower)
    if len(values) == 1:
        text = f"{leader} is alone, {_short(values[leader])}."
    elif len(first) == 1 and places[first[0]].last == 1:
        text = f"{leader} is better than every other scheme, {_short(values[leader])}."
    else:
        more = f" and {len(first) - LISTED} more" if len(first) > LISTED else ""
        names = ", ".join(f"{name} {_short(values[name])}" for name in first[:LISTED])
        text = f"no winner; {len(first)} of {len(values)} schemes share the first place inside the noise: {names}{more}."
    baseline = comparison.baselines[task]
    if baseline in values and len(values) > 1:
        gaps = [gap for gap in against(values, baseline).values() if gap.real]
        better = sum((gap.interval.mean < 0) == lower for gap in gaps)
        text += f" Against the baseline {baseline}: {better} better, {len(gaps) - better} worse, {len(values) - 1 - len(gaps)} inside the noise."
    if guess is not None:
        text += f" Above {what} ({guess:.3g}){by}: {above} of {len(values)}."
    return text


def mean_of(values: Mapping[str, Mapping[int, float]], name: str) -> float:
    return float(np.mean(list(values[name].values())))


def _short(by_seed: Mapping[int, float]) -> str:
    """Return a mean with half the width of its interval, to two digits of the latter."""
    found = interval(list(by_seed.values()))
    if found.high is None:
        return f"{found.mean:.4g}"
    half = found.high - found.mean
    if half == 0:
        return f"{found.mean:.4g} ± 0"
    digits = min(4, max(0, 1 - math.floor(math.log10(half))))
    return f"{found.mean:.{digits}f} ± {half:.{digits}f}"


def task_parts(comparison: Comparison, task: str, rows: Rows, curves: Rows) -> list[Part]:
    """Return the tables and plots of a task."""
    found = headline(rows, task)
    parts: list[Part] = [Heading(f"Task: {task}")]
    if found is None:
        return [*parts, Text("No numbers yet.")]
    metric, lengths = found
    own = [one for one in curves if one["task"] == task]
    for name, at in measured(rows, task).items():
        if name in (metric, "accuracy", "exact_match", "effective_context"):
            parts.append(_value_table(rows, task, name, at))
    for length in dict.fromkeys((lengths[0], lengths[-1])):
        parts += _difference_table(comparison, rows, task, metric, length)
    parts.append(_value_plot(comparison, task, rows, metric, lengths))
    return [*parts, *_curve_plots(task, own, comparison.schemes)]


def _value_plot(comparison: Comparison, task: str, rows: Rows, metric: str, lengths: list[int]) -> Plot:
    """Return the plot of a metric by length, or by scheme where there is one length."""
    lines = {}
    for scheme in comparison.schemes:
        cells = [(length, values_of(rows, task, metric, length).get(scheme)) for length in lengths]
        points = [(length, *interval(list(values.values()))) for length, values in cells if values]
        if points:
            lines[scheme] = points
    others = peers(comparison, task, metric)
    if len(lengths) == 1:
        lines |= {name: at for name, points in others.items() if (at := [point for point in points if point[0] == lengths[0]])}
        away = ", ".join(name for name in others if name not in lines)
        ranked = sorted(lines.items(), key=lambda item: item[1][0][1], reverse=not lower_is_better(metric))
        guess = chance(rows, task, metric, lengths[0])
        caption = f"{task}: {UNITS[metric]}, mean over seeds with its 95 % interval, the best on top."
        caption += f" Not measured at length {lengths[0]}: {away}." if away else ""
        dots = {name: points[0][1:] for name, points in ranked}
        marks = {} if guess is None else {"chance": guess}
        return Plot(figure_name(task, "values"), caption, dot_plot(dots, UNITS[metric], marks, comparison.schemes))
    guesses = [(at, guess, None, None) for at in lengths if (guess := chance(rows, task, metric, at)) is not None]
    lines |= ({"chance": guesses} if guesses else {}) | others
    caption = (
        f"{task}: {UNITS[metric]} by length, mean over seeds; the smallest length was trained. Intervals stand in the table."
    )
    plot = line_plot(lines, "length (tokens, or the probe's size)", UNITS[metric], order=comparison.schemes)
    return Plot(figure_name(task, "lengths"), caption, plot)


def chance(rows: Rows, task: str, metric: str, length: int) -> float | None:
    """Return what guessing reaches without reading the example: a probe's chance, or the majority class; None for other tasks."""
    guesses = values_of(rows, task, f"chance_{metric}", length).values()
    return next((value for by_seed in guesses for value in by_seed.values()), None)


def lucky_guess(cell: Cell, guess: float) -> float:
    """Return what guessing reaches at most in 95 % of all draws of a probe's examples; all models are asked the same ones."""
    return guess + 1.96 * math.sqrt(guess * (1 - guess) / cell.options["examples"]) if cell.kind == "probe" else guess


def cell_of(comparison: Comparison, task: str) -> Cell:
    """Return a cell of a task, whose kind and options are those of all of its cells."""
    return next(cell for cell in comparison.cells if cell.task == task)


def peers(comparison: Comparison, task: str, metric: str) -> dict[str, list[tuple[float, float, None, None]]]:
    """Return the lines of other checkpoints, as `evaluate --lengths` measured them on the text of a task."""
    cell = cell_of(comparison, task)
    found = {}
    for name, path in comparison.also.items():
        report = json.loads(path.read_text(encoding="utf-8"))
        if cell.kind == "language_modelling" and cell.text and report["text"] == cell.text["validation"]["sha256"]:
            found[name] = [(row["length"], row[metric], None, None) for row in report["lengths"] if metric in row]
    return {name: points for name, points in found.items() if points}


def _value_table(rows: Rows, task: str, metric: str, lengths: list[int]) -> Table:
    """Return means, intervals and ranks, a scheme a row, the best at the trained length first."""
    by_length = {length: values_of(rows, task, metric, length) for length in lengths}
    places = {length: ranks(values, lower_is_better(metric)) for length, values in by_length.items()}
    sign = 1 if lower_is_better(metric) else -1
    first = by_length[lengths[0]]
    empty = why_empty(rows, task)
    names = sorted({name for values in by_length.values() for name in values} | {name for name, _ in empty})
    names.sort(key=lambda name: sign * mean_of(first, name) if name in first else math.inf)
    lines = []
    for name in names:
        cells = []
        for length in lengths:
            values, rank = by_length[length].get(name), places[length].get(name)
            if values and rank:
                cells += [_short(values), f"{rank.first}-{rank.last}" if rank.first < rank.last else str(rank.first)]
            else:
                cells += [empty.get((name, length), empty.get((name, None), "")), ""]
        lines.append((name, *cells))
    head = [cell for length in lengths for cell in (f"length {length}", "rank")]
    return Table(
        f"{task}: {UNITS[metric]}, and the places that each scheme may take; n/a is explained under What has no number.",
        ("scheme", *head),
        tuple(lines),
    )


def _difference_table(comparison: Comparison, rows: Rows, task: str, metric: str, length: int) -> list[Part]:
    """Return paired differences to the baseline and to the best scheme; nothing where there is one scheme or one seed."""
    values = values_of(rows, task, metric, length)
    if len(values) < 2 or all(len(seeds) < 2 for seeds in values.values()):
        return []
    leader, baseline = best(values, lower_is_better(metric)), comparison.baselines[task]
    others = [name for name in dict.fromkeys((baseline, leader)) if name in values]
    gaps = {other: against(values, other) for other in others}
    lines = []
    sign = 1 if lower_is_better(metric) else -1
    for name in sorted(values, key=lambda name: sign * mean_of(values, name)):
        cells = []
        for other in others:
            gap = gaps[other].get(name)
            if gap is None or gap.p is None or gap.interval.high is None:
                cells += ["", "", ""]
            else:
                half = gap.interval.high - gap.interval.mean
                cells += [f"{gap.interval.mean:+.4f} ± {half:.4f}", f"{gap.p:.3g}", "yes" if gap.real else "no"]
        lines.append((name, *cells))
    head = [cell for other in others for cell in (f"minus {other}", "p (Holm)", "real")]
    caption = f"{task}, length {length}: paired differences in {UNITS[metric]} to the baseline and to the best mean."
    return [Table(caption, ("scheme", *head), tuple(lines))]


def _curve_plots(task: str, curves: Rows, order: list[str]) -> list[Part]:
    """Return the plots of raw curves, means over seeds."""
    parts: list[Part] = []
    across = {
        "loss_by_context": (
            "context",
            "loss",
            "context before the scored tokens (tokens)",
            "loss by context, the same last tokens",
        ),
        "training": ("step", "loss", "training step", "loss of the training batches"),
        "bias_by_distance": (
            "distance",
            "bias",
            "distance back from the query (tokens)",
            "bias by distance, as the first layer adds it to the scores of earlier tokens, heads averaged",
        ),
    }
    up = {"bias_by_distance": "bias less that at distance 0 (nats)"}
    for kind, (x, y, label, caption) in across.items():
        lines = mean_curves(curves, kind, x, y)
        if lines:
            plot = line_plot(lines, label, up.get(kind, "loss (nats a token)"), kind != "training", order)
            parts.append(Plot(figure_name(task, kind), f"{task}: {caption}, mean over seeds.", plot))
    spans = [
        one | {"by_position": one["curves"]["loss_by_position"][-1]} for one in curves if one["curves"].get("loss_by_position")
    ]
    for one in spans:
        one["curves"] = {"bins": [{"at": span["to"] + 1, "loss": span["loss"]} for span in one["by_position"]["by_position"]]}
    if spans:
        length = max(one["by_position"]["length"] for one in spans)
        lines = mean_curves(spans, "bins", "at", "loss")
        plot = line_plot(lines, "position (end of the bin, tokens)", "loss (nats a token)", order=order)
        caption = (
            f"{task}: loss by position in a text of {length} tokens, or the longest that a scheme reads; mean over seeds."
        )
        parts.append(Plot(figure_name(task, "loss_by_position"), caption, plot))
    return parts


def mean_curves(curves: Rows, kind: str, x: str, y: str) -> dict[str, list[tuple[float, float, None, None]]]:
    found: dict[str, dict[float, list[float]]] = {}
    for one in curves:
        for point in one["curves"].get(kind, []):
            if y in point:
                found.setdefault(one["scheme"], {}).setdefault(point[x], []).append(point[y])
    return {
        scheme: [(at, sum(values) / len(values), None, None) for at, values in sorted(points.items())]
        for scheme, points in found.items()
    }


def figure_name(*words: str) -> str:
    """Return a file name made of words."""
    return re.sub(r"[^\w-]+", "_", "-".join(words))
