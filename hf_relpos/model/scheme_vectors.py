"""Schemes in which a vector per distance meets the query."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout
from torch.nn.functional import pad
from transformers import initialization as init

from .position_tables import Distances
from .positions import Positions
from .scheme_base import ParameterSpec
from .scheme_base import PositionScheme
from .scheme_base import sinusoid
from .scheme_terms import ScoreTerms

TABLES = ("learned", "sinusoidal", "sinusoidal_rows")
"""What the vectors of Shaw's scheme may be."""


class Shaw(PositionScheme):
    """Vectors per clipped distance added to keys and values (arXiv 1803.02155, section 3.2).

    e_ij = q_i . (k_j + aK[clip(j - i, -k, k)]) / sqrt(d) and z_i = sum_j p_ij (v_j + aV[clip(j - i)]); the tables are
    shared by the heads of a layer. BERT's `relative_key` has no aV, its `relative_key_query` adds k_j . aK as well
    (`meets="both"`); OpenNMT has one table for keys and values (`values="shared"`); VITS has no vectors beyond k
    (`outside="zero"`). The vectors of Nezha (arXiv 1909.00204) are fixed sinusoids, in its paper of the distance, in its released
    code of the row of the table, which is the distance + k (`table="sinusoidal_rows"`).
    """

    parameter_specs = {
        "max_distance": ParameterSpec(16, "k: the largest distance with vectors of its own", minimum=1),
        "values": ParameterSpec(True, "vectors for the values: own, none, or the keys'", choices=(True, False, "shared")),
        "table": ParameterSpec("learned", "learned, or sinusoids of the distance or of distance + k", choices=TABLES),
        "outside": ParameterSpec("clamp", "beyond k: the vectors of k or none", choices=("clamp", "zero")),
        "meets": ParameterSpec("query", "what meets the keys' vectors: queries, or keys too", choices=("query", "both")),
    }
    has_kernel = True
    source = "arXiv 1803.02155, section 3.2"
    max_distance: int
    values: bool | str
    table: str
    outside: str
    meets: str

    @classmethod
    def needs_probabilities(cls, parameters: dict[str, Any]) -> str | None:
        values = parameters["values"]
        return f"{cls.name} adds vectors to the values (values={values})" if values else None

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        entries = self.max_distance + 1 if self.causal else 2 * self.max_distance + 1
        if self.table == "learned":
            self.key_table = nn.Parameter(torch.empty(entries, self.head_dim))
            if self.values is True:
                self.value_table = nn.Parameter(torch.empty(entries, self.head_dim))

    def initialize(self, std: float) -> None:
        for table in self.parameters():
            init.xavier_uniform_(table)

    def _vectors(self, name: str, of: Distances) -> torch.Tensor:
        """Return the vectors of the keys or of the values, `(1, entries, head_dim)`, with zeros around them for `outside`."""
        if self.table == "learned":
            vectors = getattr(self, name, self.key_table)
        else:
            distances = torch.arange(-self.max_distance, 1 + (0 if self.causal else self.max_distance), device=of.device)
            rows = distances + self.max_distance * (self.table == "sinusoidal_rows")
            vectors = sinusoid(rows, self.head_dim, of.dtype, interleaved=True)
        return (vectors if self.outside == "clamp" else pad(vectors, (0, 0, 1, 1)))[None]

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        vectors = self._vectors("key_table", distances)
        low = -self.max_distance - (self.outside == "zero")
        return ScoreTerms(
            query_vectors=vectors,
            key_vectors=vectors if self.meets == "both" else None,
            value_vectors=self._vectors("value_table", distances) if self.values else None,
            span=(low, low + vectors.shape[1] - 1),
        )


class TransformerXL(PositionScheme):
    """Sinusoids of the distance meet the query, with two learned offsets (arXiv 1901.02860, section 3.3).

    A_ij = ((q_i + u) . k_j + (q_i + v) . W_r R[i - j]) / sqrt(d); R is [sin | cos] of the distance, for all layers. The older form
    of the released code (`attn_type` 1) has learned vectors E and biases c of distances up to `max_distance`, which those beyond
    share: A_ij = ((q_i + u) . k_j + q_i . E[i - j] + c[i - j]) / sqrt(d). The paper has no such form.
    """

    parameter_specs = {
        "clamp_len": ParameterSpec(None, "distances beyond use the sinusoid of this one", minimum=1, optional=True),
        "max_distance": ParameterSpec(
            None, "learned vectors and biases, up to this distance, in place of sinusoids", minimum=1, optional=True
        ),
    }
    has_kernel = True
    source = "arXiv 1901.02860, section 3.3"
    clamp_len: int | None
    max_distance: int | None = None

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        clamp_len, max_distance = parameters["clamp_len"], parameters["max_distance"]
        if clamp_len is not None and max_distance is not None:
            raise ValueError(
                f"{cls.__name__} parameter clamp_len={clamp_len} is not allowed with max_distance={max_distance}: it clamps the "
                "distances of sinusoids, and learned vectors are clamped by max_distance alone; give one of the two"
            )

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.key_offset = nn.Parameter(torch.empty(self.heads, self.head_dim))
        if self.max_distance is not None:
            entries = self.max_distance + 1 if self.causal else 2 * self.max_distance + 1
            self.distance_table = nn.Parameter(torch.empty(self.heads, entries, self.head_dim))
            self.distance_bias = nn.Parameter(torch.empty(self.heads, entries))
            return
        self.hidden_size: int = config.hidden_size
        self.dropout: float = config.hidden_dropout
        self.distance_projection = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.distance_offset = nn.Parameter(torch.empty(self.heads, self.head_dim))

    def initialize(self, std: float) -> None:
        for learned in self.parameters(recurse=False):  # the projection is a module of its own
            init.normal_(learned, std=std)

    def prepare_distances(self, distances: Distances) -> Any:
        if self.max_distance is not None:
            return None
        back = -distances.values
        if self.clamp_len is not None:
            back = back.clamp(-self.clamp_len, self.clamp_len)
        return dropout(sinusoid(back, self.hidden_size, distances.dtype), self.dropout, self.training)

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        if self.max_distance is not None:
            span = (-self.max_distance, 0 if self.causal else self.max_distance)
            bias = self.distance_bias.index_select(1, distances.values.clamp(*span) + self.max_distance) * self.scale()
            return ScoreTerms(bias=bias, query_vectors=self.distance_table, span=span, key_offset=self.key_offset)
        projected = self.distance_projection(prepared.to(self.key_offset.dtype))
        return ScoreTerms(
            query_vectors=projected.unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1).contiguous(),
            key_offset=self.key_offset,
            distance_offset=self.distance_offset,
        )


class XLNet(TransformerXL):
    """Transformer-XL's terms in both directions, and one for tokens of the same or another segment (arXiv 1906.08237).

    The term of segments, (q_i + s) . e[same or not] / sqrt(d), exists in an encoder with `type_vocab_size`, in place
    of embeddings of types, and is added when `token_type_ids` are given (section 2.5). A memory holds no types: as in
    the released code, what it remembers is of type 0. A decoder is `attn_type="uni"` of that code.
    """

    parameter_specs = {"clamp_len": TransformerXL.parameter_specs["clamp_len"]}
    reads_token_types = True
    source = "arXiv 1906.08237, sections 2.4 and 2.5"

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        if config.causal and config.type_vocab_size:
            raise ValueError(
                f"type_vocab_size={config.type_vocab_size} is refused for position_scheme {cls.name!r} in a decoder: "
                "a cache holds no token types; use 0"
            )

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.has_segments: bool = config.type_vocab_size > 0
        if self.has_segments:
            self.segment_table = nn.Parameter(torch.empty(2, self.heads, self.head_dim))
            self.segment_offset = nn.Parameter(torch.empty(self.heads, self.head_dim))

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        terms = super().score_terms(distances, prepared)
        if not self.has_segments:
            return terms
        by_head = (self.segment_table.transpose(0, 1), self.segment_offset)
        return replace(terms, dense=self._segment_term, reads_types=True, learned_by_head=by_head)

    def _segment_term(
        self, positions: Positions, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, offset: torch.Tensor
    ) -> torch.Tensor:
        met = (query + offset[:, None].to(query.dtype)) * self.scale() @ table.transpose(1, 2).to(query.dtype)
        asking: Any = positions.query_types
        asked: Any = positions.token_types
        return torch.where((asking[:, :, None] == asked[:, None, :])[:, None], met[..., :1], met[..., 1:])


class Music(PositionScheme):
    """A learned vector per head and distance meets the query (Music Transformer, arXiv 1809.04281, section 3.4).

    Distances beyond the table add nothing, as in the released code.
    """

    parameter_specs = {
        "max_distance": ParameterSpec(512, "number of distances with a vector, 0 included", minimum=1),
        "share_heads": ParameterSpec(False, "one table for all heads of a layer", choices=(False, True)),
    }
    refuses = {"bidirectional": "its table holds the past only (arXiv 1809.04281, section 3.4.1)"}
    has_kernel = True
    source = "arXiv 1809.04281, section 3.4"
    max_distance: int
    share_heads: bool

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.table = nn.Parameter(torch.empty(1 if self.share_heads else self.heads, self.max_distance, self.head_dim))

    def initialize(self, std: float) -> None:
        init.normal_(self.table, std=self.head_dim**-0.5)

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        return ScoreTerms(query_vectors=pad(self.table, (0, 0, 1, 1)), span=(-self.max_distance, 1))
