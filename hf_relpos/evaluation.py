"""What a language model makes of text: exact, token-weighted numbers, whatever the batches were."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from transformers import EvalPrediction, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_relpos.blocks import IGNORED
from hf_relpos.metrics import compute_metric
from hf_relpos.tokenization import start_token_id


def score_rows(logits: torch.Tensor | tuple[torch.Tensor, ...], targets: torch.Tensor) -> torch.Tensor:
    """Reduce the logits of a batch to three sums a row; Trainer keeps these instead of the logits.

    Args:
        logits: `(batch, sequence, vocabulary)`, or a tuple that starts with them.
        targets: `(batch, sequence)` tokens aligned with the logits, -100 where there is none.

    Returns:
        `(batch, 3)`: summed negative log-likelihood, correct tokens, all tokens.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    nll = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    sums = nll.view_as(targets).sum(1), (logits.argmax(-1) == targets).sum(1), (targets != IGNORED).sum(1)
    return torch.stack([column.float() for column in sums], 1)


def language_model_metrics(prediction: EvalPrediction, byte_count: int | None = None) -> dict[str, float]:
    """Metrics of a whole evaluation from the rows of `score_rows`.

    Args:
        prediction: what Trainer hands to `compute_metrics`.
        byte_count: UTF-8 bytes of the text that was predicted; None where bits per byte have no meaning.
    """
    nll, correct, tokens = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    metrics = {"loss": nll / tokens, "tokens": int(tokens)}
    metrics |= compute_metric("perplexity", nll=[nll], tokens=[int(tokens)])
    metrics |= compute_metric("token_accuracy", correct=[int(correct)], tokens=[int(tokens)])
    if byte_count:
        metrics |= compute_metric("bits_per_byte", nll=[nll], bytes=[byte_count])
    return metrics


def position_bound(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a model takes; None for a scheme that goes on for ever."""
    schemes = getattr(config, "position_scheme", "learned_absolute")  # other models: assume what they declare
    if "learned_absolute" in ([schemes] if isinstance(schemes, str) else schemes):
        return getattr(config, "max_position_embeddings", None)
    return None


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[float]:
    """Perplexity of each text; every token counts once.

    A text longer than a model with a bound takes is read in windows that advance by half their length: each token is
    predicted in the first window that holds it, so all but the first window's tokens see at least half a window.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer; a padding token is not needed.
        texts: texts with at least one token each.
    """
    was_training = model.training
    model.eval()
    found = [_perplexity(model, [start_token_id(tokenizer), *_encode(tokenizer, text)]) for text in texts]
    model.train(was_training)
    return found


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise ValueError(f"the text {text!r} has no tokens: it has no perplexity")
    return tokens


def _perplexity(model: PreTrainedModel, tokens: list[int]) -> float:
    window = position_bound(model.config) or len(tokens)
    ids = torch.tensor([tokens], device=model.device)
    total, scored = 0.0, 0  # targets are tokens[1:]; `scored` of them are done
    for start in range(0, len(tokens) - 1, max(1, window // 2)):
        inputs, targets = ids[:, start : start + window], ids[0, start + 1 : start + window + 1]
        new = start + len(targets) - scored
        if new > 0:
            logits = model(input_ids=inputs[:, : len(targets)]).logits[0, -new:]
            total += F.cross_entropy(logits.float(), targets[-new:], reduction="sum").item()
            scored += new
    return math.exp(total / scored)
