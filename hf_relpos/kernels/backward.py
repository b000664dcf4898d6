"""The backward pass in three kernels: gradients of queries, of keys and values, and of the tables of distances.

Each computes the scores of its tiles once more. No two programs write to the same place, so sums have one order and results repeat.
"""

from typing import Any
from typing import NamedTuple

import triton
import triton.language as tl

from .tiles import by_distance
from .tiles import dropout_factor
from .tiles import first_distance
from .tiles import keys_by_distance
from .tiles import keys_seen
from .tiles import load_rows
from .tiles import meet_vectors
from .tiles import queries_seeing
from .tiles import scores_of
from .tiles import store_rows
from .tiles import sum_vectors


class Results(NamedTuple):
    """What the backward pass knows of the forward pass.

    Attributes:
        grad: `(batch, heads, queries, VALUE)` gradient of the output.
        lse: `(batch, heads, queries)` log-sum-exp of the scores.
        delta: `(batch, heads, queries)` product of output and gradient.
    """

    grad: Any
    lse: Any
    delta: Any


class TableGradients(NamedTuple):
    """Where `tables` writes: for each diagonal of tiles the sums of its two halves of distances; None for what is not wanted.

    Attributes:
        query_vectors: `(heads, diagonals, 2 * TILE, ASKING)`.
        key_vectors: `(heads, diagonals, 2 * TILE, WIDTH)`.
        value_vectors: `(heads, diagonals, 2 * TILE, VALUE)`.
        bias: `(heads, diagonals, 2 * TILE)`.
    """

    query_vectors: Any
    key_vectors: Any
    value_vectors: Any
    bias: Any


@triton.jit
def load_numbers(pointer, matrix, first, length, other, TILE: tl.constexpr):
    """Return numbers of the queries of a tile, `other` after the last query."""
    place = first + tl.arange(0, TILE)
    return tl.load(pointer + matrix.to(tl.int64) * length + place, mask=place < length, other=other)


@triton.jit
def score_gradients(
    given, results, matrix, row, column, content, asking, key, grad,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ASKING: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Return a tile of probabilities as they met the values, and the gradients of its scores."""
    lse = load_numbers(results.lse, matrix, row, given.queries, float("inf"), TILE)
    delta = load_numbers(results.delta, matrix, row, given.queries, 0.0, TILE)
    value = load_rows(given.value, matrix, column, given.keys, TILE, VALUE)
    scores = scores_of(given, matrix, row, column, content, asking, key, PRECISION, TILE, WIDTH, ASKING)
    weights = tl.exp(scores - lse[:, None])
    met = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    if given.value_vectors is not None:
        head, distance = matrix % given.heads, first_distance(given, row, column, TILE)
        met += meet_vectors(grad, given.value_vectors, given, head, distance, False, PRECISION, TILE, VALUE)
    used = weights
    if given.dropout is not None:
        factor = dropout_factor(given, matrix, row, column, TILE)
        met, used = met * factor, weights * factor
    return used, weights * (met - delta[:, None])


@triton.jit
def of_queries(
    given, results, d_content, d_asking,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ASKING: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of queries. Run by `(tiles of queries, batch * heads)` programs."""
    row, matrix = tl.program_id(0) * TILE, tl.program_id(1)
    head = matrix % given.heads
    content = load_rows(given.content, matrix, row, given.queries, TILE, WIDTH)
    grad = load_rows(results.grad, matrix, row, given.queries, TILE, VALUE)
    asking = content
    if given.query_vectors is not None:
        asking = load_rows(given.asking, matrix, row, given.queries, TILE, ASKING)
    of_content = tl.zeros((TILE, WIDTH), tl.float32)
    of_asking = tl.zeros((TILE, ASKING), tl.float32)
    begin, end = keys_seen(given, row, TILE)
    for column in range(begin, end, TILE):
        key = load_rows(given.key, matrix, column, given.keys, TILE, WIDTH)
        _, of_scores = score_gradients(
            given, results, matrix, row, column, content, asking, key, grad, PRECISION, TILE, WIDTH, ASKING, VALUE
        )
        of_content += tl.dot(of_scores.to(key.dtype), key, input_precision=PRECISION)
        if given.query_vectors is not None:
            lower, upper = by_distance(of_scores, TILE)
            distance = first_distance(given, row, column, TILE)
            of_asking += sum_vectors(lower, upper, given.query_vectors, given, head, distance, PRECISION, TILE, ASKING)
    store_rows(d_content, of_content, matrix, row, given.queries, TILE, WIDTH)
    if given.query_vectors is not None:
        store_rows(d_asking, of_asking, matrix, row, given.queries, TILE, ASKING)


@triton.jit
def of_keys(
    given, results, d_key, d_value,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ASKING: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of keys and values. Run by `(tiles of keys, batch * heads)` programs."""
    column, matrix = tl.program_id(0) * TILE, tl.program_id(1)
    head = matrix % given.heads
    key = load_rows(given.key, matrix, column, given.keys, TILE, WIDTH)
    of_key = tl.zeros((TILE, WIDTH), tl.float32)
    of_value = tl.zeros((TILE, VALUE), tl.float32)
    begin, end = queries_seeing(given, column, TILE)
    for row in range(begin, end, TILE):
        content = load_rows(given.content, matrix, row, given.queries, TILE, WIDTH)
        grad = load_rows(results.grad, matrix, row, given.queries, TILE, VALUE)
        asking = content
        if given.query_vectors is not None:
            asking = load_rows(given.asking, matrix, row, given.queries, TILE, ASKING)
        weights, of_scores = score_gradients(
            given, results, matrix, row, column, content, asking, key, grad, PRECISION, TILE, WIDTH, ASKING, VALUE
        )
        of_value += tl.dot(tl.trans(weights).to(grad.dtype), grad, input_precision=PRECISION)
        of_key += tl.dot(tl.trans(of_scores).to(content.dtype), content, input_precision=PRECISION)
        if given.key_vectors is not None:
            lower, upper = keys_by_distance(of_scores, TILE)
            distance = first_distance(given, row, column, TILE)
            of_key += sum_vectors(lower, upper, given.key_vectors, given, head, distance, PRECISION, TILE, WIDTH)
    store_rows(d_key, of_key, matrix, column, given.keys, TILE, WIDTH)
    store_rows(d_value, of_value, matrix, column, given.keys, TILE, VALUE)


@triton.jit
def store_halves(pointer, lower, upper, diagonal, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Write the sums of both halves of a diagonal's distances, `(TILE, WIDTH)` each."""
    store_rows(pointer, lower, 2 * diagonal, 0, TILE, TILE, WIDTH)
    store_rows(pointer, upper, 2 * diagonal + 1, 0, TILE, TILE, WIDTH)


@triton.jit
def of_tables(
    given, results, d_tables, diagonals,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ASKING: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Write what the tiles of one diagonal, which all have the same distances, add to the gradients of the tables.

    Run by `(diagonals, heads)` programs; the first diagonal has the last tile of queries and the first of keys.
    """
    diagonal, head = tl.program_id(0), tl.program_id(1)
    asking_lower = tl.zeros((TILE, ASKING), tl.float32)
    asking_upper = tl.zeros((TILE, ASKING), tl.float32)
    key_lower = tl.zeros((TILE, WIDTH), tl.float32)
    key_upper = tl.zeros((TILE, WIDTH), tl.float32)
    value_lower = tl.zeros((TILE, VALUE), tl.float32)
    value_upper = tl.zeros((TILE, VALUE), tl.float32)
    bias_lower = tl.zeros((TILE,), tl.float32)
    bias_upper = tl.zeros((TILE,), tl.float32)
    ahead = (diagonal - tl.cdiv(given.queries, TILE) + 1) * TILE  # first key less first query
    distance = first_distance(given, 0, ahead, TILE)
    first, last = tl.maximum(0, -ahead), tl.minimum(given.queries, given.keys - ahead)
    if (distance > given.high) | (distance + 2 * TILE - 2 < given.low):
        last = first
    for batch in range(0, given.batch):
        matrix = batch * given.heads + head
        for row in range(first, last, TILE):
            column = row + ahead
            content = load_rows(given.content, matrix, row, given.queries, TILE, WIDTH)
            grad = load_rows(results.grad, matrix, row, given.queries, TILE, VALUE)
            key = load_rows(given.key, matrix, column, given.keys, TILE, WIDTH)
            asking = content
            if given.query_vectors is not None:
                asking = load_rows(given.asking, matrix, row, given.queries, TILE, ASKING)
            weights, of_scores = score_gradients(
                given, results, matrix, row, column, content, asking, key, grad, PRECISION, TILE, WIDTH, ASKING, VALUE
            )
            lower, upper = by_distance(of_scores, TILE)
            if d_tables.query_vectors is not None:
                asking_lower += tl.dot(tl.trans(lower).to(asking.dtype), asking, input_precision=PRECISION)
                asking_upper += tl.dot(tl.trans(upper).to(asking.dtype), asking, input_precision=PRECISION)
            if d_tables.bias is not None:
                bias_lower += tl.sum(lower, 0)
                bias_upper += tl.sum(upper, 0)
            if d_tables.value_vectors is not None:
                lower, upper = by_distance(weights, TILE)
                value_lower += tl.dot(tl.trans(lower).to(grad.dtype), grad, input_precision=PRECISION)
                value_upper += tl.dot(tl.trans(upper).to(grad.dtype), grad, input_precision=PRECISION)
            if d_tables.key_vectors is not None:
                lower, upper = keys_by_distance(of_scores, TILE)
                key_lower += tl.dot(tl.trans(lower).to(key.dtype), key, input_precision=PRECISION)
                key_upper += tl.dot(tl.trans(upper).to(key.dtype), key, input_precision=PRECISION)
    own = head * diagonals + diagonal
    if d_tables.query_vectors is not None:
        store_halves(d_tables.query_vectors, asking_lower, asking_upper, own, TILE, ASKING)
    if d_tables.key_vectors is not None:
        store_halves(d_tables.key_vectors, key_lower, key_upper, own, TILE, WIDTH)
    if d_tables.value_vectors is not None:
        store_halves(d_tables.value_vectors, value_lower, value_upper, own, TILE, VALUE)
    if d_tables.bias is not None:
        place = own * 2 * TILE + tl.arange(0, TILE)
        tl.store(d_tables.bias + place, bias_lower)
        tl.store(d_tables.bias + place + TILE, bias_upper)
