"""Losses of the heads, and the labels that they take.

Every loss is a sum over its targets, divided by `num_items_in_batch` where the caller gives it, else by the number of targets. So the
parts of a batch, accumulated or computed in several processes, add up to the update of the whole batch.
"""

from typing import Any

import torch
from torch.nn import functional

from .positions import reads_freely

IGNORED = -100
"""Marks, among labels, a place without a target."""


def count_targets(targets: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return what a sum of losses is divided by: `num_items_in_batch`, else how many `targets` are not -100; at least 1."""
    if num_items_in_batch is None:
        return targets.ne(IGNORED).sum().clamp(min=1)
    return torch.as_tensor(num_items_in_batch, device=targets.device).clamp(min=1)


def check_labels(labels: torch.Tensor, shape: tuple[int, ...], classes: int) -> None:
    """Refuse labels that are not one whole number below `classes`, or -100, for each place of `shape`.

    Raises:
        ValueError: names the shape and type, or the label, and what is expected.
    """
    if tuple(labels.shape) != shape or labels.is_floating_point():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} are refused: expected whole numbers of shape {shape}"
        )
    if not reads_freely(labels):
        return
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} is refused: this head has {classes} classes, 0 to {classes - 1}; -100 marks a place without a label"
        )


def class_loss(labels: torch.Tensor, logits: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the cross entropy of `labels (...)` under `logits (..., classes)`, of the labels that are not -100; 0 without any."""
    check_labels(labels, tuple(logits.shape[:-1]), logits.shape[-1])
    flat, targets = _as_float(logits).flatten(0, -2), labels.flatten().to(logits.device, torch.long)
    total = functional.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    return total / count_targets(targets, num_items_in_batch)


def token_loss(
    logits: torch.Tensor, labels: torch.Tensor, config: Any, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return the loss of a class for each token: `labels (batch, sequence)` under `logits (batch, sequence, classes)`."""
    return class_loss(labels, logits, num_items_in_batch)


def choice_loss(
    labels: torch.Tensor, pooled_logits: torch.Tensor, config: Any, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return the loss of one choice a row: `labels (batch,)` under `pooled_logits (batch, choices)`."""
    return class_loss(labels.view(-1), pooled_logits, num_items_in_batch)


def sequence_loss(
    labels: torch.Tensor, pooled_logits: torch.Tensor, config: Any, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return the loss of what is said of a whole sequence, by `config.problem_type`, which the first labels decide if it is None.

    Args:
        labels: `(batch,)` classes; `(batch, num_labels)` numbers from 0 to 1, or -100, for several labels at once; or the
            numbers of a regression, in which -100 is a number too.
        pooled_logits: `(batch, num_labels)`.
        config: the model's configuration, which keeps the kind of problem.
        num_items_in_batch: by how much the sum is divided; None for the number of labels.

    Raises:
        ValueError: labels of another shape or range.
    """
    outputs = pooled_logits.shape[-1]
    if config.problem_type is None:
        one_class = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        config.problem_type = "regression" if outputs == 1 else one_class
    if config.problem_type == "single_label_classification":
        flat = labels.view(-1) if labels.dim() == 2 and labels.shape[1] == 1 else labels
        return class_loss(flat, pooled_logits, num_items_in_batch)
    logits = _as_float(pooled_logits)
    wanted = [tuple(logits.shape)] + [(len(logits),)] * (outputs == 1)
    if tuple(labels.shape) not in wanted:
        expected = " or ".join(map(str, wanted))
        raise ValueError(f"labels of shape {tuple(labels.shape)} are refused for {config.problem_type}: expected {expected}")
    targets = labels.to(logits).view_as(logits)
    if config.problem_type == "regression":
        every = torch.zeros_like(targets)  # -100 is a number here, like any other
        return (logits - targets).square().sum() / count_targets(every, num_items_in_batch)
    known = targets != IGNORED
    if reads_freely(targets) and (wrong := targets[known & ((targets < 0) | (targets > 1))]).numel():
        raise ValueError(f"label {wrong[0]:g} is refused for {config.problem_type}: expected 0 to 1, or -100 for no label")
    losses = functional.binary_cross_entropy_with_logits(logits, targets.clamp(min=0), reduction="none")
    return losses.masked_fill(~known, 0).sum() / count_targets(targets, num_items_in_batch)


def answer_loss(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    start_positions: torch.Tensor,
    end_positions: torch.Tensor,
    num_items_in_batch: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Return the mean of two losses, of the first and of the last token of an answer.

    Args:
        start_logits, end_logits: `(batch, sequence)`.
        start_positions, end_positions: `(batch,)` indices; -100, or an index beyond the sequence, for an answer that was cut off.
        num_items_in_batch: by how much each sum is divided; None for the number of answers.
    """
    losses = []
    for logits, given in ((start_logits, start_positions), (end_logits, end_positions)):
        given = given.squeeze(-1) if given.dim() > 1 else given
        inside = given.masked_fill(given >= logits.shape[1], IGNORED)
        losses.append(class_loss(inside, logits, num_items_in_batch))
    return (losses[0] + losses[1]) / 2


def _as_float(logits: torch.Tensor) -> torch.Tensor:
    """Return logits in float32 at least, in which losses are computed."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
