"""Schemes that read the tokens between a key and a query: each token gives every head a number, and these add up (`running_sums.py`)."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.functional import logsigmoid
from torch.nn.functional import softplus
from transformers import initialization as init

from .scheme_base import ParameterSpec
from .scheme_base import PositionScheme


def _wide(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers `(batch, fresh, heads)` as `(batch, heads, fresh)` in at least single precision."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32)).transpose(1, 2)


class TokenGates(PositionScheme):
    """Base of the schemes here: the number of a token is a function of w . x + b, with x the layer's input.

    The weights are no `nn.Linear`, so that libraries which quantise linear layers leave them exact: they are small, and their
    errors add up.
    """

    refuses = {"bidirectional": "it adds up the tokens from a key to a query after it"}
    combines_as = "bias"
    bias_init: float = 0.0

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.gate_weight = nn.Parameter(torch.empty(self.heads, config.hidden_size))
        self.gate_bias = nn.Parameter(torch.empty(self.heads))

    def initialize(self, std: float) -> None:
        """Fill the weight as that of other projections, and the bias with `bias_init`."""
        init.normal_(self.gate_weight, std=std)
        init.constant_(self.gate_bias, self.bias_init)

    def project(self, context: torch.Tensor) -> torch.Tensor:
        """Return w . x + b of tokens `(batch, fresh, hidden_size)`: `(batch, heads, fresh)` in at least single precision."""
        weight, bias = (part.to(context.dtype) for part in (self.gate_weight, self.gate_bias))
        return _wide(linear(context, weight, bias))


class FoX(TokenGates):
    """Every token forgets what was before it: b_ij = sum of log f_t for t = j+1..i, f_t = sigmoid(w . x_t + b) (arXiv 2503.02130).

    x is the layer's input (sections 3 and 3.1). In the released code, as here, w starts as other weights do and b at zero, so that
    half is forgotten at each token at first; the gates that read no token (section 4.5) may start at given times of decay, one
    a head between the smallest and the largest on a scale of logarithms. Output gate, norms and shifts of its `Pro` block are
    no part of the position scheme.
    """

    parameter_specs = {
        "gate": ParameterSpec(
            "full", "what f reads: the token, a learned or a fixed number", choices=("full", "bias_only", "fixed")
        ),
        "decay_time_min": ParameterSpec(None, "tokens after which the first head keeps 1/e", minimum=1e-3, optional=True),
        "decay_time_max": ParameterSpec(None, "the same of the last head", minimum=1e-3, optional=True),
    }
    source = "arXiv 2503.02130, sections 3 and 4.5"
    gate: str
    decay_time_min: float | None
    decay_time_max: float | None

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        times = [parameters["decay_time_min"], parameters["decay_time_max"]]
        gate, given = parameters["gate"], [time is not None for time in times]
        wanted = {"full": ("none", [False, False]), "fixed": ("both", [True, True])}.get(gate, ("both or none", given[:1] * 2))
        if given != wanted[1]:
            raise ValueError(
                f"decay_time_min={times[0]} and decay_time_max={times[1]} do not fit gate={gate!r}, which takes {wanted[0]}"
            )

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        for name in {"full": (), "bias_only": ("gate_weight",), "fixed": ("gate_weight", "gate_bias")}[self.gate]:
            self.register_parameter(name, None)

    def _decay(self, like: torch.Tensor) -> torch.Tensor:
        """Return log f of each head at its time of decay, `(heads,)`: -1 / time."""
        times: Any = (self.decay_time_min, self.decay_time_max)
        low, high = (math.log(time) for time in times)
        dtype = torch.promote_types(like.dtype, torch.float32)
        return -torch.linspace(-low, -high, self.heads, dtype=dtype, device=like.device).exp()

    def initialize(self, std: float) -> None:
        if self.gate == "full":
            super().initialize(std)
        elif self.gate == "bias_only" and self.decay_time_min is None:
            init.zeros_(self.gate_bias)
        elif self.gate == "bias_only":
            init.copy_(self.gate_bias, -(-self._decay(self.gate_bias)).expm1().log())

    def gate_tokens(self, context: torch.Tensor) -> torch.Tensor:
        if self.gate == "full":
            return logsigmoid(self.project(context))
        outer = (*context.shape[:2], -1)
        if self.gate == "bias_only":
            return logsigmoid(_wide(self.gate_bias.expand(outer)))
        return _wide(self._decay(context).expand(outer))


class DataDependentAlibi(TokenGates):
    """The slope of ALiBi at each token is the token's: b_ij = sum of s log sigmoid(w . x_t + b) for t = j+1..i.

    As x-transformers' `DataDependentAlibi` has it, after arXiv 2503.02130: that of `fox` with b starting at 5, so that little is
    forgotten at first, and a factor s. Its form for encoders, with gates for either direction, is not here.
    """

    parameter_specs = {
        "bias_init": ParameterSpec(5.0, "b where learning starts", minimum=-1e4, maximum=1e4),
        "post_log_scale": ParameterSpec(1.0, "factor s", minimum=0.0, maximum=1e6),
    }
    source = "x-transformers, after arXiv 2503.02130, section 3"
    bias_init: float
    post_log_scale: float

    def gate_tokens(self, context: torch.Tensor) -> torch.Tensor:
        return self.post_log_scale * logsigmoid(self.project(context))


class Cable(TokenGates):
    """Context-aware biases: b_ij = sum of -softplus(w . x_t + b) for t = j+1..i (arXiv 2503.08067, section 3).

    The paper divides the products of queries and keys by the root of the head size, as here; the released code does not
    (`scale_scores`). Its form for encoders is not here.
    """

    parameter_specs = {
        "scale_scores": ParameterSpec(True, "divide scores by the root of the head size", choices=(False, True)),
    }
    source = "arXiv 2503.08067, section 3"
    scale_scores: bool

    def scale(self) -> float:
        return super().scale() if self.scale_scores else 1.0

    def gate_tokens(self, context: torch.Tensor) -> torch.Tensor:
        return -softplus(self.project(context))
