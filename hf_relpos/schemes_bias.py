"""Schemes that add a number per head and distance to the scaled scores: learned ones, and ALiBi's slopes."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .positions import Positions
from .scheme_base import Parameter
from .scheme_base import PositionScheme
from .score_terms import ScoreTerms


class LearnedBias(PositionScheme):
    """One learned number per head and distance, distances clipped: b[h, clip(j - i, -k, k)]."""

    parameter_specs = {"max_distance": Parameter(128, "distances beyond share the entry of this one", minimum=1)}
    combines_as = "bias"
    source = "the scalar form of arXiv 1803.02155; relative bias of Swin (arXiv 2103.14030, eq. 4)"
    max_distance: int

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        entries = self.max_distance + 1 if self.causal else 2 * self.max_distance + 1
        self.bias = nn.Parameter(torch.empty(self.heads, entries))

    def initialize(self, std: float) -> None:
        init.zeros_(self.bias)

    def score_terms(self, positions: Positions, prepared: Any, query: torch.Tensor, key: torch.Tensor) -> ScoreTerms:
        column = positions.distances.clamp(-self.max_distance, 0 if self.causal else self.max_distance) + self.max_distance
        return ScoreTerms(bias=self.bias.index_select(1, column))


def t5_bucket(distance: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Bucket of key minus query: exact when near, logarithmic when far (arXiv 1910.10683, section 2.1).

    Half of the buckets (of one direction) hold one distance each; the others widen up to `max_distance`, beyond which
    all share the last one. Bidirectional: the second half of all buckets is for keys after the query.
    """
    per_side = num_buckets // 2 if bidirectional else num_buckets
    first = torch.where(distance > 0, per_side, 0) if bidirectional else torch.zeros_like(distance)
    far = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = per_side // 2
    log_ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (log_ratio * (per_side - exact)).long()).clamp(max=per_side - 1)
    return first + torch.where(far < exact, far, wide)


class T5(PositionScheme):
    """One learned number per head and bucket of distances; scores are not scaled (arXiv 1910.10683, section 2.1)."""

    parameter_specs = {
        "num_buckets": Parameter(32, "number of buckets, of both directions together", minimum=4),
        "max_distance": Parameter(128, "distances beyond share the last bucket", minimum=2),
        "scale_scores": Parameter(False, "divide q.k by the root of the head size, which T5 does not", choices=(False, True)),
    }
    combines_as = "bias"
    source = "arXiv 1910.10683, section 2.1"
    num_buckets: int
    max_distance: int
    scale_scores: bool

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        exact = parameters["num_buckets"] // (2 if config.causal else 4)
        if parameters["max_distance"] <= exact:
            raise ValueError(
                f"T5 parameter max_distance={parameters['max_distance']} is not allowed: more than {exact}, the "
                f"number of distances that num_buckets={parameters['num_buckets']} holds exactly"
            )

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.bias = nn.Parameter(torch.empty(self.heads, self.num_buckets))

    def initialize(self, std: float) -> None:
        init.normal_(self.bias, std=std)

    def scale(self) -> float:
        return super().scale() if self.scale_scores else 1.0

    def query_gain(self) -> float:
        return 1.0 if self.scale_scores else self.head_dim**-0.5

    def prepare(self, positions: Positions) -> torch.Tensor:
        return t5_bucket(positions.distances, not self.causal, self.num_buckets, self.max_distance)

    def score_terms(self, positions: Positions, prepared: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> ScoreTerms:
        return ScoreTerms(bias=self.bias.index_select(1, prepared))


def alibi_slopes(heads: int, geometric: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Slope of each head, `(heads,)`: 2^(-8h/H) for H a power of two, else as the released code interpolates.

    The released code takes the slopes of the next lower power of two, then every other slope of twice that number. The
    text of the paper has the plain formula for every H: `geometric`.
    """

    def powers(count: int) -> torch.Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, count + 1, dtype=dtype) / count)

    lower = heads if geometric else 2 ** (heads.bit_length() - 1)
    return torch.cat([powers(lower), powers(2 * lower)[0::2][: heads - lower]])


class Alibi(PositionScheme):
    """A penalty in proportion to the distance, -m_h |i - j|, with a slope a head (arXiv 2108.12409, section 3)."""

    parameter_specs = {
        "slopes": Parameter("released", "of the released code or of the formula", choices=("released", "geometric")),
        "sides": Parameter("symmetric", "encoder: both or half of the heads a side", choices=("symmetric", "split")),
        "learned": Parameter(False, "slopes are where learning starts", choices=(False, True)),
    }
    combines_as = "bias"
    source = "arXiv 2108.12409, section 3"
    slopes: str
    sides: str
    learned: bool

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        if self.learned:
            self.slope = nn.Parameter(torch.empty(self.heads))

    def initialize(self, std: float) -> None:
        if self.learned:
            init.copy_(self.slope, alibi_slopes(self.heads, self.slopes == "geometric"))

    def score_terms(self, positions: Positions, prepared: Any, query: torch.Tensor, key: torch.Tensor) -> ScoreTerms:
        fixed = self.slope if self.learned else alibi_slopes(self.heads, self.slopes == "geometric", positions.dtype)
        slopes = fixed.to(positions.distances.device, positions.dtype)
        bias = -slopes[:, None] * positions.distances.abs()
        if not self.causal and self.sides == "split":
            ahead = positions.distances > 0
            backward_head = torch.arange(self.heads, device=bias.device)[:, None] % 2 == 0
            bias = bias.masked_fill(torch.where(backward_head, ahead, ~ahead & (positions.distances < 0)), -1e4)
        return ScoreTerms(bias=bias)
