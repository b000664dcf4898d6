"""Terms that a scheme adds to the scores of attention, and one tensor of them where nothing less will do.

Blockwise attention takes the terms as they are (`blockwise_forward.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import NamedTuple

import torch

from .devices import Movable
from .devices import without_autocast
from .position_tables import Distances
from .position_tables import DistanceTables
from .positions import Positions
from .running_sums import sums_of_queries


class LowRankBias(NamedTuple):
    """Numbers per query and distance as products of what queries and what distances have, and exceptions at some distances.

    Attributes:
        query: `(batch|1, query, size)`.
        distance: `(heads, size, distances)`, which meets it.
        extra: `(batch|1, heads, query, some)`, added to the products.
        where: `(some,)` at which distances, by number.
    """

    query: torch.Tensor
    distance: torch.Tensor
    extra: torch.Tensor
    where: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """Return the whole bias, `(batch|1, heads, query, distances)`."""
        with without_autocast(self.query.device):  # numbers of positions stay in float32
            products = self.query[:, None] @ self.distance
        return products.index_add(-1, self.where, self.extra)


@dataclass(frozen=True)
class ScoreTerms(Movable):
    """The terms that a scheme adds to the scores, in the cheapest shape that says it. All parts are optional and add up.

    The score of query q and key k at distance r is
    `scale * ((q + key_offset) . k + (q + distance_offset) . query_vectors[r] + k . key_vectors[r]) + bias[r] + sums + dense`,
    and the value that it finds there is `v + value_vectors[r]`.

    Attributes:
        bias: `(heads, distances)` a number per head and distance, added to the scaled scores.
        query_vectors: `(heads|1, distances, head_dim)` a vector per distance that meets the query.
        key_vectors: `(heads|1, distances, head_dim)` a vector per distance that meets the key.
        value_vectors: `(heads|1, distances, head_dim)` a vector per distance added to the value.
        span: the first and last distance that the vectors stand for; those before and after share the first and last vector. None
            when they stand for all distances.
        sums: `(batch, heads, key)` running sums over the keys: that of the query less that of the key is added (`running_sums.py`).
        key_offset: `(heads, head_dim)` added to the query where it meets the keys: u of Transformer-XL.
        distance_offset: `(heads, head_dim)` added to the query where it meets the distances: v of Transformer-XL.
        dense: for what no table says: a function of the positions, the queries and keys `(batch, heads, length, head_dim)`, and
            what is `learned`, that gives `(batch|1, heads, query, key)`, added to the scaled scores. It is asked for some heads
            and some queries at a time, with all keys that they see.
        mixes_heads: whether `dense` must be asked for all heads together, because one head's numbers depend on the others.
        reads_types: whether `dense` is of token types, and so of no use in a pass without any.
        factors: for numbers per query and distance: a function of the positions and `learned` that gives them as `LowRankBias`, added to
            the scaled scores; for positions that are `is_toeplitz`. It is asked for some queries at a time, and for all heads.
            Beside `dense` it says the same, for less where many queries share distances (`for_pass`).
        learned: the parameters that `dense` or `factors` reads, so that blocks can be computed anew in the backward pass.
        learned_by_head: those of them that have an entry a head, `(heads, ...)`, which come last.
    """

    bias: torch.Tensor | None = None
    query_vectors: torch.Tensor | None = None
    key_vectors: torch.Tensor | None = None
    value_vectors: torch.Tensor | None = None
    span: tuple[int, int] | None = None
    sums: torch.Tensor | None = None
    key_offset: torch.Tensor | None = None
    distance_offset: torch.Tensor | None = None
    dense: Callable[..., torch.Tensor] | None = None
    mixes_heads: bool = False
    reads_types: bool = False
    factors: Callable[..., LowRankBias] | None = None
    learned: tuple[torch.Tensor, ...] = ()
    learned_by_head: tuple[torch.Tensor, ...] = ()

    @property
    def is_bias(self) -> bool:
        """Return whether numbers per head and distance are all."""
        vectors = (self.query_vectors, self.key_vectors, self.value_vectors, self.key_offset, self.distance_offset)
        return self.bias is not None and all(part is None for part in (*vectors, self.sums, self.dense, self.factors))

    def select(self, rows: torch.Tensor) -> "ScoreTerms":
        """Return the terms of some rows of the batch."""
        return self if self.sums is None else replace(self, sums=self.sums.index_select(0, rows))

    def for_pass(self, positions: Positions, spare: int) -> "ScoreTerms":
        """Return what one pass adds of terms that many passes share.

        Args:
            positions: of the pass.
            spare: how many distances stand before those of the pass (`position_tables.py`).
        """
        names = ["bias"] if self.span else ["bias", "query_vectors", "key_vectors", "value_vectors"]
        changed = {name: getattr(self, name)[:, spare:] for name in names if spare and getattr(self, name) is not None}
        if self.reads_types and positions.token_types is None:
            changed |= {"dense": None, "learned_by_head": ()}
        if self.dense is not None and self.factors is not None:
            shared = positions.is_toeplitz and positions.query.shape[1] > 1 and not torch.compiler.is_compiling()
            changed["dense" if shared else "factors"] = None
        return replace(self, **changed) if changed else self


def every_distance(terms: ScoreTerms, distances: Distances) -> ScoreTerms:
    """Return the same terms with a vector for each of the distances."""
    if terms.span is None:
        return terms
    low, high = terms.span
    entry = distances.values.clamp(low, high) - low
    names = [name for name in ("query_vectors", "key_vectors", "value_vectors") if getattr(terms, name) is not None]
    return replace(terms, span=None, **{name: getattr(terms, name).index_select(1, entry) for name in names})


def dense_bias(
    terms: ScoreTerms, tables: DistanceTables, query: torch.Tensor, key: torch.Tensor, scale: float
) -> torch.Tensor | None:
    """Return all that `terms` add to the scaled scores, as one tensor.

    Args:
        terms: what the scheme adds.
        tables: lay what they say of distances out over queries and keys.
        query: `(batch, heads, query, head_dim)` without offsets.
        key: `(batch, heads, key, head_dim)`.
        scale: factor on products of vectors.

    Returns:
        `(batch|1, heads, query, key)` in the dtype of the query, or None when nothing is added.
    """
    terms, parts = every_distance(terms, tables.distances), []
    if terms.bias is not None:
        parts.append(tables.spread(terms.bias))
    if terms.query_vectors is not None:
        offset = query if terms.distance_offset is None else query + terms.distance_offset[:, None].to(query.dtype)
        vectors = terms.query_vectors.to(query.dtype)
        parts.append(tables.gather((offset * scale) @ vectors.transpose(-1, -2)))
    if terms.key_vectors is not None:
        parts.append(tables.gather_keys((key * scale) @ terms.key_vectors.to(key.dtype).transpose(-1, -2)))
    if terms.sums is not None:
        own = sums_of_queries(terms.sums, tables.positions)
        parts.append(own[..., None] - terms.sums[..., None, :])
    if terms.dense is not None:
        parts.append(terms.dense(tables.positions, query, key, *terms.learned, *terms.learned_by_head))
    if terms.factors is not None:
        parts.append(tables.gather(terms.factors(tables.positions, *terms.learned, *terms.learned_by_head).numbers()))
    return in_range(sum(parts[1:], parts[0]), query.dtype) if parts else None


def in_range(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in a dtype; those beyond the range of float16 as half of its largest, so that scores can be added to them."""
    limit = torch.finfo(dtype).max / 2
    return (numbers.clamp(-limit, limit) if dtype == torch.float16 else numbers).to(dtype)
