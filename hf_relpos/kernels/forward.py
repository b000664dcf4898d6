"""The forward pass: attention of one tile of queries to all keys that they see, with a softmax that is corrected tile by tile."""

import triton
import triton.language as tl

from .tiles import by_distance
from .tiles import dropout_factor
from .tiles import first_distance
from .tiles import keys_seen
from .tiles import load_rows
from .tiles import scores_of
from .tiles import store_rows
from .tiles import sum_vectors


@triton.jit
def attend(
    given, output, lse,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ASKING: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Write the output of a tile of queries, `(batch, heads, queries, VALUE)`, and its log-sum-exp, `(batch, heads, queries)`.

    Run by `(tiles of queries, batch * heads)` programs.
    """
    row, matrix = tl.program_id(0) * TILE, tl.program_id(1)
    head = matrix % given.heads
    content = load_rows(given.content, matrix, row, given.queries, TILE, WIDTH)
    asking = content
    if given.query_vectors is not None:
        asking = load_rows(given.asking, matrix, row, given.queries, TILE, ASKING)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, VALUE), tl.float32)
    begin, end = keys_seen(given, row, TILE)
    for column in range(begin, end, TILE):
        key = load_rows(given.key, matrix, column, given.keys, TILE, WIDTH)
        value = load_rows(given.value, matrix, column, given.keys, TILE, VALUE)
        scores = scores_of(given, matrix, row, column, content, asking, key, PRECISION, TILE, WIDTH, ASKING)
        highest = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)  # so far these queries see nothing
        weights, shrunk = tl.exp(scores - safe[:, None]), tl.exp(top - safe)
        total = total * shrunk + tl.sum(weights, 1)
        if given.dropout is not None:
            weights *= dropout_factor(given, matrix, row, column, TILE)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        if given.value_vectors is not None:
            lower, upper = by_distance(weights, TILE)
            distance = first_distance(given, row, column, TILE)
            sums += sum_vectors(lower, upper, given.value_vectors, given, head, distance, PRECISION, TILE, VALUE)
        top = highest
    found = total > 0  # a caller's mask may show a query nothing: it finds 0
    total = tl.where(found, total, 1.0)
    store_rows(output, sums / total[:, None], matrix, row, given.queries, TILE, VALUE)
    place = row + tl.arange(0, TILE)
    log = tl.where(found, top + tl.log(total), 0.0)
    tl.store(lse + matrix.to(tl.int64) * given.queries + place, log, mask=place < given.queries)
