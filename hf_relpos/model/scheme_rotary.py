"""Schemes that rotate queries and keys before they meet."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .positions import Positions
from .positions import known
from .scheme_base import ParameterSpec
from .scheme_base import PositionScheme
from .scheme_base import frequencies

Rotation = tuple[torch.Tensor, torch.Tensor]

_ROTARY = {
    "rope_theta": ParameterSpec(10000.0, "base of the wavelengths", minimum=1.0),
    "partial_rotary_factor": ParameterSpec(1.0, "fraction of the channels that turn", minimum=0.0, maximum=1.0),
}
_SCALING = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""What each kind of scaling reads, as transformers names it."""


def rotate(states: torch.Tensor, rotation: Rotation, interleaved: bool) -> torch.Tensor:
    """Turn the first channels of `(batch, heads, length, head_dim)` by angles: cos and sin `(batch|1, length, pairs)`.

    Pairs are (2t, 2t+1) when interleaved (RoFormer, GPT-J), else (t, t + half) (GPT-NeoX, Llama); other channels stay.
    """
    cos, sin = (part[:, None].to(states.dtype) for part in rotation)
    rotated, rest = states.split([2 * cos.shape[-1], states.shape[-1] - 2 * cos.shape[-1]], -1)
    first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
    pair = torch.stack([first * cos - second * sin, second * cos + first * sin], -1 if interleaved else -2)
    whole = pair.flatten(-2)
    return torch.cat([whole, rest], -1) if rest.shape[-1] else whole


class RoPE(PositionScheme):
    """Turn query and key by position times theta^(-2t/d): products depend on distances (arXiv 2104.09864, eq. 14-16).

    The parameters are transformers' `rope_parameters`, and the formulas of the scaled kinds are transformers' own.
    `dynamic` depends on the length of a pass: as in transformers, keys in a cache keep the angles they were made with.
    """

    parameter_specs = {
        **_ROTARY,
        "interleaved": ParameterSpec(False, "pair neighbouring channels instead of halves", choices=(False, True)),
        "rope_type": ParameterSpec("default", "how wavelengths are stretched", choices=("default", *_SCALING)),
        "factor": ParameterSpec(1.0, "by how much longer texts may be", minimum=1.0),
        "original_max_position_embeddings": ParameterSpec(
            None, "yarn, llama3: length trained at; max_position_embeddings by default", minimum=1, optional=True
        ),
        "attention_factor": ParameterSpec(
            None, "yarn: factor on cos and sin; from factor by default", minimum=0.0, optional=True
        ),
        "beta_fast": ParameterSpec(32.0, "yarn: pairs that turn more often are not stretched", minimum=0.0),
        "beta_slow": ParameterSpec(1.0, "yarn: pairs that turn less often are stretched wholly", minimum=0.0),
        "low_freq_factor": ParameterSpec(1.0, "llama3: pairs that turn less often are stretched wholly", minimum=0.0),
        "high_freq_factor": ParameterSpec(4.0, "llama3: pairs that turn more often are not stretched", minimum=0.0),
    }
    combines_as = "rotary"
    source = "arXiv 2104.09864, section 3.2"
    rope_theta: float
    partial_rotary_factor: float
    interleaved: bool
    rope_type: str
    factor: float

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        pairs, kind = int(config.head_dim * parameters["partial_rotary_factor"] / 2), parameters.get("rope_type")
        if pairs < (needed := 2 if kind == "dynamic" else 1):
            raise ValueError(
                f"{cls.__name__} parameter partial_rotary_factor={parameters['partial_rotary_factor']} turns {pairs} "
                f"pairs of channels of head_dim={config.head_dim}: at least {2 * needed / config.head_dim:g} is needed"
            )
        if kind == "dynamic" and getattr(config, "mem_len", 0):
            raise ValueError(
                f"RoPE parameter rope_type='dynamic' is refused for mem_len={config.mem_len}: its angles would depend "
                "on where segments are cut; use 'linear', 'yarn' or 'llama3'"
            )
        if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
            raise ValueError(
                f"RoPE parameter low_freq_factor={parameters['low_freq_factor']} is not allowed: less than "
                f"high_freq_factor={parameters['high_freq_factor']}"
            )

    @classmethod
    def reads_trained_length(cls, parameters: dict[str, Any]) -> bool:
        return parameters.get("rope_type", "default") != "default"

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.rotary_dim = 2 * int(self.head_dim * self.partial_rotary_factor / 2)
        self.scaling = None if self.rope_type == "default" else self._scaling(config.trained_length, parameters)

    def _scaling(self, trained: int, parameters: dict[str, Any]) -> PreTrainedConfig:
        """Build the configuration that transformers' formulas read: the rotated channels, as if they were all."""
        given = {name: parameters[name] for name in _SCALING[self.rope_type]}
        if "original_max_position_embeddings" in given:
            given["original_max_position_embeddings"] = given["original_max_position_embeddings"] or trained
            trained = int(self.factor * given["original_max_position_embeddings"])
        fields: dict[str, Any] = {
            "hidden_size": self.rotary_dim,
            "num_attention_heads": 1,
            "max_position_embeddings": trained,
            "rope_parameters": {"rope_type": self.rope_type, "rope_theta": self.rope_theta, **given},
        }
        return PreTrainedConfig(**fields)

    def inv_freq(self, positions: Positions) -> tuple[torch.Tensor, float]:
        """Return the angle per position of each pair of channels, `(pairs,)`, and a factor on the rotated channels."""
        device = positions.query.device
        if self.scaling is None:
            return frequencies(self.rotary_dim, self.rope_theta, device, positions.dtype), 1.0
        length = positions.in_document.max() + 1 if self.rope_type == "dynamic" else None
        inv_freq, factor = ROPE_INIT_FUNCTIONS[self.rope_type](self.scaling, device, seq_len=length)
        return inv_freq.to(positions.dtype), factor

    def prepare(self, positions: Positions) -> tuple[Any, ...]:
        inv_freq, factor = self.inv_freq(positions)
        angles = (place[..., None].to(positions.dtype) * inv_freq for place in (positions.query, positions.fresh_key))
        query, key = ((angle.cos() * factor, angle.sin() * factor) for angle in angles)  # (batch|1, length, pairs)
        return query, key

    def encode_query(self, query: torch.Tensor, prepared: tuple[Any, ...]) -> torch.Tensor:
        return rotate(query, prepared[0], self.interleaved)

    def encode_key(self, key: torch.Tensor, prepared: tuple[Any, ...]) -> torch.Tensor:
        return rotate(key, prepared[1], self.interleaved)


class XPos(RoPE):
    """RoPE whose products decay with the distance, pair t by zeta_t^((i - j) / base) (arXiv 2212.10554, algorithm 1).

    Queries are scaled by zeta^((i - c) / base) and keys by zeta^((c - j) / base); c, the middle of a pass's queries,
    cancels and keeps the numbers small. Keys are scaled behind the cache, so no position is too far to be decoded.
    """

    parameter_specs = {
        **_ROTARY,
        "interleaved": ParameterSpec(True, "pair neighbouring channels instead of halves", choices=(True, False)),
        "scale_base": ParameterSpec(512, "distance over which pair t decays by zeta_t", minimum=1),
        "gamma": ParameterSpec(0.4, "zeta_t = (2t/d + gamma) / (1 + gamma): the decay of pair t", minimum=1e-3),
    }
    refuses = {"bidirectional": "what decays with the distance in the past grows without bound in the future"}
    source = "arXiv 2212.10554, algorithm 1"
    rope_type = "default"
    scale_base: int
    gamma: float

    def prepare(self, positions: Positions) -> tuple[Any, ...]:
        first, last = positions.query.amin(-1, keepdim=True), positions.query.amax(-1, keepdim=True)
        if not positions.contiguous:  # then cached keys may be ahead of the queries; a static cache's empty slots are none
            filled = torch.arange(positions.key.shape[1], device=last.device) < positions.start + positions.query.shape[1]
            last = torch.where(filled, positions.key, last).amax(-1, keepdim=True)
        middle = (first + last).to(positions.dtype) / 2
        pair = torch.arange(0, self.rotary_dim, 2, device=middle.device, dtype=positions.dtype) / self.rotary_dim
        decay = ((pair + self.gamma) / (1 + self.gamma)).log() / self.scale_base
        query = self._every_channel(torch.exp((positions.query - middle)[..., None] * decay))
        distance = middle - torch.minimum(positions.key, last)  # keys beyond are never seen
        key = self._every_channel(torch.exp(distance[..., None] * decay))
        span = positions.query.shape[1] - 1 if positions.is_toeplitz else known((last - first).max())
        return *super().prepare(positions), query, key, span

    def scale_after_cache(self, query: torch.Tensor, key: torch.Tensor, prepared: tuple[Any, ...]) -> Rotation:
        *_, query_scale, key_scale, span = prepared
        reach = int(2 * self.scale_base * (math.log(torch.finfo(key.dtype).max) - 4) / math.log(1 / self.gamma + 1))
        if span is not None and span > reach:
            raise ValueError(
                f"{self.name} scales queries over {span} positions in one pass, beyond the range of {key.dtype}: "
                f"{reach} at most; cut the text into segments or use bfloat16 or float32"
            )
        return (query * query_scale).to(query.dtype), (key * key_scale).to(key.dtype)

    def _every_channel(self, scale: torch.Tensor) -> torch.Tensor:
        """Spread numbers per pair of rotated channels, `(batch|1, length, pairs)`, to `(batch|1, 1, length, head_dim)`."""
        every = scale.repeat_interleave(2, -1) if self.interleaved else scale.repeat(1, 1, 2)
        return torch.nn.functional.pad(every, (0, self.head_dim - self.rotary_dim), value=1.0)[:, None]


class PoPE(PositionScheme):
    """Contents set magnitudes, positions set phases (arXiv 2509.10534, section 3).

    A_ij = sum_c softplus(q_ic) softplus(k_jc) cos((i - j) theta_c - delta_c) / sqrt(d), theta_c = theta^(-c/d), with a learned
    phase delta in [-2 pi, 0] a head and channel. As products of vectors, queries and keys are twice as wide as the values.
    """

    parameter_specs = {
        "rope_theta": _ROTARY["rope_theta"],
        "learned_bias": ParameterSpec(True, "learn the phase delta", choices=(True, False)),
        "bias_init": ParameterSpec("zeros", "where delta starts: 0, or uniform in its range", choices=("zeros", "uniform")),
    }
    combines_as = "rotary"
    source = "arXiv 2509.10534, section 3"
    rope_theta: float
    learned_bias: bool
    bias_init: str

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.key_groups: int = config.num_attention_heads // config.num_key_value_heads
        self.phase = nn.Parameter(torch.empty(self.heads // self.key_groups, self.head_dim)) if self.learned_bias else None

    def initialize(self, std: float) -> None:
        if self.phase is not None and self.bias_init == "uniform":
            init.uniform_(self.phase, -2 * math.pi, 0.0)
        elif self.phase is not None:
            init.zeros_(self.phase)

    def prepare(self, positions: Positions) -> tuple[Rotation, Rotation]:
        """Return cos and sin of the angles of queries and of new keys, `(batch|1, 1, length, head_dim)` each."""
        inv_freq = frequencies(2 * self.head_dim, self.rope_theta, positions.query.device, positions.dtype)
        angles = (place[:, None, :, None].to(positions.dtype) * inv_freq for place in (positions.query, positions.fresh_key))
        query, key = ((angle.cos(), angle.sin()) for angle in angles)
        return query, key

    @staticmethod
    def _polar(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return real and imaginary parts, `(batch, heads, length, 2 * head_dim)`."""
        size = softplus(states)
        return torch.cat([size * part.to(states.dtype) for part in rotation], -1)

    def encode_query(self, query: torch.Tensor, prepared: tuple[Rotation, Rotation]) -> torch.Tensor:
        return self._polar(query, prepared[0])

    def encode_key(self, key: torch.Tensor, prepared: tuple[Rotation, Rotation]) -> torch.Tensor:
        cos, sin = prepared[1]
        if self.phase is None:
            return self._polar(key, prepared[1])
        phase = self.phase.to(cos.dtype).clamp(-2 * math.pi, 0.0)[:, None]  # (kv_heads, 1, head_dim)
        # A sum of angles is a turn of cos and sin, which costs less than cosines of every head and token.
        turn_cos, turn_sin = phase.cos(), phase.sin()
        return self._polar(key, (cos * turn_cos - sin * turn_sin, sin * turn_cos + cos * turn_sin))
