"""Builds the positions of a forward pass: the only code that knows about memory, cache, packing and padding."""

import torch
from torch.nn.functional import pad

from .position_documents import check_reset_mask
from .position_documents import count_in_document
from .position_documents import counts_tokens
from .position_documents import last_marked
from .position_documents import whole_numbers
from .positions import Positions
from .positions import known
from .sliding_cache import drop_keys


def as_visible(attention_mask: torch.Tensor) -> torch.Tensor:
    """Turn a mask of four dimensions into a boolean one: it hides by 0 or False, an additive one by less than -1000."""
    return attention_mask > -1e3 if attention_mask.is_floating_point() else attention_mask.bool()


def key_mask(attention_mask: torch.Tensor | None, length: int | torch.Tensor, slots: int) -> torch.Tensor | None:
    """Check a padding mask and return it as booleans, or None when it hides nothing.

    Args:
        attention_mask: `(batch, length)`, or `(batch, slots)` when a static cache has more slots than there are tokens.
        length: number of tokens, cached and new.
        slots: number of keys from the first token on.

    Returns:
        `(batch, slots)`, False in the slots that hold no token.
    """
    if attention_mask is None:
        return None
    given = attention_mask.shape[-1]
    if given != slots and given != length:
        raise ValueError(f"attention_mask covers {given} tokens, expected {int(length)}: the cached tokens and the new ones")
    valid = attention_mask.bool()
    if known(valid.all()):
        return None
    return pad(valid, (0, slots - given))


def padding_between(valid: torch.Tensor) -> torch.Tensor | None:
    """Return the padding that stands between a row's first token and each key and is over there; None when there is none.

    Padding is numbered on from the token before it, and the token behind it is too: so nothing depends on what follows, nor on other
    rows, and padding behind the last token leaves distances as they are.

    Args:
        valid: `(batch, key)`, False for padding.

    Returns:
        `(batch, key)`.
    """
    between = (~valid & (valid.cumsum(-1) > 0)).cumsum(-1)
    gaps = last_marked(between, valid)
    return None if known(gaps.any()) is False else gaps


def build_positions(
    shape: tuple[int, int],
    like: torch.Tensor,
    *,
    causal: bool,
    window: int | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    reset_mask: torch.Tensor | None = None,
    cached: tuple[int | torch.Tensor, int, int] | None = None,
    memory_length: torch.Tensor | None = None,
    memory_slots: int = 0,
) -> Positions:
    """Derive the positions of one forward pass.

    Args:
        shape: batch size and number of new tokens.
        like: a tensor whose device and precision (at least float32) are used.
        causal: whether the future is hidden.
        window: number of keys that a query sees, itself included; None for all.
        attention_mask: `(batch, past + sequence)` 1 for tokens and 0 for padding, or `(batch|1, 1, query, key)`.
        position_ids: `(batch|1, sequence)`, or `(batch|1, past + sequence)` or `(batch|1, key)` to number the cached tokens or
            the slots of the memory too; by default tokens are counted, those in a cache that were not numbered from 0 on.
        reset_mask: `(batch, sequence)` true on the first token of each document: nothing before it is seen.
        cached: tokens seen so far, number of keys in this pass and offset of the first of them, for a KV cache in use.
        memory_length: `(batch,)` valid tokens of the segment memory, whose slots come first among the keys.
        memory_slots: number of memory slots.

    Raises:
        ValueError: a mask or position_ids of a length that fits neither the tokens nor the keys, or a cache that lacks keys.
    """
    sequence, device = shape[1], like.device
    past, keys, offset = cached if cached is not None else (memory_slots, memory_slots + sequence, 0)
    start = past - offset
    given_mask = _ready_mask(attention_mask, shape, keys)
    tokens, slots = (sequence, sequence) if cached is None else (past + sequence, offset + keys)
    valid = key_valid = None if given_mask is not None else key_mask(attention_mask, tokens, slots)
    in_document, documents = _documents(shape, device, valid, reset_mask, cached, memory_length)
    key_document = None if documents is None else pad(documents, (memory_slots, 0))  # memory belongs to document 0
    if memory_length is not None:
        key_valid = _behind_memory(torch.ones_like(in_document) > 0 if valid is None else valid, memory_length, memory_slots)
    gaps = None if valid is None or key_valid is None else padding_between(key_valid)
    if offset and key_valid is not None:
        key_valid, gaps = drop_keys(key_valid, gaps, slice(past, past + sequence), offset, window)
    key = torch.arange(keys, device=device)[None] + offset - (0 if gaps is None else gaps)
    query = key.index_select(1, own := torch.arange(sequence, device=device) + start)
    counted = position_ids is None
    if position_ids is not None:
        given = _check_numbers(position_ids, shape, past, keys, 0 if cached else memory_slots).to(device)
        plain = attention_mask is None and cached is None and memory_length is None
        if not (counted := plain and counts_tokens(given, reset_mask)):
            given, key = _given_positions(given, own, key, offset, _begins_padded(valid, past))
        query, in_document = query if counted else given, given
    return Positions(
        query=query,
        key=key,
        fresh_key=query if cached is not None else key,
        in_document=in_document,
        start=start,
        contiguous=counted,
        causal=causal,
        window=window,
        key_valid=key_valid,
        query_valid=None if valid is None or key_valid is None else key_valid.index_select(1, own),
        query_document=documents,
        key_document=key_document,
        gaps=gaps,
        given_mask=given_mask,
        dtype=torch.promote_types(like.dtype, torch.float32),
    )


def source_positions(queries: int, source: torch.Tensor, attention_mask: torch.Tensor | None) -> Positions:
    """Return the positions of attention to another sequence: no distance has a meaning, and only padding is hidden.

    Args:
        queries: number of queries.
        source: `(batch, source, hidden_size)` what is attended to.
        attention_mask: `(batch, source)` 1 for tokens and 0 for padding, or `(batch|1, 1, query, source)` as the source itself
            was encoded with: what none of its tokens sees is padding. A source without any token is seen whole.
    """
    keys, device = source.shape[1], source.device
    if attention_mask is not None and attention_mask.dim() == 4:
        attention_mask = as_visible(attention_mask).any(2)[:, 0]
    valid = key_mask(attention_mask, keys, keys)
    query, key = torch.arange(queries, device=device)[None], torch.arange(keys, device=device)[None]
    shown = None if valid is None else (valid | ~valid.any(-1, keepdim=True))[:, None, None].expand(-1, -1, queries, -1)
    # The queries are numbered as the last keys: without a mask, nothing is then hidden from them.
    return Positions(query, key, key, query, start=keys - queries, contiguous=True, causal=False, given_mask=shown)


def _ready_mask(attention_mask: torch.Tensor | None, shape: tuple[int, int], keys: int) -> torch.Tensor | None:
    """Return a mask of four dimensions as booleans, None for one of two; a ValueError for others, which say nothing of single tokens."""
    if attention_mask is None or attention_mask.dim() == 2:
        return None
    expected = (shape[0], 1, shape[1], keys)
    given = attention_mask.shape
    if len(given) != 4 or any(size not in (1, full) for size, full in zip(given, expected, strict=True)) or given[3] != keys:
        raise ValueError(
            f"attention_mask of shape {tuple(given)} is refused: expected (batch, tokens), 1 for tokens and 0 for padding, or "
            f"{expected}: (batch, 1, query, key), the slots of a memory or cache first among the keys"
        )
    return as_visible(attention_mask)


def _documents(
    shape: tuple[int, int],
    device: torch.device,
    valid: torch.Tensor | None,
    reset_mask: torch.Tensor | None,
    cached: tuple[int | torch.Tensor, int, int] | None,
    memory_length: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens before each query in its document, `(batch|1, sequence)`, and the number of its document or None."""
    if valid is not None and valid.shape[0] not in (1, shape[0]):
        raise ValueError(f"attention_mask has {valid.shape[0]} rows, the input a batch of {shape[0]}")
    reset = check_reset_mask(reset_mask, shape, cached is not None)
    if cached is not None and valid is not None:
        own = torch.arange(shape[1], device=device) + cached[0]
        in_document = count_in_document(valid, None, 0, valid.shape[1], device).index_select(1, own)
    else:
        before = cached[0] if cached is not None else 0 if memory_length is None else memory_length
        in_document = count_in_document(valid, reset, before, shape[1], device)
    if memory_length is not None:
        in_document = in_document.expand(shape[0], -1)
    return in_document, None if reset is None else reset.long().cumsum(-1)


def _behind_memory(valid: torch.Tensor, memory_length: torch.Tensor, slots: int) -> torch.Tensor:
    """Return which keys count, `(batch, slots + sequence)`, from `valid (batch, sequence)` and the memory's lengths `(batch,)`."""
    return torch.cat([torch.arange(slots, device=valid.device) >= slots - memory_length[:, None], valid], 1)


def _check_numbers(
    position_ids: torch.Tensor, shape: tuple[int, int], past: int | torch.Tensor, keys: int, memory_slots: int
) -> torch.Tensor:
    """Return the caller's position ids as `(batch|1, length)`, or raise a ValueError that says what to give."""
    if not isinstance(position_ids, torch.Tensor):
        raise ValueError(f"position_ids of type {type(position_ids).__name__} are refused: expected a tensor of whole numbers")
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids
    rows, length = position_ids.shape[0], position_ids.shape[-1]
    if position_ids.dim() != 2 or rows not in (1, shape[0]) or not whole_numbers(position_ids):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} and {position_ids.dtype} are refused: expected whole numbers, "
            f"1 row{'' if shape[0] == 1 else f' or {shape[0]}'}"
        )
    if memory_slots and length != keys:
        raise ValueError(
            f"position_ids number {length} tokens, but a memory holds no numbers: expected {keys}, those of its {memory_slots} "
            "slots first; without position_ids, tokens are counted"
        )
    if length not in (shape[1], keys) and length != past + shape[1]:
        raise ValueError(
            f"position_ids number {length} tokens, expected {shape[1]} (new) or {int(past) + shape[1]} (all keys)"
        )
    return position_ids


def _begins_padded(valid: torch.Tensor | None, past: int | torch.Tensor) -> bool:
    """Return whether padding stands before the first token of a row with tokens in a cache: the count then does not begin at 0."""
    return valid is not None and known(valid[:, 0].all()) is False and int(past) > 0


def _given_positions(
    position_ids: torch.Tensor, own: torch.Tensor, key: torch.Tensor, offset: int, padded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key positions from the position ids that the caller gave.

    Args:
        position_ids: `(batch|1, query)`, `(batch|1, key)`, or all tokens from the first one on.
        own: `(query,)` index of each query among the keys.
        key: `(batch|1, key)` the positions that would be counted.
        offset: index of the first key among all tokens.
        padded: whether padding was counted before the first token of a row.

    Returns:
        `(batch|1, query)` and `(batch|1, key)`.
    """
    (sequence,), keys = own.shape, key.shape[1]
    if position_ids.shape[-1] == sequence < keys:
        if padded:
            raise ValueError(
                "position_ids number the new tokens, but those in the cache were counted, padding included: give position_ids "
                "from the first tokens on, or none"
            )
        rows = max(position_ids.shape[0], key.shape[0])
        query = position_ids.expand(rows, -1)
        return query, key.expand(rows, -1).index_copy(1, own, query)
    if position_ids.shape[-1] != keys:
        position_ids = position_ids[:, offset : offset + keys]
        position_ids = pad(position_ids, (0, keys - position_ids.shape[-1]))  # empty slots of a static cache
    return position_ids.index_select(1, own), position_ids
