"""Evaluate language models on text: exact, token-weighted numbers, whatever the batches were."""

import logging
import math
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers import EvalPrediction
from transformers import PreTrainedConfig
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.packing import IGNORED
from hf_relpos.data.tokenizers import end_token_id
from hf_relpos.data.tokenizers import start_token_id
from hf_relpos.evaluation.text_bytes import count_row_bytes
from hf_relpos.metrics import compute_metric

logger = logging.getLogger(__name__)


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
    """Compute the metrics of a whole evaluation from the rows of `score_rows`.

    Args:
        prediction: what Trainer hands to `compute_metrics`.
        byte_count: UTF-8 bytes of the text that was predicted; None where bits per byte have no meaning.
    """
    nll, correct, tokens = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    if not tokens:
        raise ValueError("there is nothing to evaluate: no token is a target (all labels are -100, or texts have one token)")
    metrics = {"loss": nll / tokens, "tokens": int(tokens)}
    metrics |= compute_metric("perplexity", nll=[nll], tokens=[int(tokens)])
    metrics |= compute_metric("token_accuracy", correct=[int(correct)], tokens=[int(tokens)])
    if byte_count:
        metrics |= compute_metric("bits_per_byte", nll=[nll], bytes=[byte_count])
    return metrics


class RunningMetrics:
    """Compute `language_model_metrics` of an evaluation that Trainer hands over batch by batch (`batch_eval_metrics`).

    Only three sums are kept, so that memory does not grow with the text. A whole evaluation, handed over at once, works too.

    Args:
        byte_count: as for `language_model_metrics`.
    """

    def __init__(self, byte_count: int | None = None) -> None:
        self.byte_count = byte_count
        self._sums = torch.zeros(3, dtype=torch.float64)

    def __call__(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        """Add the rows of a batch; return the metrics after the last one (`compute_result`), and begin anew."""
        self._sums = self._sums + torch.as_tensor(prediction.predictions).cpu().double().sum(0)
        if not compute_result:
            return {}
        sums, self._sums = self._sums[None].numpy(), torch.zeros_like(self._sums)
        return language_model_metrics(EvalPrediction(sums, None), self.byte_count)  # pyright: ignore[reportArgumentType]


def position_bound(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence that a model takes; None for a scheme that goes on for ever."""
    return getattr(config, "max_position_embeddings", None)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout and gradients off for a while."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[float]:
    """Compute the perplexity of each text; every token counts once.

    A text longer than a model with a bound takes is read in windows that advance by half their length, so that all but
    the first window's tokens see at least half a window.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer; a padding token is not needed.
        texts: texts with at least one token each.
    """
    found = []
    with evaluating(model):
        for text in texts:
            tokens = torch.tensor([start_token_id(tokenizer), *_encode(tokenizer, text)])
            window = position_bound(model.config) or len(tokens)
            nll, _, count = _score_windows(model, tokens[:-1], tokens[1:], window, max(1, window // 2)).tolist()
            found.append(math.exp(nll / count))
    return found


def evaluate_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    window: int,
    stride: int,
    batch_size: int = 8,
) -> dict[str, float]:
    """Evaluate without memory: read each text in overlapping windows that compute their context anew.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        texts: documents with at least one token each.
        window: tokens of a window.
        stride: tokens that are predicted in each window but the first, from at least `window - stride` tokens before
            them; 1 gives every token all of its context, and takes longest.
        batch_size: windows that are computed at the same time.

    Returns:
        `loss`, `tokens`, `perplexity`, `accuracy` and, if the tokenizer gives the texts back, `bits_per_byte` over all texts.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride} must be at least 1 and at most window={window}")
    with evaluating(model):
        rows = [
            _score_windows(model, inputs, targets, window, stride, batch_size)
            for inputs, targets in _inputs_and_targets(tokenizer, texts)
        ]
    return _summary(rows, tokenizer, texts)


def evaluate_stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    segment_len: int = 256,
    batch_size: int = 8,
) -> dict[str, float]:
    """Evaluate with memory: read each text once, segment by segment, from an empty memory.

    Keys and values of the past are kept instead of hidden states where that gives the same numbers, which saves
    projecting the memory again in every segment. A model without memory and window keeps all of the text.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        texts: documents with at least one token each.
        segment_len: tokens read at the same time; it changes no number, unless the model has the original window.
        batch_size: texts read at the same time.

    Returns:
        `loss`, `tokens`, `perplexity`, `accuracy` and, if the tokenizer gives the texts back, `bits_per_byte` over all texts.
    """
    if segment_len < 1 or batch_size < 1:
        raise ValueError(f"segment_len={segment_len} and batch_size={batch_size} must be at least 1")
    documents = sorted(_inputs_and_targets(tokenizer, texts), key=lambda document: len(document[0]), reverse=True)
    with evaluating(model):
        rows = [
            _score_streams(model, documents[first : first + batch_size], segment_len)
            for first in range(0, len(documents), batch_size)
        ]
    return _summary(rows, tokenizer, texts)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    tokens = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    if not tokens:
        raise ValueError(f"the text {text!r} has no tokens: it has no perplexity")
    return tokens


def _inputs_and_targets(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return the inputs and targets of each document: a start token before it and an end token after it."""
    for text in texts:
        tokens = _encode(tokenizer, text)
        yield torch.tensor([start_token_id(tokenizer), *tokens]), torch.tensor([*tokens, end_token_id(tokenizer)])


def _summary(rows: Sequence[torch.Tensor], tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> dict[str, float]:
    sums = torch.stack(list(rows)).cpu().numpy()
    count, lost = count_row_bytes(({"text": text} for text in texts), tokenizer)
    if lost:
        logger.warning("no bits per byte: %s", lost)
    return language_model_metrics(EvalPrediction(sums, None), count)  # pyright: ignore[reportArgumentType]


def _score_windows(
    model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor, window: int, stride: int, batch_size: int = 1
) -> torch.Tensor:
    """Return the sums of `score_rows`, `(3,)`, over one text: the first window scores all its tokens, the others the last."""
    window = min(window, len(inputs))
    missing = -(len(inputs) - window) % stride  # padding after the text, which a causal model never looks at
    ids = F.pad(inputs, (0, missing)).unfold(0, window, stride)
    wanted = F.pad(targets, (0, missing), value=IGNORED).unfold(0, window, stride)
    groups = [(slice(0, 1), window), *((slice(at, at + batch_size), stride) for at in range(1, len(ids), batch_size))]
    sums = torch.zeros(3, dtype=torch.float64)
    for rows, kept in groups:
        logits = model(input_ids=ids[rows].to(model.device), use_cache=False, logits_to_keep=kept).logits
        sums += score_rows(logits, wanted[rows, -kept:].to(model.device)).double().sum(0).cpu()
    return sums


def _score_streams(
    model: PreTrainedModel, documents: Sequence[tuple[torch.Tensor, torch.Tensor]], segment_len: int
) -> torch.Tensor:
    """Return the sums of `score_rows`, `(3,)`, over documents that are read side by side, the longest first.

    They all begin at their beginning, so that nothing has to be masked; each leaves the batch when it ends.
    """
    mem_len, window = getattr(model.config, "mem_len", 0), getattr(model.config, "sliding_window", None)
    by_memory = mem_len > 0 and (window is None or window > mem_len + 1)
    memory, cache = None, DynamicCache(config=model.config)
    inputs = pad_sequence([document[0] for document in documents], True, 0).to(model.device)
    targets = pad_sequence([document[1] for document in documents], True, IGNORED).to(model.device)
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, inputs.shape[1], segment_len):
        going = torch.arange(sum(len(document[0]) > start for document in documents), device=model.device)
        ids, wanted = (table[going, start : start + segment_len] for table in (inputs, targets))
        if by_memory:
            output = model(input_ids=ids, memory=None if memory is None else memory.select(going))
            memory = output.memory
        else:
            cache.batch_select_indices(going)
            output = model(input_ids=ids, cache=cache, use_cache=True)
        sums += score_rows(output.logits, wanted).double().sum(0).cpu()
    return sums
