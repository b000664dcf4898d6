"""Batches for permutation language models, in which targets read the targets before them in the order, as in XLNet."""

from typing import Any

import torch
from transformers import DataCollatorForPermutationLanguageModeling


class PermutationCollator(DataCollatorForPermutationLanguageModeling):
    """The collator of transformers with the tokens put back in place of the mask token.

    Targets are hidden from every token that is no target, or one could read itself through a special token. All rows need the same
    length, an even one.
    """

    def torch_call(self, examples: Any) -> dict[str, Any]:
        batch = super().torch_call(examples)
        target = batch["labels"] != -100
        batch["input_ids"] = torch.where(target, batch["labels"], batch["input_ids"])
        batch["perm_mask"] = torch.maximum(batch["perm_mask"], (~target[:, :, None] & target[:, None, :]).float())
        return batch
