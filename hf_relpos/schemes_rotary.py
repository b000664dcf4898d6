"""Schemes that rotate queries and keys before they meet."""

from typing import Any

import torch

from .positions import Positions
from .scheme_base import Parameter
from .scheme_base import PositionScheme
from .scheme_base import frequencies

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotate(states: torch.Tensor, rotation: Rotation, interleaved: bool) -> torch.Tensor:
    """Rotate the first channels of `(batch, heads, length, head_dim)` by angles given as cos and sin `(batch|1, length, pairs)`.

    Pairs are (2t, 2t+1) when interleaved (RoFormer, GPT-J), else (t, t + half) (GPT-NeoX, Llama); channels beyond are left alone.
    """
    cos, sin = (part[:, None].to(states.dtype) for part in rotation)
    turned, rest = states.split([2 * cos.shape[-1], states.shape[-1] - 2 * cos.shape[-1]], -1)
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = torch.stack([first * cos - second * sin, second * cos + first * sin], -1 if interleaved else -2)
    return torch.cat([pair.flatten(-2), rest], -1)


class RoPE(PositionScheme):
    """Rotate query and key by their position times theta^(-2t/d): products depend on the distance (arXiv 2104.09864, eq. 14-16)."""

    parameter_specs = {
        "rope_theta": Parameter(10000.0, "base of the wavelengths", minimum=1.0),
        "partial_rotary_factor": Parameter(1.0, "fraction of the channels that turn", minimum=0.0, maximum=1.0),
        "interleaved": Parameter(False, "pair neighbouring channels instead of halves", choices=(False, True)),
    }
    source = "arXiv 2104.09864, section 3.2"
    rope_theta: float
    partial_rotary_factor: float
    interleaved: bool

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        if int(config.head_dim * parameters["partial_rotary_factor"] / 2) < 1:
            raise ValueError(
                f"RoPE parameter partial_rotary_factor={parameters['partial_rotary_factor']} turns no pair of channels of "
                f"head_dim={config.head_dim}: at least {2 / config.head_dim:g} is needed"
            )

    def prepare(self, positions: Positions) -> tuple[Rotation, Rotation]:
        turned = 2 * int(self.head_dim * self.partial_rotary_factor / 2)
        turns = frequencies(turned, self.rope_theta, positions.query.device, positions.dtype)
        angles = (place[..., None].to(positions.dtype) * turns for place in (positions.query, positions.fresh_key))
        query, key = ((angle.cos(), angle.sin()) for angle in angles)  # (batch|1, length, pairs)
        return query, key

    def encode_query(self, query: torch.Tensor, prepared: tuple[Rotation, Rotation]) -> torch.Tensor:
        return rotate(query, prepared[0], self.interleaved)

    def encode_key(self, key: torch.Tensor, prepared: tuple[Rotation, Rotation]) -> torch.Tensor:
        return rotate(key, prepared[1], self.interleaved)
