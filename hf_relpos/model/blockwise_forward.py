"""Compute one block of attention, for the forward and the backward pass alike.

The queries of a block run backwards (`toeplitz.py`), so that its scores are a view of numbers per distance.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .blockwise_buffers import BufferPool
from .blockwise_kernel import kernel_works
from .blockwise_key_terms import add_key_products
from .blockwise_masking import keys_seen_by
from .blockwise_sums import add_growth
from .blockwise_sums import with_channels
from .blockwise_sums import with_groups
from .blockwise_sums import with_room
from .blockwise_sums import write_growth
from .positions import Positions
from .scheme_terms import LowRankBias
from .toeplitz import add_matmul
from .toeplitz import products
from .toeplitz import to_matrix

BLOCK = 128
"""Queries a block: large enough for fast products, small enough for the cache of a processor."""

WIDE = 1024
"""Queries a block where the fused kernel reads a view and all keys are seen: it cuts them into better ones itself."""

AREA = 2**18
"""Scores that a processor's cache holds beside what is made of them (1 MiB in float32): blocks take heads together up to it."""

MIXED = 2**16
"""Pairs of queries and keys a block where terms mix heads: of each pair, all that such terms make of all heads stays in the cache."""


class BlockTensors(NamedTuple):
    """The tensors that blocks are computed from, heads first: `(heads, batch, length, head_dim)`, the queries backwards.

    The bias is `(heads, distances)`; vectors are `(heads|1, entries, head_dim)`, the first of distance number `BlockSettings.near`.
    With running `sums (heads, batch, key)`, the keys of a block get channels for them, and values room (`blockwise_sums.py`).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    query_vectors: torch.Tensor | None
    key_vectors: torch.Tensor | None
    value_vectors: torch.Tensor | None
    key_offset: torch.Tensor | None
    distance_offset: torch.Tensor | None
    sums: torch.Tensor | None

    def cut(self, block: "Block") -> "BlockTensors":
        """Return the tensors of one block: its queries, keys and values, and the tables of its heads, whole."""
        query, key, value, *tables, sums = (_of_heads(part, block.heads) for part in self)
        pairs = ((query, block.rows), (key, block.columns), (value, block.columns), (sums, block.columns))
        along: Any = [None if part is None else part[:, :, cut] for part, cut in pairs]
        return BlockTensors(*along[:3], *tables, along[3])  # pyright: ignore[reportCallIssue]

    def with_channels(self) -> "BlockTensors":
        """Return the tensors with channels for running sums in the keys, where there are any."""
        return self if self.sums is None else self._replace(key=with_channels(self.key, BLOCK))

    def grown(self, block: "Block") -> "BlockTensors":
        """Return the tensors of one block with its sums in the channels of its keys, until the next block writes there."""
        part = self.cut(block)
        if part.sums is not None:
            write_growth(part.key, part.sums, int(block.positions.start), block.shape[0], BLOCK)
        return part


def _of_heads(tensor: torch.Tensor | None, heads: slice) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[heads]


class BlockSettings(NamedTuple):
    """The settings by which blocks are computed: everything that has no gradient."""

    positions: Positions
    scale: float
    hidden: torch.Tensor
    """`(1, distances)`: minus infinity at distances that no query sees, 0 elsewhere."""
    near: int
    dropout: float
    seed: int
    dense: Callable[..., torch.Tensor] | None
    mixes_heads: bool
    factors: Callable[..., LowRankBias] | None
    shared: int
    """How many of the tensors that these two read serve all heads; they come first."""

    def learned(self, tensors: Sequence[Any], block: "Block") -> list[Any]:
        """Return, of the tensors that are read or of their gradients, those of the heads of a block."""
        return [*tensors[: self.shared], *(None if each is None else each[block.heads] for each in tensors[self.shared :])]

    def first(self, block: "Block") -> int:
        """Return the table index of the block's first distance; it may be out of range."""
        return block.distances.start - self.near


class Block(NamedTuple):
    """One block: some heads, its rows among the queries that run backwards, its columns among the keys, its distances in the tables."""

    heads: slice
    rows: slice
    columns: slice
    distances: slice
    positions: Positions

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def room_for_sums(value: torch.Tensor) -> torch.Tensor:
    """Return values as wide as the keys of a block with the channels of their sums."""
    return with_room(value, BLOCK)


def fusible(parts: BlockTensors, plan: BlockSettings) -> bool:
    """Return whether the fused kernel can do the forward pass: it takes a mask, but gives no probabilities and drops none."""
    able = parts.value_vectors is None and not plan.dropout and parts.query.device.type == "cpu"
    return able and kernel_works()


def reads_view(parts: BlockTensors, plan: BlockSettings, fuses: bool) -> bool:
    """Return whether all that is added to the products is a view of numbers per distance, which the fused kernel reads."""
    made = (parts.query_vectors, parts.key_vectors, plan.dense, plan.factors)
    return fuses and all(part is None for part in made)


def cut_blocks(parts: BlockTensors, plan: BlockSettings, fuses: bool) -> Iterator[Block]:
    """Cut the queries into blocks of all heads, each with just the keys that it can see.

    One at a time: the masks that a block's positions remember, of all blocks together, would be those of all pairs.

    Args:
        parts: whole.
        plan: how.
        fuses: whether the fused kernel is what reads the scores.
    """
    positions = plan.positions
    queries, start, low = positions.query.shape[1], int(positions.start), positions.bounds[0]
    limited = positions.ordered or positions.hides_more or positions.window is not None
    size = WIDE if reads_view(parts, plan, fuses) and not limited else BLOCK
    if plan.mixes_heads and parts.query.device.type == "cpu":
        size = max(1, min(size, torch.get_num_threads() * MIXED // max(1, parts.query.shape[1] * parts.key.shape[2])))
    for last in range(queries, 0, -size):  # the largest first, after which no memory has to grow
        first = max(0, last - size)
        columns, inside = keys_seen_by(positions, slice(first, last))
        nearest = columns.start - (start + last - 1) - low  # of the last query and the first key
        distances = slice(nearest, nearest + last - first + columns.stop - columns.start - 1)
        yield Block(slice(None), slice(queries - last, queries - first), columns, distances, inside)


def cut_heads(block: Block, parts: BlockTensors, plan: BlockSettings, fuses: bool) -> Iterator[Block]:
    """Cut a block into blocks of so many heads as the cache holds; not at all where the kernel reads a view, where terms mix heads, or
    on other devices."""
    heads, batch = parts.query.shape[:2]
    rows, columns = block.shape
    together = max(1, torch.get_num_threads() * AREA // max(1, batch * rows * columns))
    whole = reads_view(parts, plan, fuses) and not block.positions.hides_more
    if whole or plan.mixes_heads or parts.query.device.type != "cpu":
        together = heads
    for first in range(0, heads, together):
        yield block._replace(heads=slice(first, min(first + together, heads)))


def dense_part(parts: BlockTensors, learned: Sequence[torch.Tensor], plan: BlockSettings, block: Block) -> torch.Tensor | None:
    """Return the scheme's terms of pairs, `(heads, batch|1, rows, columns)`, for one block."""
    if plan.dense is None:
        return None
    query, key = parts.query.flip(-2).transpose(0, 1), parts.key.transpose(0, 1)
    return plan.dense(block.positions, query, key, *learned).flip(-2).transpose(0, 1)


def low_rank_bias_of(learned: Sequence[torch.Tensor], plan: BlockSettings, block: Block) -> LowRankBias | None:
    """Return the low-rank bias of one block, all heads: the queries backwards, heads first, hidden distances 0.

    `query (1, batch|1, rows, size)`, `distance (heads, 1, size, distances)`, `extra (heads, batch|1, rows, some)`.
    """
    if plan.factors is None:
        return None
    query, distance, extra, where = plan.factors(block.positions, *learned)
    missing = sum(block.shape) - 1 - distance.shape[-1]
    return LowRankBias(query.flip(1)[None], pad(distance, (0, missing))[:, None], extra.flip(-2).transpose(0, 1), where)


def _add_factors(numbers: torch.Tensor, factors: LowRankBias, heads: slice) -> None:
    """Add to numbers `(heads, batch|1, rows, distances)`, in place, what factors say."""
    outer = numbers.shape[:-1]
    query, distance, extra = factors.query, factors.distance[heads], factors.extra[heads]
    add_matmul(numbers, query.expand(*outer, -1), distance.expand(*outer[:2], -1, -1))
    numbers.index_add_(-1, factors.where, extra.expand(*outer, -1))


def _numbers(
    parts: BlockTensors, factors: LowRankBias | None, plan: BlockSettings, block: Block, buffers: BufferPool
) -> torch.Tensor:
    """Return a block's numbers per distance: one row for all queries, `(heads|1, 1, 1, distances)`, unless each query has its own."""
    shared = plan.hidden if parts.bias is None else parts.bias
    shared = shared[:, None, None, block.distances]
    heads, batch, rows = parts.query.shape[:3]
    if parts.query_vectors is not None or parts.key_vectors is not None:
        numbers = buffers.empty("numbers", heads, batch, rows, shared.shape[-1])
    elif factors is not None:  # rows of the batch that look alike have theirs in common
        numbers = buffers.empty("numbers", heads, factors.query.shape[1], rows, shared.shape[-1], dtype=shared.dtype)
    else:
        return shared
    if parts.query_vectors is not None:
        products(distance_query(parts, plan), parts.query_vectors, plan.first(block), shared, numbers)
    else:
        numbers.copy_(shared)
    if factors is not None:
        _add_factors(numbers, factors, block.heads)
    return numbers


def block_scores(
    parts: BlockTensors,
    dense: torch.Tensor | None,
    factors: LowRankBias | None,
    plan: BlockSettings,
    block: Block,
    buffers: BufferPool,
) -> torch.Tensor:
    """Return all that is added to the products of a block's queries and keys, minus infinity where nothing is seen.

    Args:
        parts: cut to the block.
        dense: what `dense_part` made.
        factors: what `low_rank_bias_of` made.
        plan: how.
        block: which.
        buffers: for what is made.

    Returns:
        `(heads|1, batch|1, rows, columns)`, a view where numbers per distance are all there is.
    """
    scores = to_matrix(_numbers(parts, factors, plan, block, buffers), *block.shape)
    if parts.key_vectors is not None:
        add_key_products(scores, parts.key * plan.scale, parts.key_vectors, plan.first(block), buffers)
    pairs = {} if dense is None else {"dense": dense}
    if block.positions.hides_more:
        seen = block.positions.visible.flip(-2).transpose(0, 1)
        pairs["hidden"] = torch.zeros_like(seen, dtype=scores.dtype).masked_fill_(~seen, float("-inf"))
    for name, added in pairs.items():
        shape = torch.broadcast_shapes(scores.shape, added.shape)
        scores = torch.add(scores, added, out=buffers.empty(name, *shape, dtype=scores.dtype))
    return scores


def _scaled_query(parts: BlockTensors, plan: BlockSettings, offset: torch.Tensor | None) -> torch.Tensor:
    return (parts.query if offset is None else parts.query + offset[:, None, None]) * plan.scale


def content_query(parts: BlockTensors, plan: BlockSettings) -> torch.Tensor:
    """Return the scaled queries that meet the keys."""
    query, more = _scaled_query(parts, plan, parts.key_offset), parts.key.shape[-1] - parts.query.shape[-1]
    return with_groups(query, more) if more else query


def distance_query(parts: BlockTensors, plan: BlockSettings) -> torch.Tensor:
    """Return the scaled queries that meet the distances."""
    return _scaled_query(parts, plan, parts.distance_offset)


def dropout_mask(plan: BlockSettings, block: Block, weights: torch.Tensor) -> torch.Tensor | None:
    """Return the dropout mask of a block, the same in forward and backward; None without dropout."""
    if not plan.dropout:
        return None
    factor = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    for head, part in enumerate(factor, block.heads.start):  # how many heads are taken together must not matter
        generator = torch.Generator(weights.device).manual_seed(plan.seed + (head << 24) + block.rows.start)
        part.bernoulli_(1 - plan.dropout, generator=generator)
    return factor.div_(1 - plan.dropout)


def whole_scores(
    parts: BlockTensors, plan: BlockSettings, scores: torch.Tensor, buffers: BufferPool, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """Return products of a block's queries and keys with all that is added, at least in float32; less `lse (heads, batch, rows)`."""
    wide = torch.promote_types(parts.query.dtype, torch.float32)
    total = buffers.matrix("weights", *parts.query.shape[:-1], parts.key.shape[-2], dtype=wide)
    total = total.copy_(scores) if lse is None else torch.sub(scores, lse[..., None], out=total)
    query, key, size = content_query(parts, plan), parts.key, parts.query.shape[-1]
    if parts.sums is not None and wide != key.dtype:
        add_growth(total, key[..., size:])
        query, key = query[..., :size], key[..., :size]
    exact = wide if query.device.type == "cpu" else query.dtype  # as in the fused kernel, whose sums they meet; as fast there
    return add_matmul(total, query.to(exact), key.to(exact).transpose(-1, -2))
