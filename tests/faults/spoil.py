"""Spoil one number of one step of training, by a description such as `weights nan 5`: what, to which value, in which step."""

from typing import Any

import torch

from hf_relpos.training.checked_trainer import CheckedTrainer

WHAT = ("input ids", "labels", "gradients", "weights")
VALUES = {"nan": float("nan"), "infinity": float("inf"), "too large": 10**6, "negative": -5}


def values_for(what: str) -> list[str]:
    """Return what such numbers are spoiled by: tokens cannot be NaN."""
    return ["too large", "negative"] if what in ("input ids", "labels") else ["nan", "infinity"]


def install(description: str) -> None:
    """Let every Trainer of this process meet the spoiled number."""
    what, name, step = description.split("/")
    take = CheckedTrainer.training_step

    def spoiled(trainer: Any, model: Any, inputs: dict[str, Any], *more: Any, **options: Any) -> torch.Tensor:
        if trainer.state.global_step + 1 == int(step):
            spoil(model, inputs, what, VALUES[name])
        return take(trainer, model, inputs, *more, **options)

    CheckedTrainer.training_step = spoiled


def spoil(model: Any, inputs: dict[str, Any], what: str, value: float) -> None:
    """Put a value in place of one number."""
    weight = model.model.layers[1].attention.v_proj.weight
    if what == "gradients":
        weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), value))
    elif what == "weights":
        with torch.no_grad():
            weight[0, 0] = value
    else:
        for key in ("input_ids",) if what == "input ids" else ("labels", "shift_labels"):
            inputs[key] = inputs[key].clone()
            inputs[key][0, 3] = value
