"""The disentangled attention of DeBERTa: distances as tokens, whose embeddings meet the content's queries and keys."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout
from transformers import initialization as init

from .position_tables import Distances
from .scheme_base import LayerProjections
from .scheme_base import ParameterSpec
from .scheme_base import PositionScheme
from .scheme_terms import ScoreTerms


def deberta_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Return the bucket of query minus key: the distance itself up to half of the buckets, then wider ones (released code of v2).

    In float32 and in the order of the released code, because bucket edges are where rounding decides.
    """
    exact = num_buckets // 2
    far = distance.abs().clamp(min=exact) / exact
    furthest = torch.tensor((max_distance - 1) / exact, device=distance.device)
    wide = exact + torch.ceil(torch.log(far) / torch.log(furthest) * (exact - 1)).long()
    return torch.where(distance.abs() <= exact, distance, distance.sign() * wide)


class Deberta(PositionScheme):
    """Content meets position and position meets content (arXiv 2006.03654, section 3.1, equation 4).

    A_ij = (q_i . k_j + q_i . Kr[d(i, j)] + k_j . Qr[d(j, i)]) / sqrt(3 d). Kr and Qr are projections, a pair for each
    layer, of a table of distances that the whole model has in common; d(i, j) is i - j clipped to -k..k-1. The
    released code takes Qr[d(i, j)], and so does the default here; its second version projects the table by each
    layer's own queries and keys, normalises it, and counts far distances in buckets.
    """

    parameter_specs = {
        "max_distance": ParameterSpec(512, "k: distances beyond share their rows", minimum=2),
        "num_buckets": ParameterSpec(None, "buckets a side, for k distances; one row a distance if None", 4, optional=True),
        "terms": ParameterSpec("both", "content to position, position to content", choices=("both", "c2p", "p2c")),
        "p2c_index": ParameterSpec("code", "row that a key meets: d(i, j) or d(j, i)", choices=("code", "paper")),
        "projections": ParameterSpec("own", "of the table: its own or the layer's", choices=("own", "layer")),
        "normalise": ParameterSpec(False, "normalise the table", choices=(False, True)),
    }
    refuses = {"causal": "it is defined for bidirectional attention (arXiv 2006.03654, section 3)"}
    serves_all_layers = True
    has_kernel = True
    source = "arXiv 2006.03654, section 3.1"
    max_distance: int
    num_buckets: int | None
    terms: str
    p2c_index: str
    projections: str
    normalise: bool

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        buckets, furthest = parameters["num_buckets"], parameters["max_distance"]
        if buckets is not None and furthest <= buckets // 2 + 1:
            raise ValueError(
                f"Deberta parameter max_distance={furthest} is not allowed: more than {buckets // 2 + 1}, since "
                f"num_buckets={buckets} holds {buckets // 2} distances exactly"
            )

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.dropout: float = config.hidden_dropout
        self.span = self.num_buckets or self.max_distance
        self.table = nn.Parameter(torch.empty(2 * self.span, config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if self.normalise else None
        if self.projections == "own":
            inner = self.heads * self.head_dim
            for name, bias in (("key", False), ("query", True)):  # a key's bias would be the same for all keys
                if name in self.meeting:
                    owned = {layer: nn.Linear(config.hidden_size, inner, bias=bias) for layer in self._owners(config)}
                    setattr(self, f"{name}_projections", nn.ModuleDict(owned))

    @property
    def meeting(self) -> tuple[str, ...]:
        """Return as what the distances meet the content: keys that meet queries, queries that meet keys."""
        return {"both": ("key", "query"), "c2p": ("key",), "p2c": ("query",)}[self.terms]

    @classmethod
    def _owners(cls, config: Any) -> list[str]:
        """Return the layers that have projections of their own, by number; `share_positions` leaves the first."""
        names = config.position_scheme
        every = range(config.num_hidden_layers) if isinstance(names, str) else range(len(names))
        owners = [str(index) for index in every if isinstance(names, str) or names[index] == cls.name]
        return owners[:1] if config.share_positions == "model" else owners

    def initialize(self, std: float) -> None:
        init.normal_(self.table, std=std)

    def scale(self) -> float:
        return (self.head_dim * (1 + len(self.meeting))) ** -0.5

    def _rows(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the row of the table for query minus key."""
        if self.num_buckets is not None:
            distance = deberta_bucket(distance, self.num_buckets, self.max_distance)
        return (distance + self.span).clamp(0, 2 * self.span - 1)

    def _span(self, distances: Distances) -> tuple[int, int]:
        """Return the distances that have rows of their own: the others share those at the ends."""
        low, high = (min(max(end, -self.max_distance), self.max_distance) for end in (distances.low, distances.high))
        return low, high

    def prepare_distances(self, distances: Distances) -> dict[str, torch.Tensor]:
        low, high = self._span(distances)
        own = torch.arange(low, high + 1, device=distances.device)
        rows = {"key": self._rows(-own)}
        return rows | {"query": self._rows(own) if self.p2c_index == "paper" else rows["key"]}

    def for_layer(self, prepared: dict[str, torch.Tensor], attention: LayerProjections) -> dict[str, torch.Tensor]:
        """Return the vectors of the distances of the span, `(heads, distances, head_dim)`: keys for queries, and queries for keys."""
        table = dropout(self.table if self.norm is None else self.norm(self.table), self.dropout, self.training)
        vectors = {}
        for name in self.meeting:
            if self.projections == "layer":
                projection = getattr(attention, "k_proj" if name == "key" else "q_proj")
            else:
                layers = getattr(self, f"{name}_projections")
                projection = layers[str(attention.layer_idx)] if len(layers) > 1 else next(iter(layers.values()))
            projected = projection(table).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            shared = self.heads // projected.shape[0]  # grouped queries share the projections of keys
            vectors[name] = projected.repeat_interleave(shared, 0).index_select(1, prepared[name])
        return vectors

    def score_terms(self, distances: Distances, prepared: dict[str, torch.Tensor]) -> ScoreTerms:
        keys, queries = prepared.get("key"), prepared.get("query")
        return ScoreTerms(query_vectors=keys, key_vectors=queries, span=self._span(distances))
