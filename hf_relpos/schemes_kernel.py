"""Schemes that add a function of the distance to the scaled scores, with few numbers to learn or none."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers import initialization as init

from .positions import Positions
from .scheme_base import Parameter
from .scheme_base import PositionScheme
from .scheme_base import frequencies
from .score_terms import Factors
from .score_terms import ScoreTerms


class Kerple(PositionScheme):
    """A learned kernel of the distance r = |i - j|: -p log(1 + a r) or -a r^p (arXiv 2205.09921, section 4).

    What is learned becomes a and p by softplus, but the exponent p of the power by 2 sigmoid: they stay positive, and
    the exponent below 2, as the kernels need. The released code clamps what is learned, in place and before each use.
    As a weight, the power kernel multiplies the scores by exp(-a r^p).
    """

    parameter_specs = {
        "kernel": Parameter("log", "-p log(1 + a r) or -a r^p", choices=("log", "power")),
        "acts_as": Parameter("bias", "added to the scores, multiplied, or both", choices=("bias", "weight", "both")),
    }
    combines_as = "bias"
    source = "arXiv 2205.09921, section 4"
    kernel: str
    acts_as: str
    bias_a: nn.Parameter
    bias_p: nn.Parameter
    weight_a: nn.Parameter
    weight_p: nn.Parameter

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        if parameters["kernel"] == "log" and parameters["acts_as"] != "bias":
            raise ValueError(f"Kerple parameter acts_as={parameters['acts_as']!r} needs kernel='power': log is a bias")

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        for name in ("bias", "weight") if self.acts_as == "both" else (self.acts_as,):
            self.register_parameter(f"{name}_a", nn.Parameter(torch.empty(self.heads)))
            self.register_parameter(f"{name}_p", nn.Parameter(torch.empty(self.heads)))

    def initialize(self, std: float) -> None:
        """Draw a from U(0, 1) and p from U(0, 2), then undo what makes them positive."""
        for name, learned in self.named_parameters():
            share = torch.empty_like(learned).uniform_(0.01, 0.99)
            positive = share if name.endswith("a") else 2 * share
            exponent = name.endswith("p") and self.kernel == "power"
            init.copy_(learned, share.logit() if exponent else positive.expm1().log())

    def _kernel(self, a: torch.Tensor, p: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The kernel, at most 0, `(heads, distances)`, from what is learned, `(heads,)` each."""
        a, p = (learned.to(positions.dtype)[:, None] for learned in (a, p))
        distance = positions.distances.abs().to(positions.dtype)
        if self.kernel == "log":
            return -softplus(p) * torch.log1p(softplus(a) * distance)
        return -softplus(a) * distance ** (2 * p.sigmoid())

    def score_terms(self, positions: Positions, prepared: Any, query: torch.Tensor, key: torch.Tensor) -> ScoreTerms:
        bias = self._kernel(self.bias_a, self.bias_p, positions) if self.acts_as != "weight" else None
        if self.acts_as == "bias":
            return ScoreTerms(bias=bias)
        return ScoreTerms(bias=bias, dense=self._weighed, learned_by_head=(self.weight_a, self.weight_p))

    def _weighed(
        self, positions: Positions, query: torch.Tensor, key: torch.Tensor, a: torch.Tensor, p: torch.Tensor
    ) -> torch.Tensor:
        """What the kernel as a weight changes the scores by: q . k (exp(kernel) - 1)."""
        weight = positions.spread(self._kernel(a, p, positions).expm1())
        return (query * self.scale()) @ key.transpose(-1, -2) * weight.to(query.dtype)


class Sandwich(PositionScheme):
    """Product of both positions' sinusoids: H/(8h) sum_t cos((i - j) 10000^(-2t/d)) (arXiv 2212.10356, section 6).

    Its value at distance 0 is taken off, which changes no probability: near keys then stay apart in half precision.
    """

    parameter_specs = {"size": Parameter(128, "size d of the sinusoids", minimum=2)}
    combines_as = "bias"
    source = "arXiv 2212.10356, section 6"
    size: int

    def prepare(self, positions: Positions) -> torch.Tensor:
        distances = positions.distances
        angles = distances[:, None] * frequencies(self.size, 10000.0, distances.device, positions.dtype)
        head = torch.arange(1, self.heads + 1, device=distances.device, dtype=positions.dtype)
        return self.heads / (8 * head[:, None]) * (angles.cos() - 1).sum(-1)

    def score_terms(self, positions: Positions, prepared: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> ScoreTerms:
        return ScoreTerms(bias=prepared)


class Fire(PositionScheme):
    """A small network of the distance, relative to how far the query can look (arXiv 2310.04418, eq. 2-4).

    b = f(psi(|i - j|) / psi(max(L, i))), psi(x) = log(1 + |c x|), with c, the threshold L and the network f learned. The
    divisor's i is the distance from the query to the furthest key that it sees: its place in its document or, with a
    sliding window, at most window - 1, so that nothing depends on where segments are cut. The paper is causal; in an
    encoder the furthest key may stand on either side, and both sides share f. f has no last bias, which all keys would
    share.
    """

    parameter_specs = {
        "width": Parameter(32, "units of the network's hidden layer", minimum=1),
        "c": Parameter(0.1, "c where learning starts", minimum=1e-6),
        "threshold": Parameter(512.0, "L where learning starts", minimum=1.0),
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

    def score_terms(self, positions: Positions, prepared: Any, query: torch.Tensor, key: torch.Tensor) -> ScoreTerms:
        learned = (self.slope, self.threshold_factor, self.hidden_weight, self.hidden_bias, self.output_weight)
        slope, factor, *network = (parameter.to(positions.dtype) for parameter in learned)
        threshold = (factor * self.threshold).abs()
        low, high = positions.bounds
        compiling = torch.compiler.is_compiling()
        if not compiling and max(positions.room - low, high) <= float(threshold.detach()):
            # No query looks beyond L: then all divide by psi(L), and one number per distance says it all.
            share = self._psi(positions.distances, slope) / (self._psi(threshold, slope) + 1e-6)
            return ScoreTerms(bias=self._network(share[None, None], *network)[0, :, 0])
        if compiling or not positions.is_toeplitz or query.shape[2] == 1:
            return ScoreTerms(dense=self._pairs, learned=learned)
        return ScoreTerms(factors=self._factors, learned=learned)

    def _part(self, positions: Positions, slope: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """What psi(distance) is multiplied by for each query, `(batch|1, query)`."""
        furthest = torch.maximum(positions.furthest.to(positions.dtype), (factor * self.threshold).abs())
        return 1 / (self._psi(furthest, slope) + 1e-6)

    def _pairs(self, positions: Positions, query: torch.Tensor, key: torch.Tensor, *learned: torch.Tensor) -> torch.Tensor:
        """The bias of every pair, `(batch|1, heads, query, key)`."""
        slope, factor, *network = (parameter.to(positions.dtype) for parameter in learned)
        part = self._part(positions, slope, factor)
        return self._network(part[..., None] * self._psi(positions.distance, slope), *network)

    def _factors(self, positions: Positions, *learned: torch.Tensor) -> Factors:
        """The bias of every query and distance.

        A unit of f starts or stops where psi(distance) reaches some part of psi(furthest). Queries of a block look about as
        far as each other, so at most distances a unit is the same line for all of them, or nothing: b is
        X / psi(furthest) + Y with X and Y numbers per head and distance. What is left are a few units at a few distances.
        """
        slope, factor, weight, bias, output = (parameter.to(positions.dtype) for parameter in learned)
        part, psi = self._part(positions, slope, factor), self._psi(positions.distances, slope)
        ends = torch.stack([part.amin(), part.amax()])[:, None] * psi  # (2, distances)
        on, at_other_end = (weight[:, None, None] * ends + bias[:, None, None] > 0).unbind(1)  # (units, distances)
        line, differ = (on & at_other_end).to(psi.dtype), on != at_other_end
        units, where = differ.any(1).nonzero()[:, 0], differ.any(0).nonzero()[:, 0]
        share = part[..., None] * psi[where]  # (batch|1, query, some)
        disagree = differ[units][:, None, None, where].to(psi.dtype)
        extra = self._network(share, weight[units], bias[units], output[:, units], disagree)
        with torch.autocast(part.device.type, enabled=False):  # as in the network
            table = torch.stack([(output * weight) @ line * psi, (output * bias) @ line], 1)
        return Factors(torch.stack([part, torch.ones_like(part)], -1), table, extra, where)
