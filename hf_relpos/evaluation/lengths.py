"""Evaluate a causal language model on the same tokens at other lengths than it was trained at, without further training.

Every length scores the same tokens: windows of the greatest length are taken from the documents once, and a shorter length reads
each of them in pieces. What differs between two lengths is then the context alone. Works for any causal model of transformers.
"""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.sources import describe_documents
from hf_relpos.evaluation.language_model import evaluating
from hf_relpos.evaluation.language_model import position_bound
from hf_relpos.evaluation.windows import Windows
from hf_relpos.evaluation.windows import take_windows

# Last tokens of each window that are scored with less and less context.
SCORED = 16
# A context counts as used as long as more of it lowers the loss by more than this share.
GAIN = 0.01
# How a model says that a sequence is too long for it: by its own check, or by an index into its table of positions.
REFUSALS = (ValueError, IndexError)


def token_losses(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor, rows: int = 8) -> torch.Tensor:
    """Return the negative log-likelihood of each target in nats, `(windows, length)`.

    A model with segment memory reads each row in segments of its trained length, from an empty memory. Any other reads it at once.

    Args:
        model: a causal language model.
        inputs, targets: `(windows, length)`.
        rows: windows that are read at the same time.
    """
    with evaluating(model):
        parts = [_read(model, *group) for group in zip(inputs.split(rows), targets.split(rows), strict=True)]
    return torch.cat(parts)


def _read(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    config: Any = model.config
    remembers = getattr(config, "mem_len", 0) > 0
    segment = config.trained_length if remembers else inputs.shape[1]
    memory, found = None, []
    for ids, wanted in zip(inputs.split(segment, 1), targets.split(segment, 1), strict=True):
        carried: dict[str, Any] = {"memory": memory} if remembers else {}
        output = model(input_ids=ids.to(model.device), use_cache=False, **carried)
        memory = output.memory if remembers else None
        logits = output.logits.float().flatten(0, 1)
        found.append(F.cross_entropy(logits, wanted.to(model.device).flatten(), reduction="none").view_as(wanted).cpu())
    return torch.cat(found, 1).double()


def learned_bound(model: PreTrainedModel) -> int | None:
    """Return the length at which a model's table of positions ends; None without such a table.

    The configuration of a rotary model names the length that it was trained at, too, which is no bound: only a table is one.
    """
    bound = position_bound(model.config)
    if bound is None or hasattr(model.config, "trained_length"):
        return bound
    tables = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in name.rsplit(".", 1)[-1] or name.endswith("wpe"))
    ]
    return bound if any(bound <= size <= bound + 2 for size in tables) else None  # some leave two rows for padding


def why_not(model: PreTrainedModel, length: int) -> str | None:
    """Return why a model cannot read a length, None if nothing is known to prevent it."""
    bound = learned_bound(model)
    if bound is not None and length > bound:
        return f"{length} positions are needed, and the model has learned {bound}"
    return None


def refuse_foresight(model: PreTrainedModel) -> None:
    """Raise a ValueError for a model that sees tokens after a target, as encoders do: its loss would mean nothing."""
    ids = torch.arange(2, 10, device=model.device)[None] % model.config.vocab_size
    with evaluating(model):
        first, second = (
            model(input_ids=one, use_cache=False).logits[:, :-1] for one in (ids, torch.cat([ids[:, :-1], ids[:, :1]], 1))
        )
    if not torch.allclose(first, second, atol=1e-6, rtol=1e-4):
        raise ValueError(f"{type(model).__name__} is no causal language model: what it predicts depends on later tokens")


def evaluate_lengths(
    model: PreTrainedModel, windows: Windows, lengths: Sequence[int], batch_size: int = 8
) -> list[dict[str, Any]]:
    """Score the same tokens at several lengths.

    Args:
        model: a causal language model.
        windows: what to score; as long as the greatest length, or longer.
        lengths: tokens that are read at a time.
        batch_size: rows of the shortest length that are read at the same time; longer rows are fewer.

    Returns:
        For each length `length`, `loss` (nats a token), `perplexity`, `tokens`, `bits_per_byte` where it has a meaning, and
        `by_position`: the mean loss in bins of positions that double. Else `length` and `not_applicable`, the reason.
    """
    found = []
    for length in lengths:
        try:
            if reason := why_not(model, length):
                raise ValueError(reason)
            pieces = [_cut(table, length) for table in (windows.inputs, windows.targets)]
            losses = token_losses(model, *pieces, rows=max(1, batch_size * min(lengths) // length))
        except REFUSALS as error:
            found.append({"length": length, "not_applicable": str(error)})
            continue
        loss = losses.mean().item()
        row = {"length": length, "loss": loss, "perplexity": math.exp(min(loss, 700)), "tokens": losses.numel()}
        if windows.byte_count:
            per_byte = windows.targets.numel() / windows.byte_count  # tokens
            row["bits_per_byte"] = loss * per_byte / math.log(2)
        found.append(row | {"by_position": by_position(losses)})
    return found


def _cut(table: torch.Tensor, length: int) -> torch.Tensor:
    """Cut windows into pieces of a length; what does not fill one is left out."""
    return table.unfold(1, length, length).flatten(0, 1)


def by_position(losses: torch.Tensor) -> list[dict[str, Any]]:
    """Return the mean loss of the positions 0, 1, 2-3, 4-7, ... of rows `(rows, length)`; `to` is included."""
    length = losses.shape[1]
    edges = [0, *takewhile(lambda edge: edge < length, (2**power for power in range(length))), length]
    return [
        {"from": start, "to": end - 1, "loss": losses[:, start:end].mean().item()}
        for start, end in zip(edges, edges[1:], strict=False)
        if end > start
    ]


def loss_by_context(model: PreTrainedModel, windows: Windows, batch_size: int = 8) -> list[dict[str, Any]]:
    """Score the last tokens of each window with at least 1, 2, 4, ... tokens before them.

    Returns:
        Rows `context`, `loss` and `loss_error`, the standard error of what this context gains over the one before. They end where
        the window or the model's table of positions does.
    """
    length = windows.inputs.shape[1]
    scored = min(SCORED, max(1, length // 4))
    found: list[dict[str, Any]] = []
    before = None
    for context in takewhile(lambda size: size + scored <= length, (2**power for power in range(length))):
        if why_not(model, context + scored):
            break
        parts = [table[:, length - scored - context :] for table in (windows.inputs, windows.targets)]
        losses = token_losses(model, *parts, rows=max(1, batch_size * scored // (context + scored)))[:, -scored:].mean(1)
        gain = None if before is None or len(losses) < 2 else (before - losses).std().item() / len(losses) ** 0.5
        found.append({"context": context, "loss": losses.mean().item(), "gain_error": gain})
        before = losses
    return found


def effective_context(rows: Sequence[dict[str, Any]]) -> int | None:
    """Return the smallest context whose loss is within 1 % of the lowest: more of it is hardly used."""
    if not rows:
        return None
    lowest = min(row["loss"] for row in rows)
    return next(row["context"] for row in rows if row["loss"] <= lowest * (1 + GAIN))


def length_report(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Dataset,
    lengths: Sequence[int],
    tokens: int = 2**16,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Evaluate a causal model on documents at several lengths.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        documents: rows with a column `text`.
        lengths: tokens that are read at a time.
        tokens: about how many to score at each length.
        batch_size: rows of the shortest length that are read at the same time.

    Returns:
        JSON: `lengths` as `evaluate_lengths` gives them, `context` as `loss_by_context`, `effective_context`, `windows`, `notes`, and
        `text`: the SHA-256 of the documents.

    Raises:
        ValueError: a length is below 1, the model is no causal one, or the text is too short.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)} must be whole numbers of tokens, at least 1")
    refuse_foresight(model)
    lengths = sorted(set(lengths))
    windows = take_windows(documents, tokenizer, lengths[-1], tokens)
    context = loss_by_context(model, windows, batch_size)
    return {
        "lengths": evaluate_lengths(model, windows, lengths, batch_size),
        "context": context,
        "effective_context": effective_context(context),
        "windows": len(windows.inputs),
        "bytes": windows.byte_count,
        "text": describe_documents(documents)["sha256"],
        "notes": windows.notes,
    }


def format_lengths(report: dict[str, Any]) -> str:
    """Format a report of `length_report` as Markdown tables."""
    names = [name for name in ("loss", "bits_per_byte", "perplexity") if any(name in row for row in report["lengths"])]
    lines = ["| length | " + " | ".join(names) + " |", "|" + "---|" * (1 + len(names))]
    for row in report["lengths"]:
        reason = row.get("not_applicable")
        cells = [f"not applicable: {reason}", *[""] * (len(names) - 1)] if reason else [f"{row[name]:.4f}" for name in names]
        lines.append(f"| {row['length']} | " + " | ".join(cells) + " |")
    lines += ["", "Mean loss (nats a token) by position in the text that is read:", ""]
    done = [row for row in report["lengths"] if "by_position" in row]
    if done:
        longest = done[-1]["by_position"]
        lines += [
            "| position | " + " | ".join(f"length {row['length']}" for row in done) + " |",
            "|" + "---|" * (1 + len(done)),
        ]
        for at, span in enumerate(longest):
            bins = [row["by_position"][at] if at < len(row["by_position"]) else None for row in done]
            name = f"{span['from']}-{span['to']}" if span["to"] > span["from"] else str(span["from"])
            lines.append(f"| {name} | " + " | ".join("" if one is None else f"{one['loss']:.4f}" for one in bins) + " |")
    lines += ["", "Loss of the last tokens by the tokens of context before them:", "", "| context | loss |", "|---|---|"]
    lines += [f"| {row['context']} | {row['loss']:.4f} |" for row in report["context"]]
    lines += ["", f"Effective context: {report['effective_context']} tokens (the loss is within {GAIN:.0%} of the lowest)."]
    return "\n".join([*lines, *(f"Note: {note}." for note in report["notes"])]) + "\n"
