"""Find the tokens that begin a document in a packed row, and how far each token stands in its own.

A caller marks documents by `reset_mask`, or as the packing collators of transformers and TRL do: by `seq_idx`, by
`cu_seq_lens_q`, or by `position_ids` that begin anew at 0. All of them become the one `reset_mask`.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from .positions import known

DOCUMENT_KEYWORDS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What packing collators hand to a model beside `position_ids`. The keys are those of the queries, and no length is needed."""


def whole_numbers(given: Any) -> bool:
    """Return whether an argument is a tensor of whole numbers."""
    return isinstance(given, torch.Tensor) and not given.is_floating_point() and given.dtype != torch.bool


def find_document_starts(
    shape: tuple[int, int],
    reset_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    keywords: dict[str, Any],
    device: torch.device,
) -> torch.Tensor | None:
    """Return the `reset_mask` of a pass, however the caller marked documents.

    Args:
        shape: batch size and number of new tokens.
        reset_mask: `(batch, sequence)` true on the first token of each document. It is returned as it is and decides alone.
        position_ids: `(batch|1, sequence)`, or None where they mark no documents.
        keywords: keyword arguments of the caller; those of `DOCUMENT_KEYWORDS` are taken out.
        device: where the result is put.

    Returns:
        `(batch, sequence)` booleans, or None where nothing but the first token begins a document.

    Raises:
        ValueError: `seq_idx` or `cu_seq_lens_q` do not fit the input.
    """
    seq_idx, lengths, *_ = (keywords.pop(name, None) for name in DOCUMENT_KEYWORDS)
    if reset_mask is not None:
        return reset_mask
    starts = None
    if seq_idx is not None:
        if not whole_numbers(seq_idx) or tuple(seq_idx.shape) != shape:
            found = tuple(seq_idx.shape) if isinstance(seq_idx, torch.Tensor) else type(seq_idx).__name__
            raise ValueError(
                f"seq_idx of {found} is refused: expected whole numbers of shape {shape}, a document's number a token"
            )
        starts = _shifted(seq_idx.diff(dim=-1) != 0)
    elif lengths is not None:
        starts = _starts_of_lengths(torch.as_tensor(lengths), shape)
    elif whole_numbers(position_ids) and position_ids is not None and position_ids.shape[-1] == shape[1]:
        starts = restarts(position_ids.view(-1, shape[1]))
    if starts is None or known(starts.any()) is False:
        return None
    return starts.to(device).expand(shape)


def restarts(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where position ids begin anew, `(batch, sequence)` booleans: at each 0 that follows a token.

    - The first token starts nothing. A row may begin within a document, with any number.
    - The numbers of a document may skip and repeat, but not go back. In a row that goes back to another number than 0 the tokens
      are interleaved, and nothing starts.
    - A 0 behind a 0 starts a document too, so that documents of one token are kept apart; but not in a row in which other
      numbers repeat as well, or which is 0 throughout: there numbers are repeated.

    Args:
        position_ids: `(batch, sequence)`.
    """
    step, zero = position_ids.diff(dim=-1), position_ids[:, 1:] == 0
    interleaved = ((step < 0) & ~zero).any(-1, keepdim=True)
    repeated = ((step == 0) & ~zero).any(-1, keepdim=True) | zero.all(-1, keepdim=True)
    return _shifted(zero & ~interleaved & ((step < 0) | ((step == 0) & ~repeated)))


def counts_tokens(position_ids: torch.Tensor, reset_mask: torch.Tensor | None) -> bool:
    """Return whether position ids `(batch|1, sequence)` go up by one from token to token, within each document."""
    one = position_ids.diff(dim=-1) == 1
    return known((one if reset_mask is None else one | reset_mask[:, 1:].bool()).all()) is True


def count_in_document(
    valid: torch.Tensor | None, reset: torch.Tensor | None, before: torch.Tensor | int, length: int, device: torch.device
) -> torch.Tensor:
    """Return the number of tokens before each token in its own document, `(batch|1, length)`.

    Args:
        valid: `(batch, length)` False for padding; None when all count.
        reset: `(batch, length)` True on the first token of a document; None for one document.
        before: tokens of the first document that came before, a number or `(batch,)`.
        length: number of tokens.
        device: where they are counted.
    """
    count = torch.arange(length, device=device)[None] if valid is None else (valid.long().cumsum(-1) - 1).clamp(min=0)
    before = before[:, None] if isinstance(before, torch.Tensor) and before.dim() else before
    if reset is None:
        return count + before
    first = last_marked(count, reset)
    return torch.where(reset.cumsum(-1) > 0, count - first, count + before)


def last_marked(values: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """Return the value of the last marked index up to each index, 0 before the first. ONNX has no cummax.

    Args:
        values: `(batch|1, length)` integers.
        marked: `(batch, length)` booleans.

    Returns:
        `(batch, length)`.
    """
    order = marked.cumsum(-1)
    values = torch.where(marked, values, 0)
    table = pad(torch.zeros_like(values), (0, 1)).scatter(-1, torch.where(marked, order, 0), values)
    return table.gather(-1, order)


def check_reset_mask(reset_mask: torch.Tensor | None, shape: tuple[int, int], cached: bool) -> torch.Tensor | None:
    """Return `reset_mask` as booleans; a ValueError if it does not fit the input, or if there is a cache."""
    found = tuple(reset_mask.shape) if isinstance(reset_mask, torch.Tensor) else None
    if reset_mask is not None and (cached or found != shape):
        reason = "a KV cache continues one document" if cached else f"expected the shape {shape}"
        given = f"of shape {found}" if found is not None else f"{reset_mask!r}, which is no tensor,"
        raise ValueError(f"reset_mask {given} is refused: {reason}")
    return None if reset_mask is None else reset_mask.bool()


def _shifted(later: torch.Tensor) -> torch.Tensor:
    """Put a False before what is known of the second token and those after it."""
    return pad(later, (1, 0))


def _starts_of_lengths(offsets: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return `(1, sequence)`, true where FlashAttention's offsets `(documents + 1,)` say that a document starts."""
    if shape[0] != 1 or offsets.dim() != 1 or known(offsets[-1]) not in (None, shape[1]):
        raise ValueError(
            f"cu_seq_lens_q={offsets.tolist()} is refused for an input of shape {shape}: expected one row, and the offsets of its "
            f"documents, from 0 to {shape[1]}; mark the documents of several rows by reset_mask or seq_idx"
        )
    places = torch.arange(shape[1], device=offsets.device)
    return (places[:, None] == offsets[1:-1]).any(-1)[None]
