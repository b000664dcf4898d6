"""What one block of attention is made of, for the forward and the backward pass alike.

The queries of a block run backwards (`diagonals.py`), so that its scores are a view of numbers per distance.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .diagonals import products
from .diagonals import spread_out
from .diagonals import with_key_products
from .positions import Positions

BLOCK = 128
"""Queries a block: large enough for fast products, small enough for the cache of a processor."""


class Parts(NamedTuple):
    """What the blocks are computed from, heads first: `(heads, batch, length, head_dim)`, the queries backwards.

    The bias is `(heads, distances)`; vectors are `(heads|1, entries, head_dim)`, the first of distance number `Plan.near`.
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

    @property
    def fuses(self) -> bool:
        """Whether the fused kernel can do the forward pass: it takes a mask, but gives no probabilities."""
        return self.value_vectors is None and self.query.device.type == "cpu"


class Plan(NamedTuple):
    """How the blocks are computed: everything that has no gradient."""

    positions: Positions
    scale: float
    hidden: torch.Tensor
    """`(1, distances)`: minus infinity at distances that no query sees, 0 elsewhere."""
    near: int
    dropout: float
    seed: int
    dense: Callable[..., torch.Tensor] | None
    per_distance: bool

    def first(self, block: "Block") -> int:
        """The entry that a block's first distance would have in the tables of vectors; it may lie outside of them."""
        return block.distances.start - self.near


class Block(NamedTuple):
    """One block: its rows among the queries that run backwards, its columns among the keys, its distances in the tables."""

    rows: slice
    columns: slice
    distances: slice
    positions: Positions

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def cut_blocks(positions: Positions) -> Iterator[Block]:
    """Cut the queries into blocks, each with just the keys that it can see.

    One at a time: the masks that a block's positions remember, of all blocks together, would be those of all pairs.
    """
    queries, keys = positions.query.shape[1], positions.key.shape[1]
    start, low = int(positions.start), positions.bounds[0]
    for first in range(0, queries, BLOCK):
        last = min(first + BLOCK, queries)
        left, right = 0, keys
        if positions.ordered:
            right = min(keys, start + last)
            left = 0 if positions.window is None else max(0, start + first + 1 - positions.window)
        nearest = left - (start + last - 1) - low  # of the last query and the first key
        distances = slice(nearest, nearest + last - first + right - left - 1)
        inside = positions.block(slice(first, last), slice(left, right))
        yield Block(slice(queries - last, queries - first), slice(left, right), distances, inside)


def dense_part(parts: Parts, learned: Sequence[torch.Tensor], plan: Plan, block: Block) -> torch.Tensor | None:
    """The scheme's terms `(heads, batch|1, rows, columns)`, from queries and keys cut to the block; or a column a distance."""
    if plan.dense is None:
        return None
    query, key = parts.query.flip(-2).transpose(0, 1), parts.key.transpose(0, 1)
    return plan.dense(block.positions, query, key, *learned).flip(-2).transpose(0, 1)


def block_scores(parts: Parts, dense: torch.Tensor | None, plan: Plan, block: Block) -> torch.Tensor:
    """All that is added to the products of a block's queries and keys, minus infinity where nothing is seen.

    Args:
        parts: queries and keys cut to the block, tables whole.
        dense: what `dense_part` made.
        plan: how.
        block: which.

    Returns:
        `(heads|1, batch|1, rows, columns)`, a view where numbers per distance are all there is.
    """
    rows, columns = block.shape
    numbers = plan.hidden if parts.bias is None else parts.bias
    numbers = numbers[:, None, None, block.distances]
    first = plan.first(block)
    if parts.query_vectors is not None:
        numbers = products(distance_query(parts, plan), parts.query_vectors, first, numbers.shape[-1]).add_(numbers)
    if dense is not None and plan.per_distance:
        numbers = _sum(dense, numbers)
    scores = spread_out(numbers, rows, columns)
    if parts.key_vectors is not None:
        scores = with_key_products(scores, parts.key * plan.scale, parts.key_vectors, first)
    if dense is not None and not plan.per_distance:
        scores = scores + dense
    if block.positions.hides_more:
        scores = scores.masked_fill(~block.positions.visible.flip(-2).transpose(0, 1), float("-inf"))
    return scores


def _sum(dense: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Two sets of numbers per distance; the distances after those of `dense` only hidden pairs have."""
    given, outer = dense.shape[-1], torch.broadcast_shapes(dense.shape[:-1], numbers.shape[:-1])
    total = numbers.new_empty(*outer, numbers.shape[-1])
    torch.add(dense, numbers[..., :given], out=total[..., :given])
    total[..., given:] = numbers[..., given:]
    return total


def _scaled_query(parts: Parts, plan: Plan, offset: torch.Tensor | None) -> torch.Tensor:
    return (parts.query if offset is None else parts.query + offset[:, None, None]) * plan.scale


def content_query(parts: Parts, plan: Plan) -> torch.Tensor:
    """The scaled queries that meet the keys."""
    return _scaled_query(parts, plan, parts.key_offset)


def distance_query(parts: Parts, plan: Plan) -> torch.Tensor:
    """The scaled queries that meet the distances."""
    return _scaled_query(parts, plan, parts.distance_offset)


def cut(parts: Parts, block: Block) -> Parts:
    """The queries, keys and values of one block."""
    rows, columns = block.rows, block.columns
    return parts._replace(query=parts.query[:, :, rows], key=parts.key[:, :, columns], value=parts.value[:, :, columns])


def kept(plan: Plan, block: Block, weights: torch.Tensor) -> torch.Tensor | None:
    """What dropout multiplies a block's probabilities by, the same in forward and backward; None without dropout."""
    if not plan.dropout:
        return None
    generator = torch.Generator(weights.device).manual_seed(plan.seed + block.rows.start)
    return torch.empty_like(weights).bernoulli_(1 - plan.dropout, generator=generator).div_(1 - plan.dropout)


def whole_scores(parts: Parts, plan: Plan, scores: torch.Tensor) -> torch.Tensor:
    """Products of a block's queries and keys with all that is added, at least in float32."""
    wide = torch.promote_types(parts.query.dtype, torch.float32)
    return (content_query(parts, plan) @ parts.key.transpose(-1, -2)).to(wide).add_(scores)
