"""Schemes that add a number per head and distance to the scaled scores."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import layer_norm
from torch.nn.functional import silu
from torch.nn.functional import softplus
from transformers import initialization as init

from .devices import without_autocast
from .position_tables import Distances
from .position_tables import DistanceTables
from .positions import Positions
from .scheme_base import ParameterSpec
from .scheme_base import PositionScheme
from .scheme_base import frequencies
from .scheme_terms import ScoreTerms


class LearnedBias(PositionScheme):
    """One learned number per head and distance, distances clipped: b[h, clip(j - i, -k, k)]."""

    parameter_specs = {"max_distance": ParameterSpec(128, "distances beyond share the entry of this one", minimum=1)}
    combines_as = "bias"
    source = "the scalar form of arXiv 1803.02155; relative bias of Swin (arXiv 2103.14030, eq. 4)"
    max_distance: int

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        entries = self.max_distance + 1 if self.causal else 2 * self.max_distance + 1
        self.bias = nn.Parameter(torch.empty(self.heads, entries))

    def initialize(self, std: float) -> None:
        init.zeros_(self.bias)

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        column = distances.values.clamp(-self.max_distance, 0 if self.causal else self.max_distance) + self.max_distance
        return ScoreTerms(bias=self.bias.index_select(1, column))


def t5_bucket(distance: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Return the bucket of key minus query: exact when near, logarithmic when far (arXiv 1910.10683, section 2.1).

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
        "num_buckets": ParameterSpec(32, "number of buckets, of both directions together", minimum=4),
        "max_distance": ParameterSpec(128, "distances beyond share the last bucket", minimum=2),
        "scale_scores": ParameterSpec(
            False, "divide q.k by the root of the head size, which T5 does not", choices=(False, True)
        ),
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

    def prepare_distances(self, distances: Distances) -> torch.Tensor:
        return t5_bucket(distances.values, not self.causal, self.num_buckets, self.max_distance)

    def score_terms(self, distances: Distances, prepared: torch.Tensor) -> ScoreTerms:
        return ScoreTerms(bias=self.bias.index_select(1, prepared))


def alibi_slopes(heads: int, geometric: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the slope of each head, `(heads,)`: 2^(-8h/H) for H a power of two, else as the released code interpolates.

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
        "slopes": ParameterSpec("released", "of the released code or of the formula", choices=("released", "geometric")),
        "sides": ParameterSpec("symmetric", "encoder: both or half of the heads a side", choices=("symmetric", "split")),
        "learned": ParameterSpec(False, "slopes are where learning starts", choices=(False, True)),
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

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        fixed = self.slope if self.learned else alibi_slopes(self.heads, self.slopes == "geometric", distances.dtype)
        slopes = fixed.to(distances.device, distances.dtype)
        bias = -slopes[:, None] * distances.values.abs()
        if not self.causal and self.sides == "split":
            ahead = distances.values > 0
            backward_head = torch.arange(self.heads, device=bias.device)[:, None] % 2 == 0
            bias = bias.masked_fill(torch.where(backward_head, ahead, ~ahead & (distances.values < 0)), -1e4)
        return ScoreTerms(bias=bias)


class Kerple(PositionScheme):
    """A learned kernel of the distance r = |i - j|: -p log(1 + a r) or -a r^p (arXiv 2205.09921, section 4).

    What is learned becomes a and p by softplus, but the exponent p of the power by 2 sigmoid: they stay positive, and
    the exponent below 2, as the kernels need. The released code clamps what is learned, in place and before each use.
    As a weight, the power kernel multiplies the scores by exp(-a r^p).
    """

    parameter_specs = {
        "kernel": ParameterSpec("log", "-p log(1 + a r) or -a r^p", choices=("log", "power")),
        "acts_as": ParameterSpec("bias", "added to the scores, multiplied, or both", choices=("bias", "weight", "both")),
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

    def _kernel(self, a: torch.Tensor, p: torch.Tensor, distances: Distances) -> torch.Tensor:
        """Return the kernel, at most 0, `(heads, distances)`, from its weights, `(heads,)` each."""
        a, p = (learned.to(distances.dtype)[:, None] for learned in (a, p))
        distance = distances.values.abs().to(distances.dtype)
        if self.kernel == "log":
            return -softplus(p) * torch.log1p(softplus(a) * distance)
        return -softplus(a) * distance ** (2 * p.sigmoid())

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        bias = self._kernel(self.bias_a, self.bias_p, distances) if self.acts_as != "weight" else None
        if self.acts_as == "bias":
            return ScoreTerms(bias=bias)
        return ScoreTerms(bias=bias, dense=self._weighed, learned_by_head=(self.weight_a, self.weight_p))

    def _weighed(
        self, positions: Positions, query: torch.Tensor, key: torch.Tensor, a: torch.Tensor, p: torch.Tensor
    ) -> torch.Tensor:
        """Return the change of the scores by the kernel as a weight: q . k (exp(kernel) - 1)."""
        tables = DistanceTables(positions)
        weight = tables.spread(self._kernel(a, p, tables.distances).expm1())
        return (query * self.scale()) @ key.transpose(-1, -2) * weight.to(query.dtype)


class Sandwich(PositionScheme):
    """Product of both positions' sinusoids: H/(8h) sum_t cos((i - j) 10000^(-2t/d)) (arXiv 2212.10356, section 6).

    Its value at distance 0 is taken off, which changes no probability: near keys then stay apart in half precision.
    """

    parameter_specs = {"size": ParameterSpec(128, "size d of the sinusoids", minimum=2)}
    combines_as = "bias"
    source = "arXiv 2212.10356, section 6"
    size: int

    def prepare_distances(self, distances: Distances) -> torch.Tensor:
        angles = distances.values[:, None] * frequencies(self.size, 10000.0, distances.device, distances.dtype)
        head = torch.arange(1, self.heads + 1, device=distances.device, dtype=distances.dtype)
        return self.heads / (8 * head[:, None]) * (angles.cos() - 1).sum(-1)

    def score_terms(self, distances: Distances, prepared: torch.Tensor) -> ScoreTerms:
        return ScoreTerms(bias=prepared)


class DynamicBias(PositionScheme):
    """A small network of the distance gives each head's bias: b = W_n silu(... silu(W_0 (i - j) + b_0)).

    The network is that of x-transformers' `DynamicPositionBias`, after continuous positions in Swin V2 (arXiv 2111.09883,
    section 3.3) and CrossFormer (arXiv 2108.00154, section 3.2); it has no last bias, which all keys would share.
    """

    parameter_specs = {
        "width": ParameterSpec(None, "units of each hidden layer; hidden_size / 4 by default", minimum=1, optional=True),
        "depth": ParameterSpec(2, "number of hidden layers", minimum=1),
        "log_distance": ParameterSpec(False, "read sign(i - j) log(1 + |i - j|)", choices=(False, True)),
        "norm": ParameterSpec(False, "normalise each hidden layer before its activation", choices=(False, True)),
    }
    combines_as = "bias"
    source = "arXiv 2111.09883, section 3.3, as in x-transformers"
    width: int | None
    depth: int
    log_distance: bool
    norm: bool

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        width = max(1, config.hidden_size // 4) if self.width is None else self.width
        self.input_weight = nn.Parameter(torch.empty(width))
        self.hidden_weight = nn.Parameter(torch.empty(self.depth - 1, width, width)) if self.depth > 1 else None
        self.hidden_bias = nn.Parameter(torch.empty(self.depth, width))
        self.output_weight = nn.Parameter(torch.empty(self.heads, width))
        if self.norm:
            self.norm_weight = nn.Parameter(torch.empty(self.depth, width))
            self.norm_bias = nn.Parameter(torch.empty(self.depth, width))

    def initialize(self, std: float) -> None:
        """Draw weights and biases as `nn.Linear` does, uniform within the root of 1 / inputs."""
        width = self.input_weight.shape[0]
        init.uniform_(self.input_weight, -1.0, 1.0)
        inner = (self.hidden_weight,) if self.hidden_weight is not None else ()
        for weight in (*inner, self.hidden_bias, self.output_weight):
            init.uniform_(weight, -(width**-0.5), width**-0.5)
        if self.norm:
            init.ones_(self.norm_weight)
            init.zeros_(self.norm_bias)

    def _activate(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Add a layer's bias to `(distances, width)`, normalise where the scheme does, and apply SiLU."""
        hidden = hidden + self.hidden_bias[layer].to(hidden.dtype)
        if self.norm:
            weight, bias = (part[layer].to(hidden.dtype) for part in (self.norm_weight, self.norm_bias))
            hidden = layer_norm(hidden, hidden.shape[-1:], weight, bias)
        return silu(hidden)

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms:
        back = -distances.values.to(distances.dtype)
        if self.log_distance:
            back = back.sign() * back.abs().log1p()
        with without_autocast(back.device):  # numbers of positions stay in float32
            hidden = self._activate(back[:, None] * self.input_weight.to(back.dtype), 0)
            for layer in range(1, self.depth):
                weights: Any = self.hidden_weight
                hidden = self._activate(hidden @ weights[layer - 1].to(back.dtype).T, layer)
            return ScoreTerms(bias=self.output_weight.to(back.dtype) @ hidden.T)
