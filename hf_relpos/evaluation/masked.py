"""What a masked language model fills in at several lengths: the same masked tokens, whatever is read with them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.packing import IGNORED
from hf_relpos.data.packing import MaskingCollator
from hf_relpos.evaluation.language_model import evaluating
from hf_relpos.evaluation.lengths import why_not
from hf_relpos.evaluation.outcome import Rows
from hf_relpos.evaluation.outcome import metric_rows
from hf_relpos.evaluation.outcome import missing_rows
from hf_relpos.evaluation.windows import Windows

# Share of the tokens that are masked.
MASKED = 0.15


def evaluate_masked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: Windows, lengths: Sequence[int], batch_size: int
) -> Rows:
    """Score masked tokens, masked once for all lengths and models.

    Args:
        model: a masked language model.
        tokenizer: its tokenizer.
        windows: the text.
        lengths: tokens that are read at a time.
        batch_size: rows of the shortest length that are read at the same time.

    Returns:
        Rows `length`, `metric` (`loss` in nats a masked token, `accuracy`), `value`, and `reason` where there is none.
    """
    collator = MaskingCollator(tokenizer, mlm_probability=MASKED, seed=0)
    batch = collator([{"input_ids": row} for row in windows.inputs])
    rows: Rows = []
    for length in lengths:
        if reason := why_not(model, length):
            rows += missing_rows(length, reason, "loss", "accuracy")
            continue
        ids, labels = (batch[name].unfold(1, length, length).flatten(0, 1) for name in ("input_ids", "labels"))
        sums = torch.zeros(3, dtype=torch.float64)
        size = max(1, batch_size * min(lengths) // length)
        with evaluating(model):
            for some, wanted in zip(ids.split(size), labels.split(size), strict=True):
                logits = model(input_ids=some.to(model.device)).logits.cpu().float()
                nll = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
                asked = wanted != IGNORED
                hits = (logits.argmax(-1) == wanted) & asked
                sums += torch.stack([nll.double(), hits.sum().double(), asked.sum().double()])
        loss, right = (sums[:2] / sums[2]).tolist()
        rows += metric_rows(length, loss=loss, accuracy=right)
    return rows
