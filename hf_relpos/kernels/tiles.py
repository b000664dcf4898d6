"""Tiles of queries and keys in Triton: how their scores are made, shared by the forward pass and all backward passes.

A tile has `TILE` queries and `TILE` keys. Its pairs stand at `2 * TILE - 1` distances, in two halves: `lower`, `TILE` distances from the
smallest, and `upper`, those after them. Query r and key c meet at distance number `c - r + TILE - 1`, so a product of queries with the
vectors of these distances becomes scores when row r turns by r + 1 places. The turned rows of both halves fill one matrix exactly.
"""

from typing import Any
from typing import NamedTuple

import triton
import triton.language as tl


class Inputs(NamedTuple):
    """What all kernels read. Tensors are contiguous, and a part that is None costs nothing.

    Attributes:
        content: `(batch, heads, queries, WIDTH)` scaled queries that meet the keys.
        asking: `(batch, heads, queries, ASKING)` scaled queries that meet the distances, if there are `query_vectors`.
        key: `(batch, heads, keys, WIDTH)`.
        value: `(batch, heads, keys, VALUE)`.
        query_vectors: `(heads|1, entries, ASKING)` that meet `asking`.
        key_vectors: `(heads|1, entries, WIDTH)` that meet the keys, scaled.
        value_vectors: `(heads|1, entries, VALUE)` added to the values.
        bias: `(heads, bias_entries)` numbers in float32.
        query_label, key_label: `(batch, queries)` and `(batch, keys)`; a query sees itself and the keys of its label.
        mask: `(batch, queries, keys)`, 0 where a caller's mask hides the key.
        queries, keys, heads: how many there are.
        batch: rows of the batch.
        start: index of the first query among the keys.
        low, high: the smallest and largest distance that a query sees.
        first, entries: distance of the first vector, and how many there are; those before and after share the first and last.
        per_head: 1 if each head has its own vectors, 0 if all share them.
        bias_first, bias_entries: the same of the bias.
        dropout: rate at which probabilities are dropped, None for no dropout.
        seed: of the dropout.
    """

    content: Any
    asking: Any
    key: Any
    value: Any
    query_vectors: Any
    key_vectors: Any
    value_vectors: Any
    bias: Any
    query_label: Any
    key_label: Any
    mask: Any
    batch: int
    heads: int
    queries: int
    keys: int
    start: int
    low: int
    high: int
    first: int
    entries: int
    per_head: int
    bias_first: int
    bias_entries: int
    dropout: float | None
    seed: int


@triton.jit
def load_rows(pointer, matrix, first, length, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows of a matrix among others of its shape `(length, WIDTH)`, zeros after its end."""
    row = first + tl.arange(0, TILE)[:, None]
    place = matrix.to(tl.int64) * length * WIDTH + row * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointer + place, mask=row < length, other=0.0)


@triton.jit
def store_rows(pointer, rows, matrix, first, length, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Write rows of a matrix among others of its shape `(length, WIDTH)`."""
    row = first + tl.arange(0, TILE)[:, None]
    place = matrix.to(tl.int64) * length * WIDTH + row * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(pointer + place, rows.to(pointer.dtype.element_ty), mask=row < length)


@triton.jit
def load_vectors(pointer, given, head, distance, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the vectors of `TILE` distances from `distance`, `(TILE, WIDTH)`."""
    entry = distance - given.first + tl.arange(0, TILE)[:, None]
    entry = tl.minimum(tl.maximum(entry, 0), given.entries - 1) + head * given.per_head * given.entries
    return tl.load(pointer + entry * WIDTH + tl.arange(0, WIDTH)[None, :])


@triton.jit
def first_distance(given, row, column, TILE: tl.constexpr):
    """Return the distance of a tile's last query and first key, the smallest of the tile."""
    return column - row - given.start - (TILE - 1)


@triton.jit
def by_distance(matrix, TILE: tl.constexpr):
    """Return numbers of queries and keys `[r, c]` as two halves of numbers of queries and distances, 0 where a query has none."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    turned = tl.gather(matrix, (column + row + 1) % TILE, 1)
    lower = column + row + 1 >= TILE
    return tl.where(lower, turned, 0.0), tl.where(lower, 0.0, turned)


@triton.jit
def by_key(lower, upper, TILE: tl.constexpr):
    """Undo `by_distance`: return numbers of queries and keys, from numbers of queries and distances in two halves."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    both = tl.where(column + row + 1 >= TILE, lower, upper)
    return tl.gather(both, (column - row - 1 + TILE) % TILE, 1)


@triton.jit
def keys_by_distance(matrix, TILE: tl.constexpr):
    """Return numbers of queries and keys `[r, c]` as two halves of numbers of keys and distances, 0 where a key has none."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    turned = tl.gather(tl.trans(matrix), (row - column - 1 + TILE) % TILE, 1)
    return tl.where(column >= row, turned, 0.0), tl.where(column >= row, 0.0, turned)


@triton.jit
def keys_by_query(lower, upper, TILE: tl.constexpr):
    """Undo `keys_by_distance`: return numbers of queries and keys, from numbers of keys and distances in two halves."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    both = tl.where(column >= row, lower, upper)
    return tl.trans(tl.gather(both, (row - column - 1 + TILE) % TILE, 1))


@triton.jit
def meet_vectors(
    states,
    pointer,
    given,
    head,
    distance,
    of_keys: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the products of a tile's queries, or keys, with the vectors of their distances, by query and key."""
    lower = load_vectors(pointer, given, head, distance, TILE, WIDTH)
    upper = load_vectors(pointer, given, head, distance + TILE, TILE, WIDTH)
    lower = tl.dot(states, tl.trans(lower), input_precision=PRECISION)
    upper = tl.dot(states, tl.trans(upper), input_precision=PRECISION)
    if of_keys:
        return keys_by_query(lower, upper, TILE)
    return by_key(lower, upper, TILE)


@triton.jit
def sum_vectors(
    lower, upper, pointer, given, head, distance, PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """Return sums of the vectors of distances, weighted by two halves of numbers per distance."""
    near = load_vectors(pointer, given, head, distance, TILE, WIDTH)
    far = load_vectors(pointer, given, head, distance + TILE, TILE, WIDTH)
    sums = tl.dot(lower.to(near.dtype), near, input_precision=PRECISION)
    return sums + tl.dot(upper.to(far.dtype), far, input_precision=PRECISION)


@triton.jit
def is_seen(given, batch, row, column, TILE: tl.constexpr):
    """Return which queries of a tile see which keys."""
    query, key = row + tl.arange(0, TILE)[:, None], column + tl.arange(0, TILE)[None, :]
    distance = key - query - given.start
    seen = (distance >= given.low) & (distance <= given.high) & (key < given.keys)
    if given.query_label is not None:
        own = tl.load(given.query_label + batch * given.queries + query, mask=query < given.queries, other=0)
        others = tl.load(given.key_label + batch * given.keys + key, mask=key < given.keys, other=0)
        seen = seen & ((own == others) | (distance == 0))
    if given.mask is not None:
        place = (batch.to(tl.int64) * given.queries + query) * given.keys + key
        shown = tl.load(given.mask + place, mask=(query < given.queries) & (key < given.keys), other=0)
        seen = seen & (shown != 0)
    return seen


@triton.jit
def scores_of(
    given, matrix, row, column, content, asking, key,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ASKING: tl.constexpr,
):  # fmt: skip
    """Return a tile of scores, minus infinity where a key is hidden.

    Args:
        given: what all kernels read.
        matrix: number of the head among those of the whole batch.
        row, column: the first query and the first key of the tile.
        content, asking, key: rows of the tile.
    """
    head, distance = matrix % given.heads, first_distance(given, row, column, TILE)
    scores = tl.dot(content, tl.trans(key), input_precision=PRECISION)
    if given.query_vectors is not None:
        scores += meet_vectors(asking, given.query_vectors, given, head, distance, False, PRECISION, TILE, ASKING)
    if given.key_vectors is not None:
        scores += meet_vectors(key, given.key_vectors, given, head, distance, True, PRECISION, TILE, WIDTH)
    if given.bias is not None:
        entry = distance + TILE - 1 + tl.arange(0, TILE)[None, :] - tl.arange(0, TILE)[:, None] - given.bias_first
        entry = tl.minimum(tl.maximum(entry, 0), given.bias_entries - 1)
        scores += tl.load(given.bias + head * given.bias_entries + entry)
    return tl.where(is_seen(given, matrix // given.heads, row, column, TILE), scores, float("-inf"))


@triton.jit
def dropout_factor(given, matrix, row, column, TILE: tl.constexpr):
    """Return what dropout multiplies a tile of probabilities by, the same in every kernel."""
    query, key = row + tl.arange(0, TILE)[:, None], column + tl.arange(0, TILE)[None, :]
    kept = tl.rand(given.seed + matrix, query * given.keys + key) >= given.dropout
    return tl.where(kept, 1.0 / (1.0 - given.dropout), 0.0)


@triton.jit
def keys_seen(given, row, TILE: tl.constexpr):
    """Return the range of keys, from a whole tile on, that order and window leave to the queries of a tile."""
    first, end = row + given.start + given.low, row + given.start + TILE + given.high
    return tl.maximum(first, 0) // TILE * TILE, tl.minimum(end, given.keys)


@triton.jit
def queries_seeing(given, column, TILE: tl.constexpr):
    """Return the range of queries, from a whole tile on, that order and window let see the keys of a tile."""
    first, end = column - given.start - given.high, column - given.start + TILE - given.low
    return tl.maximum(first, 0) // TILE * TILE, tl.minimum(end, given.queries)
