"""Attention with score terms pair by pair, and random terms: what attention in blocks is compared with."""

from typing import Any

import torch

from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_tables import DistanceTables
from hf_relpos.model.positions import Positions
from hf_relpos.model.scheme_terms import LowRankBias
from hf_relpos.model.scheme_terms import ScoreTerms

HEADS, SIZE = 4, 3
SCALE = 0.7
TABLES = ("bias", "query_vectors", "key_vectors", "value_vectors", "key_offset", "distance_offset")


def terms_of(scheme: Any, positions: Positions) -> ScoreTerms:
    """What a scheme that needs no projections of a layer adds to the scores of a pass."""
    distances = DistanceTables(positions).distances
    return scheme.score_terms(distances, scheme.prepare_distances(distances)).for_pass(positions, spare=0)


def plain_attention(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    terms: ScoreTerms,
    positions: Positions,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula of `ScoreTerms` on all pairs, `(batch, query, heads, head_dim)`.

    Args:
        states: queries, keys and values, `(batch, heads, length, head_dim)`.
        terms: what is added.
        positions: who sees whom.
        factor: `(batch, heads, query, key)` what dropout multiplies the probabilities by.
    """
    query, key, value = states
    low, high = positions.bounds
    distance = positions.distance[0]
    first, last = terms.span or (low, high)

    def of_pairs(vectors: torch.Tensor) -> torch.Tensor:
        return vectors.expand(query.shape[1], -1, -1)[:, distance.clamp(first, last) - first]

    content = query if terms.key_offset is None else query + terms.key_offset[:, None]
    scores = SCALE * content @ key.transpose(-1, -2)
    if terms.query_vectors is not None:
        asking = query if terms.distance_offset is None else query + terms.distance_offset[:, None]
        scores = scores + SCALE * torch.einsum("bhqd,hqkd->bhqk", asking, of_pairs(terms.query_vectors))
    if terms.key_vectors is not None:
        scores = scores + SCALE * torch.einsum("bhkd,hqkd->bhqk", key, of_pairs(terms.key_vectors))
    if terms.bias is not None:
        scores = scores + terms.bias[:, distance.clamp(low, high) - low]
    if terms.factors is not None:
        numbers = terms.factors(positions, *terms.learned, *terms.learned_by_head).numbers()
        scores = scores + numbers.gather(-1, (distance.clamp(low, high) - low).expand(*numbers.shape[:2], -1, -1))
    if terms.dense is not None:
        scores = scores + terms.dense(positions, query, key, *terms.learned, *terms.learned_by_head)
    weights = scores.masked_fill(~positions.visible, float("-inf")).softmax(-1)
    weights = weights if factor is None else weights * factor
    output = weights @ value
    if terms.value_vectors is not None:
        output = output + torch.einsum("bhqk,hqkd->bhqd", weights, of_pairs(terms.value_vectors))
    return output.transpose(1, 2)


def of_both(positions: Positions, query: torch.Tensor, key: torch.Tensor, *learned: torch.Tensor) -> torch.Tensor:
    """A dense term of what the tokens say, where they stand and what is learned."""
    mixed, slope = learned
    return (query @ mixed @ key.transpose(-1, -2)).tanh() + slope[:, None, None] * (positions.distance[:, None] * 0.3).sin()


def of_places(positions: Positions, query: torch.Tensor, key: torch.Tensor, *learned: torch.Tensor) -> torch.Tensor:
    """A dense term of places alone: one for the whole batch, and the first of what is learned is not used."""
    return learned[1][:, None, None] * (positions.distance[:, None] * 0.3).cos()


def of_all_heads(positions: Positions, query: torch.Tensor, key: torch.Tensor, *learned: torch.Tensor) -> torch.Tensor:
    """A dense term in which each head's numbers are those of the others."""
    return of_both(positions, query, key, *learned).cumsum(1)


def of_rows(positions: Positions, mixed: torch.Tensor, slope: torch.Tensor) -> LowRankBias:
    """LowRankBias of how far queries look, and exceptions at every third distance."""
    place, distances = positions.furthest.double(), DistanceTables(positions).distances.values.double()
    query = torch.stack([(mixed[0, 1] * place).sin(), torch.ones_like(place)], -1)
    distance = slope[:, None, None] * torch.stack([distances * mixed[0, 0], (distances * 0.2).cos()])
    where = (distances % 3 == 0).nonzero()[:, 0]
    return LowRankBias(query, distance, (mixed[1, 1] * place)[:, None, :, None] * distance[:, :1, where], where)


DENSE = {"of both": of_both, "of places": of_places, "of all heads": of_all_heads}


def random_terms(positions: Positions, names: set[str], span: tuple[int, int] | None, shared: bool, dense: str) -> ScoreTerms:
    """Terms of the given names, all learned.

    Args:
        positions: for how many distances.
        names: which of `TABLES`.
        span: the distances that vectors stand for, or None for all.
        shared: whether all heads share vectors.
        dense: which of `DENSE`, "factors" for `of_rows`, or "" for none.
    """
    distances = len(DistanceTables(positions).distances.values)
    vectors = (1 if shared else HEADS, distances if span is None else span[1] - span[0] + 1, SIZE)
    shapes = dict.fromkeys(TABLES, vectors) | {"bias": (HEADS, distances)}
    shapes |= dict.fromkeys(("key_offset", "distance_offset"), (HEADS, SIZE))
    parts: dict[str, Any] = {name: learned(shape) for name, shape in shapes.items() if name in names}
    if dense:
        made = {"dense": DENSE.get(dense), "mixes_heads": dense == "of all heads"}
        parts |= {"factors": of_rows} if dense == "factors" else made
        parts |= {"learned": (learned((SIZE, SIZE)),), "learned_by_head": (learned((HEADS,)),)}
    return ScoreTerms(**parts, span=span)


def learned(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def leaves_of(terms: ScoreTerms) -> list[torch.Tensor]:
    """All tensors of the terms."""
    return [part for name in TABLES if (part := getattr(terms, name)) is not None] + [*terms.learned, *terms.learned_by_head]


def positions_of(batch: int, length: int, memory: int = 0, **options: Any) -> Positions:
    """Positions as a model builds them."""
    return build_positions((batch, length), torch.empty(0, dtype=torch.float64), memory_slots=memory, **options)


def random_states(positions: Positions, batch: int, groups: int = 1) -> list[torch.Tensor]:
    """Queries, keys and values; keys and values for every `groups` heads one."""
    queries, keys = positions.query.shape[1], positions.key.shape[1]
    return [learned((batch, HEADS, queries, SIZE)), *(learned((batch, HEADS // groups, keys, SIZE)) for _ in range(2))]
