"""Schemes whose bias differs from query to query: it depends on the scores, or on how far each query sees."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import initialization as init

from .position_tables import Distances
from .position_tables import DistanceTables
from .positions import Positions
from .positions import known
from .scheme_base import ParameterSpec
from .scheme_base import PositionScheme
from .scheme_terms import LowRankBias
from .scheme_terms import ScoreTerms


class CoPE(PositionScheme):
    """A key's position is how many tokens from it to the query pass a gate (arXiv 2405.18719, section 4).

    g_ij = sigmoid(q_i . k_j / sqrt(d)), p_ij = sum of g_it for t = j..i, and q_i . e[p_ij] is added to the scaled
    score; between two whole positions the two products are mixed. Only keys that the query sees are counted. The
    released code divides q_i . e[p_ij] by sqrt(d) too (`divide`).
    """

    parameter_specs = {
        "positions": ParameterSpec(64, "vectors e[0], e[1], ...: keys further away share the last", minimum=2),
        "divide": ParameterSpec(False, "divide what is added by the root of the head size", choices=(False, True)),
    }
    refuses = {"bidirectional": "it counts the tokens from a key to a query after it"}
    source = "arXiv 2405.18719, section 4"
    positions: int
    divide: bool

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.table = nn.Parameter(torch.empty(self.positions, self.head_dim))

    def initialize(self, std: float) -> None:
        init.zeros_(self.table)

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        return ScoreTerms(dense=self._places, learned=(self.table,))

    def _places(self, positions: Positions, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """q_i . e[p_ij], mixed between two whole positions, `(batch, heads, query, key)`."""
        # The keys run backwards, so that a running sum counts from the query.
        scores = ((query * self.scale()) @ key.flip(-2).transpose(-1, -2)).to(positions.dtype)
        place = scores.masked_fill_(~positions.visible.flip(-1), float("-inf")).sigmoid_().cumsum(-1)
        below = place.detach().clamp(max=self.positions - 1).long()
        whole = (query @ table.to(query.dtype).T * (self.scale() if self.divide else 1.0)).to(positions.dtype)
        step = pad(whole.diff(dim=-1), (0, 1))  # beyond the last position all is as there
        return torch.addcmul(whole.gather(-1, below), place - below, step.gather(-1, below)).flip(-1)


class Fire(PositionScheme):
    """A small network of the distance, relative to how far the query can look (arXiv 2310.04418, eq. 2-4).

    b = f(psi(|i - j|) / psi(max(L, i))), psi(x) = log(1 + |c x|), with c, the threshold L and the network f learned. The
    divisor's i is the distance from the query to the furthest key that it sees: its place in its document or, with a
    sliding window, at most window - 1, so that nothing depends on where segments are cut. The paper is causal; in an
    encoder the furthest key may stand on either side, and both sides share f. f has no last bias, which all keys would
    share.
    """

    parameter_specs = {
        "width": ParameterSpec(32, "units of the network's hidden layer", minimum=1),
        "c": ParameterSpec(0.1, "c where learning starts", minimum=1e-6),
        "threshold": ParameterSpec(512.0, "L where learning starts", minimum=1.0),
    }
    combines_as = "bias"
    source = "arXiv 2310.04418, equations 2 to 4"
    width: int
    c: float
    threshold: float

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.slope = nn.Parameter(torch.empty(1))
        self.threshold_factor = nn.Parameter(torch.empty(1))
        self.hidden_weight = nn.Parameter(torch.empty(self.width))
        self.hidden_bias = nn.Parameter(torch.empty(self.width))
        self.output_weight = nn.Parameter(torch.empty(self.heads, self.width))

    def initialize(self, std: float) -> None:
        init.constant_(self.slope, self.c)
        init.ones_(self.threshold_factor)
        for weight, inputs in ((self.hidden_weight, 1), (self.hidden_bias, 1), (self.output_weight, self.width)):
            init.uniform_(weight, -(inputs**-0.5), inputs**-0.5)

    @staticmethod
    def _psi(distance: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return torch.log1p((slope * distance).abs())

    @staticmethod
    def _network(
        share: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        output: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """f of numbers `(batch, query, distances)`, of chosen units alone: `(batch, heads, query, distances)`."""
        weight, bias = weight[:, None, None, None], bias[:, None, None, None]
        hidden = torch.addcmul(bias, weight, share).relu_()  # (units, batch, query, distances)
        with torch.autocast(share.device.type, enabled=False):  # numbers of positions stay in float32
            hidden = hidden if chosen is None else hidden * chosen
            return (output @ hidden.flatten(1)).unflatten(1, share.shape).transpose(0, 1)

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        learned = (self.slope, self.threshold_factor, self.hidden_weight, self.hidden_bias, self.output_weight)
        slope, factor, *network = (parameter.to(distances.dtype) for parameter in learned)
        threshold = (factor * self.threshold).abs()
        limit = known(threshold)
        if limit is not None and max(-distances.low, distances.high) <= limit:
            # No query looks beyond L: then all divide by psi(L), and one number per distance says it all.
            share = self._psi(distances.values, slope) / (self._psi(threshold, slope) + 1e-6)
            return ScoreTerms(bias=self._network(share[None, None], *network)[0, :, 0])
        return ScoreTerms(dense=self._pairs, factors=self._factors, learned=learned)

    def _part(self, positions: Positions, slope: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return the factor of psi(distance) for each query, `(batch|1, query)`."""
        furthest = torch.maximum(positions.furthest.to(positions.dtype), (factor * self.threshold).abs())
        return 1 / (self._psi(furthest, slope) + 1e-6)

    def _pairs(self, positions: Positions, query: torch.Tensor, key: torch.Tensor, *learned: torch.Tensor) -> torch.Tensor:
        """Return the bias of every pair, `(batch|1, heads, query, key)`."""
        slope, factor, *network = (parameter.to(positions.dtype) for parameter in learned)
        part = self._part(positions, slope, factor)
        return self._network(part[..., None] * self._psi(positions.distance, slope), *network)

    def _factors(self, positions: Positions, *learned: torch.Tensor) -> LowRankBias:
        """Return the bias of every query and distance.

        A unit of f starts or stops where psi(distance) reaches some part of psi(furthest). Queries of a block look about as
        far as each other, so at most distances a unit is the same line for all of them, or nothing: b is
        X / psi(furthest) + Y with X and Y numbers per head and distance. What is left are a few units at a few distances.
        """
        slope, factor, weight, bias, output = (parameter.to(positions.dtype) for parameter in learned)
        part, psi = self._part(positions, slope, factor), self._psi(DistanceTables(positions).distances.values, slope)
        ends = torch.stack([part.amin(), part.amax()])[:, None] * psi  # (2, distances)
        on, at_other_end = (weight[:, None, None] * ends + bias[:, None, None] > 0).unbind(1)  # (units, distances)
        line, differ = (on & at_other_end).to(psi.dtype), on != at_other_end
        units, where = differ.any(1).nonzero()[:, 0], differ.any(0).nonzero()[:, 0]
        share = part[..., None] * psi[where]  # (batch|1, query, some)
        disagree = differ[units][:, None, None, where].to(psi.dtype)
        extra = self._network(share, weight[units], bias[units], output[:, units], disagree)
        with torch.autocast(part.device.type, enabled=False):  # as in the network
            table = torch.stack([(output * weight) @ line * psi, (output * bias) @ line], 1)
        return LowRankBias(torch.stack([part, torch.ones_like(part)], -1), table, extra, where)
