"""What every kind of task of a comparison gives: rows of numbers, curves, and what a step costs."""

import hashlib
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import Trainer

from hf_relpos.evaluation.cells import Cell
from hf_relpos.evaluation.cost import step_cost
from hf_relpos.evaluation.learned_bias import bias_by_distance

Rows = list[dict[str, Any]]
Output = tuple[dict[str, Any], dict[str, Any]]
"""What a cell gives: its result, and its cost."""


def metric_rows(length: int, **values: float) -> Rows:
    """Return a row `{"length", "metric", "value"}` for each metric."""
    return [{"length": length, "metric": name, "value": value} for name, value in values.items()]


def missing_rows(length: int, reason: str, *metrics: str) -> Rows:
    """Return a row for each metric with the reason why it has no value."""
    return [{"length": length, "metric": name, "value": None, "reason": reason} for name in metrics]


def data_digest(*tensors: torch.Tensor) -> str:
    """Return the SHA-256 of what a cell was trained and scored on."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def kept_curves(trainer: Trainer, length: int) -> dict[str, Rows]:
    """Return the losses that Trainer logged, of training batches and of the validation blocks, and the bias over the trained length."""
    keep = {"training": ("loss",), "validation": ("eval_loss", "eval_bits_per_byte")}
    history: Rows = trainer.state.log_history
    curves = {
        curve: [
            {"step": one["step"]} | {name: one[name] for name in names if name in one} for one in history if names[0] in one
        ]
        for curve, names in keep.items()
    }
    model: Any = trainer.model
    return curves | {"bias_by_distance": bias_by_distance(model, length)}


def cost_beside_baseline(cell: Cell, model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Measure a step beside one of the baseline, which has no memory.

    Args:
        cell: names the baseline's scheme.
        model: the trained model; the baseline has the same head.
        batch: arguments of the model, with labels.
    """
    fields = model.config.to_dict() | {"position_parameters": {}} | cell.options["baseline"]
    if "mem_len" in fields:
        fields |= {"mem_len": 0, "sliding_window": None}
    kind: Any = type(model)
    baseline = kind(type(model.config).from_dict(fields)).to(model.device)
    return step_cost(model.train(), baseline.train(), batch)
