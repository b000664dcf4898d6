"""Models of a comparison with the same number of parameters: a wider feed-forward makes up for what a scheme has fewer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModel

from hf_relpos.evaluation.cells import Cell
from hf_relpos.training.model_setup import build_config

# Largest share by which parameters may differ from those of the largest model.
CLOSE = 0.01


def match_parameters(cells: list[Cell], baselines: Mapping[str, str]) -> list[Cell]:
    """Widen the feed-forward of each scheme's model until all models of a task have the parameters of the largest.

    Args:
        cells: the cells.
        baselines: by task, the scheme beside whose model the others are timed: that model is widened too.

    Raises:
        ValueError: the steps of a feed-forward are too coarse for that.
    """
    models = {(cell.task, cell.scheme): cell for cell in cells if cell.not_applicable is None}
    for task, baseline in baselines.items():
        if (task, baseline) not in models and any(other == task for other, _ in models):
            raise ValueError(
                f"match: parameters: the baseline {baseline!r} of task {task} must be one of the schemes, to be matched too"
            )
    counts = {place: count_parameters(cell) for place, cell in models.items()}
    widths: dict[tuple[str, str], int] = {}
    for (task, scheme), cell in models.items():
        most = max(count for (other, _), (count, _) in counts.items() if other == task)
        own, width = counts[task, scheme]
        step = count_parameters(widened(cell, width + 1))[0] - own
        widths[task, scheme] = width + round((most - own) / step)
        left = abs(most - own - step * round((most - own) / step)) / most
        if left > CLOSE:
            raise ValueError(
                f"match: parameters: {scheme} of task {task} stays {left:.1%} from the largest, more than {CLOSE:.0%}"
            )
    return [
        widened(cell, widths[cell.task, cell.scheme], widths[cell.task, baselines[cell.task]])
        if cell.not_applicable is None
        else cell
        for cell in cells
    ]


def widened(cell: Cell, width: int, baseline: int | None = None) -> Cell:
    """Return the cell with an `intermediate_size`, and one of its baseline's model if that is known."""
    overrides = cell.settings.get("config_overrides", {}) | {"intermediate_size": width}
    fields = cell.options["baseline"] | ({} if baseline is None else {"intermediate_size": baseline})
    settings = {**cell.settings, "config_overrides": overrides}
    return replace(cell, settings=settings, options={**cell.options, "baseline": fields})


def count_parameters(cell: Cell) -> tuple[int, int]:
    """Return the parameters of a cell's model without its head and tokens, and its `intermediate_size`; no weights are made."""
    config: Any = build_config(cell.arguments[0], cell.settings["block_size"])
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    tokens = sum(weight.numel() for weight in model.get_input_embeddings().parameters())
    return sum(weight.numel() for weight in model.parameters()) - tokens, config.intermediate_size
