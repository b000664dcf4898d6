"""Schemes whose bias differs from query to query: it depends on the scores, or on how far each query sees."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import leaky_relu
from torch.nn.functional import pad
from transformers import initialization as init

from .devices import without_autocast
from .position_tables import Distances
from .position_tables import DistanceTables
from .positions import Positions
from .positions import known
from .scheme_base import ParameterSpec
from .scheme_base import PositionScheme
from .scheme_bias import Alibi
from .scheme_bias import Kerple
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
        """Return q_i . e[p_ij], mixed between two whole positions, `(batch, heads, query, key)`."""
        query, key, table = (part.to(positions.dtype) for part in (query, key, table))
        with without_autocast(query.device):  # a sum over many keys gathers what rounding their gates leaves
            # The keys run backwards, so that a running sum counts from the query.
            scores = (query * self.scale()) @ key.flip(-2).transpose(-1, -2)
            whole = query @ table.T * (self.scale() if self.divide else 1.0)
        place = scores.masked_fill_(~positions.visible.flip(-1), float("-inf")).sigmoid_().cumsum(-1)
        below = place.detach().clamp(max=self.positions - 1).long()
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
        """Return f of numbers `(batch, query, distances)`, of chosen units alone: `(batch, heads, query, distances)`."""
        weight, bias = weight[:, None, None, None], bias[:, None, None, None]
        hidden = torch.addcmul(bias, weight, share).relu_()  # (units, batch, query, distances)
        with without_autocast(share.device):  # numbers of positions stay in float32
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
        with without_autocast(part.device):  # as in the network
            table = torch.stack([(output * weight) @ line * psi, (output * bias) @ line], 1)
        return LowRankBias(torch.stack([part, torch.ones_like(part)], -1), table, extra, where)


PRIORS: dict[str, type[PositionScheme]] = {kind.__name__.lower(): kind for kind in (Kerple, Alibi, Fire)}
"""What DAPE may start from, by the names of the schemes."""


class DAPE(PositionScheme):
    """A small network of all heads' scores A and of another scheme's bias B adapts B to the tokens (arXiv 2405.14722, section 3).

    The score is A + B + f([A; B]), with A = q_i . k_j / sqrt(d) and f(x) = W_2 leaky_relu(W_1 x + b_1): for each pair, 2 heads
    numbers become `width` and then a number a head. f has no last bias, which all keys would share; the released code has one. B is
    that of the prior scheme with the parameters of its paper. The code clamps what KERPLE learns; its FIRE has leaky units and, in
    training, half of the threshold. The paper leaves the root of d out of A; the code divides by it before f. The paper is causal;
    in an encoder B is what the prior scheme has there.
    """

    parameter_specs = {
        "prior": ParameterSpec(Kerple.__name__.lower(), "the scheme that B comes from", choices=tuple(PRIORS)),
        "width": ParameterSpec(32, "units of the network's hidden layer", minimum=1),
    }
    combines_as = "bias"
    source = "arXiv 2405.14722, section 3"
    width: int

    def __init__(self, config: Any, prior: str, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.prior = PRIORS[prior](config, **PRIORS[prior].complete({}))
        self.hidden_weight = nn.Parameter(torch.empty(self.width, 2 * self.heads))
        self.hidden_bias = nn.Parameter(torch.empty(self.width))
        self.output_weight = nn.Parameter(torch.empty(self.heads, self.width))

    def initialize(self, std: float) -> None:
        """Draw the network's weights as `nn.Linear` does; the prior scheme is a module of its own, which the model initialises."""
        inputs = 2 * self.heads
        for weight, size in ((self.hidden_weight, inputs), (self.hidden_bias, inputs), (self.output_weight, self.width)):
            init.uniform_(weight, -(size**-0.5), size**-0.5)

    def prepare_distances(self, distances: Distances) -> Any:
        return self.prior.call("prepare_distances", distances)

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        prior = self.prior.call("score_terms", distances, prepared)
        of_prior = (*prior.learned, *prior.learned_by_head) if prior.bias is None else (prior.bias,)
        learned = (self.hidden_weight, self.hidden_bias, self.output_weight, *of_prior)
        adapted = partial(self._adapted, prior.dense, distances.low)
        return ScoreTerms(bias=prior.bias, dense=adapted, mixes_heads=True, learned=learned)

    def _adapted(
        self,
        of_pairs: Callable[..., torch.Tensor] | None,
        low: int,
        positions: Positions,
        query: torch.Tensor,
        key: torch.Tensor,
        *learned: torch.Tensor,
    ) -> torch.Tensor:
        """Return f([A; B]), and B itself where it is no table, `(batch, heads, query, key)`.

        Args:
            of_pairs: makes B of what the prior scheme has learned; None where that is a table, `(heads, distances)`.
            low: the first distance of such a table.
            positions, query, key, learned: as of `ScoreTerms.dense`.
        """
        weight, hidden_bias, output = (part.to(positions.dtype) for part in learned[:3])
        if of_pairs is None:
            tables, table = DistanceTables(positions), learned[3]
            first = tables.distances.low - low
            bias = tables.spread(table[:, first : first + tables.distances.values.shape[0]])
        else:
            bias = of_pairs(positions, query, key, *learned[3:])
        scores = ((query * self.scale()) @ key.transpose(-1, -2)).to(positions.dtype)
        with without_autocast(scores.device):  # what is made of scores stays in float32
            both = torch.cat([scores, bias.expand_as(scores)], 1).flatten(2)  # (batch, 2 heads, pairs)
            reads, gives = (
                matrix.expand(both.shape[0], -1, -1) for matrix in (weight, output)
            )  # else products copy the pairs
            adapted = gives.bmm(leaky_relu(torch.baddbmm(hidden_bias[:, None], reads, both), inplace=True))
        adapted = adapted.unflatten(-1, scores.shape[2:])
        return adapted if of_pairs is None else adapted + bias
