"""Training on probes: rows with answers, read at once, or in segments by a model with memory."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_relpos.data.packing import IGNORED
from hf_relpos.training.checked_trainer import CheckedTrainer
from hf_relpos.training.model_setup import is_masked


def probe_targets(model: PreTrainedModel, labels: torch.Tensor) -> torch.Tensor:
    """Return the target of each output `(batch, sequence)`: an encoder's own label, the next label of a causal model."""
    return labels if is_masked(model.config) else F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def read_in_segments(model: Any, ids: torch.Tensor, segment: int | None) -> torch.Tensor:
    """Return the logits of rows, `(batch, sequence, vocabulary)`.

    Args:
        model: the model, perhaps within a wrapper.
        ids: `(batch, sequence)` tokens.
        segment: tokens of a segment, which memory connects; None reads the rows at once.
    """
    if segment is None:
        return model(input_ids=ids).logits
    memory, found = None, []
    for part in ids.split(segment, 1):
        output = model(input_ids=part, memory=memory)
        memory = output.memory
        found.append(output.logits)
    return torch.cat(found, 1)


class ProbeTrainer(CheckedTrainer):
    """Trainer whose loss is that of the asked tokens, each of a batch weighing the same.

    Args:
        args, kwargs: those of `Trainer`.
        segment: tokens of a segment, for a model with memory.
    """

    def __init__(self, *args: Any, segment: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.segment = segment
        self.model_accepts_loss_kwargs = False  # the loss is a mean already, which accumulation divides

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = read_in_segments(model, inputs["input_ids"], self.segment)
        targets = probe_targets(self.model, inputs["labels"])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        return (loss, {"logits": logits}) if return_outputs else loss
