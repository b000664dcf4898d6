"""Where every query and key stands: the only code that knows about memory, cache, packing and padding.

A forward pass builds one `Positions` and hands it to all layers. Schemes read distances from it and never see a tensor
length; the attention layer reads `visible` from it, so that the mask and the biases can never disagree.

Notation: `query` tokens are the ones whose outputs are computed; `key` tokens are all that may be attended to, in the order
memory or cache first, then the queries themselves. `start` is the index of the first query among the keys.
"""

from dataclasses import dataclass
from dataclasses import replace
from functools import cached_property

import torch
from torch.nn.functional import pad


def relative_shift(scores: torch.Tensor) -> torch.Tensor:
    """Slide row i of `scores` left by (rows - 1 - i): the relative shift of Transformer-XL (arXiv 1901.02860, appendix B).

    Args:
        scores: `(..., query, distances)`, the distances ascending.

    Returns:
        `(..., query, distances)` whose entry [i, j] is scores[i, j + rows - 1 - i] wherever that column exists. The other
        entries hold finite values of neighbouring rows: they belong to keys that no query may see.
    """
    *outer, rows, columns = scores.shape
    return pad(scores, (1, 0)).reshape(*outer, columns + 1, rows)[..., 1:, :].reshape(*outer, rows, columns)


@dataclass(frozen=True)
class Positions:
    """Positions of queries and keys in one forward pass, and who sees whom.

    Attributes:
        query: `(batch|1, query)` position number of each query; only differences to `key` have a meaning.
        key: `(batch|1, key)` position number of each key.
        fresh_key: `(batch|1, fresh)` position numbers of the keys projected in this pass (memory and segment, no cache).
        in_document: `(batch|1, query)` number of tokens that precede each query in its document, padding not counted.
        start: index of the first query among the keys; a tensor when a static cache counts on the device.
        contiguous: True when a distance is the difference of two indices (the caller gave no `position_ids`).
        causal: a query sees no key after itself.
        window: number of keys a query sees, itself included; None for all.
        key_valid: `(batch, key)` False for padding and unused memory slots; None when all are valid.
        query_valid: `(batch, query)` False for padding among the queries; None when there is none.
        query_document, key_document: `(batch, query)` and `(batch, key)` number of the document; None when there is one.
        given_mask: `(batch|1, 1, query, key)` a mask made by the caller, which then replaces all of the above.
        dtype: of angles and distances in formulas: float32, or float64 in a float64 model.
    """

    query: torch.Tensor
    key: torch.Tensor
    fresh_key: torch.Tensor
    in_document: torch.Tensor
    start: int | torch.Tensor
    contiguous: bool
    causal: bool
    window: int | None = None
    key_valid: torch.Tensor | None = None
    query_valid: torch.Tensor | None = None
    query_document: torch.Tensor | None = None
    key_document: torch.Tensor | None = None
    given_mask: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def is_toeplitz(self) -> bool:
        """Whether every distance equals column - row - start, so that shifting views replace gathers."""
        return self.contiguous and isinstance(self.start, int)

    @cached_property
    def index_distance(self) -> torch.Tensor:
        """Index of the key minus index of the query, `(1, query, key)`: negative in the past."""
        device = self.query.device
        query = torch.arange(self.query.shape[1], device=device) + self.start
        return (torch.arange(self.key.shape[1], device=device) - query[:, None])[None]

    @cached_property
    def distance(self) -> torch.Tensor:
        """Position of the key minus position of the query, `(batch|1, query, key)`: the sign of Shaw and T5."""
        return self.index_distance if self.contiguous else self.key[:, None, :] - self.query[:, :, None]

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest distance that a query may meet."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        if self.contiguous:
            fixed = isinstance(self.start, int)
            low = 1 - queries - self.start if fixed else 1 - keys
            high = keys - 1 - self.start if fixed else keys - 1
            return low, min(high, 0) if self.causal else high
        return int(self.distance.min()), int(self.distance.max())

    @cached_property
    def distances(self) -> torch.Tensor:
        """All distances between the bounds, ascending, `(distances,)`: what a scheme makes one entry or vector for."""
        low, high = self.bounds
        return torch.arange(low, high + 1, device=self.query.device)

    @cached_property
    def _column(self) -> torch.Tensor:
        """Index into `distances` of every pair, `(batch|1, query, key)`; unseen pairs are clamped to the ends."""
        low, high = self.bounds
        return (self.distance - low).clamp(0, high - low)

    def spread(self, per_distance: torch.Tensor) -> torch.Tensor:
        """Lay numbers per distance out over query and key: `(heads, distances)` to `(batch|1, heads, query, key)`."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        if not self.is_toeplitz:
            return per_distance[:, self._column].transpose(0, 1)
        future = queries + keys - 1 - per_distance.shape[-1]  # causal distances end at 0: the rest is never seen
        return pad(per_distance, (0, future)).unfold(-1, keys, 1).flip(-2)[None]

    def gather(self, scores: torch.Tensor) -> torch.Tensor:
        """Pick every pair's distance from scores per query: `(batch, heads, query, distances)` to `(..., query, key)`."""
        if self.is_toeplitz:
            missing = self.key.shape[1] - scores.shape[-1]  # keys after the last query
            return relative_shift(pad(scores, (0, missing)) if missing > 0 else scores)[..., : self.key.shape[1]]
        return scores.gather(-1, self._column[:, None].expand(*scores.shape[:-1], -1))

    def gather_keys(self, scores: torch.Tensor) -> torch.Tensor:
        """Pick every pair's distance from scores per key: `(batch, heads, key, distances)` to `(..., query, key)`."""
        column = self._column.transpose(-1, -2)[:, None]
        return scores.gather(-1, column.expand(*scores.shape[:-1], -1)).transpose(-1, -2)

    @property
    def needs_mask(self) -> bool:
        """False when causality alone (or nothing) limits what is seen, so that fused kernels can do without a mask."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        if any(part is not None for part in (self.given_mask, self.key_valid, self.key_document)):
            return True
        if not isinstance(self.start, int) or self.start + queries != keys:
            return True
        outside_window = self.window is not None and self.window < keys
        return outside_window or (self.causal and queries not in (1, keys))

    def block(self, rows: slice, columns: slice) -> "Positions":
        """The positions of some queries and some keys, as if they were all: what a blockwise backend works on."""

        def cut(part: torch.Tensor | None, along: slice) -> torch.Tensor | None:
            return None if part is None else part[..., along]

        return replace(
            self,
            query=self.query[:, rows],
            key=self.key[:, columns],
            in_document=self.in_document[:, rows],
            start=self.start + rows.start - columns.start,
            key_valid=cut(self.key_valid, columns),
            query_valid=cut(self.query_valid, rows),
            query_document=cut(self.query_document, rows),
            key_document=cut(self.key_document, columns),
            given_mask=None if self.given_mask is None else self.given_mask[..., rows, columns],
        )

    @cached_property
    def visible(self) -> torch.Tensor:
        """Who sees whom, `(batch|1, 1, query, key)`. Every query sees itself, so that no row of a softmax is empty."""
        if self.given_mask is not None:
            return self.given_mask
        offset = self.index_distance
        seen = offset <= 0 if self.causal else torch.ones_like(offset, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (offset.abs() < self.window)
        if self.key_valid is not None:
            seen = seen & self.key_valid[:, None, :]
        if self.query_document is not None and self.key_document is not None:
            seen = seen & (self.query_document[:, :, None] == self.key_document[:, None, :])
        return (seen | (offset == 0))[:, None]


def as_visible(attention_mask: torch.Tensor) -> torch.Tensor:
    """Turn a mask of four dimensions (boolean, or additive with large negative numbers) into a boolean one."""
    if attention_mask.dtype == torch.bool:
        return attention_mask
    return attention_mask > torch.finfo(attention_mask.dtype).min / 2


def key_mask(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Check a padding mask `(batch, length)` and return it as booleans, or None when it hides nothing."""
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] != length:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[-1]} tokens, expected {length}: the cached tokens and the new ones"
        )
    valid = attention_mask.bool()
    if not torch.compiler.is_compiling() and bool(valid.all()):
        return None
    return valid


def count_in_document(
    valid: torch.Tensor | None, reset: torch.Tensor | None, before: torch.Tensor | int, length: int, device: torch.device
) -> torch.Tensor:
    """Number of tokens before each token in its own document, `(batch|1, length)`.

    Args:
        valid: `(batch, length)` False for padding; None when all count.
        reset: `(batch, length)` True on the first token of a document; None for one document.
        before: tokens of the first document that came before, a number or `(batch,)`.
        length: number of tokens.
    """
    count = torch.arange(length, device=device)[None] if valid is None else (valid.long().cumsum(-1) - 1).clamp(min=0)
    before = before[:, None] if isinstance(before, torch.Tensor) and before.dim() else before
    if reset is None:
        return count + before
    first = torch.where(reset, count, 0).cummax(-1).values
    return torch.where(reset.cumsum(-1) > 0, count - first, count + before)


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
        position_ids: `(batch|1, sequence)`, or `(batch|1, key)` to number the cached tokens too; by default tokens are counted.
            With a cache and only the new tokens numbered, the cached ones are taken to precede them without a gap.
        reset_mask: `(batch, sequence)` true on the first token of each document: nothing before it is seen.
        cached: tokens seen so far, number of keys in this pass and offset of the first of them, for a KV cache in use.
        memory_length: `(batch,)` valid tokens of the segment memory, whose slots come first among the keys.
        memory_slots: number of memory slots.

    Raises:
        ValueError: a mask or position_ids of a length that fits neither the tokens nor the keys.
    """
    sequence, device = shape[1], like.device
    past, keys, offset = cached if cached is not None else (memory_slots, memory_slots + sequence, 0)
    start = past - offset
    query = torch.arange(sequence, device=device)[None] + past
    key = torch.arange(keys, device=device)[None] + offset
    given_mask = valid = key_valid = None
    if attention_mask is not None and attention_mask.dim() == 4:
        given_mask = as_visible(attention_mask)
    elif cached is None:
        valid = key_valid = key_mask(attention_mask, sequence)
    else:
        valid = key_mask(attention_mask, past + sequence)
        key_valid = None if valid is None else valid[:, offset : offset + keys]
    in_document, documents = _documents(shape, device, valid, reset_mask, cached, memory_length)
    key_document = documents
    if memory_length is not None:
        slot_valid = torch.arange(memory_slots, device=device) >= memory_slots - memory_length[:, None]
        key_valid = torch.cat([slot_valid, torch.ones_like(in_document) > 0 if valid is None else valid], 1)
        if documents is not None:
            key_document = torch.cat([documents.new_zeros(shape[0], memory_slots), documents], 1)
    if position_ids is not None:
        query, key = _given_positions(position_ids.to(device), sequence, keys)
    return Positions(
        query=query,
        key=key,
        fresh_key=query if cached is not None else key,
        in_document=in_document if position_ids is None else query,
        start=start,
        contiguous=position_ids is None,
        causal=causal,
        window=window,
        key_valid=key_valid,
        query_valid=None if valid is None else valid[:, -sequence:],
        query_document=documents,
        key_document=key_document,
        given_mask=given_mask,
        dtype=torch.promote_types(like.dtype, torch.float32),
    )


def _documents(
    shape: tuple[int, int],
    device: torch.device,
    valid: torch.Tensor | None,
    reset_mask: torch.Tensor | None,
    cached: tuple[int | torch.Tensor, int, int] | None,
    memory_length: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens before each query in its document, `(batch|1, sequence)`, and the number of its document or None."""
    if reset_mask is not None and (cached is not None or tuple(reset_mask.shape) != shape):
        reason = "a KV cache continues one document" if cached is not None else f"expected the shape {shape}"
        raise ValueError(f"reset_mask of shape {tuple(reset_mask.shape)} is refused: {reason}")
    reset = None if reset_mask is None else reset_mask.bool()
    if cached is not None and valid is not None:
        in_document = count_in_document(valid, None, 0, valid.shape[1], device)[:, -shape[1] :]
    else:
        before = cached[0] if cached is not None else 0 if memory_length is None else memory_length
        in_document = count_in_document(valid, reset, before, shape[1], device)
    if memory_length is not None:
        in_document = in_document.expand(shape[0], -1)
    return in_document, None if reset is None else reset.long().cumsum(-1)


def _given_positions(position_ids: torch.Tensor, sequence: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key positions, `(batch|1, sequence)` and `(batch|1, keys)`, from the numbers that the caller gave."""
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    if position_ids.shape[-1] not in (sequence, keys):
        raise ValueError(f"position_ids number {position_ids.shape[-1]} tokens, expected {sequence} (new) or {keys} (all keys)")
    if position_ids.shape[-1] == keys:
        return position_ids[:, keys - sequence :], position_ids
    earlier = torch.arange(sequence - keys, 0, device=position_ids.device) + position_ids[:, :1]
    return position_ids, torch.cat([earlier, position_ids], 1)
