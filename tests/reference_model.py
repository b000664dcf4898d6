"""A whole model in a few lines of plain loops: any scheme of the matrix, one a layer, with the weights of a model."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from references import Layer

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SchemeUse:
    """The scheme of one layer: its row of the matrix, its complete parameters, and the index of its weights."""

    row: Any
    parameters: dict[str, Any]
    owner: str


def parts_of(weights: Weights, prefix: str) -> Weights:
    """The weights below a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def who_sees_whom(batch: int, length: int, rule: Callable[[int, int, int], bool]) -> torch.Tensor:
    """`(batch, query, key)` from a rule about a row, a query and a key; a token always sees itself."""
    sees = [[[i == j or rule(b, i, j) for j in range(length)] for i in range(length)] for b in range(batch)]
    return torch.tensor(sees)


def attention(layer: Layer, v: torch.Tensor, row: Any) -> torch.Tensor:
    """Softmax over the visible keys of every query, pair by pair: `(batch, heads, query, head_dim)`."""
    batch, _, length, _ = layer.q.shape
    result = []
    for b in range(batch):
        for i in range(length):
            keys = [j for j in range(length) if layer.sees[b, i, j]]
            scores = torch.stack([row.score(layer, b, i, j) for j in keys], -1)
            added = [row.value(layer, b, i, j) if row.value else None for j in keys]
            values = torch.stack([v[b, :, j] if a is None else v[b, :, j] + a for j, a in zip(keys, added, strict=True)], 1)
            result.append((torch.softmax(scores, -1)[..., None] * values).sum(1))
    return torch.stack(result).unflatten(0, (batch, length)).transpose(1, 2)


def normalise(states: torch.Tensor, weights: Weights, eps: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(states, states.shape[-1:], weights["weight"], weights["bias"], eps)


def feed_forward(states: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Two linear layers with the exact GELU between them."""
    inner = states @ weights["up_proj.weight"].T
    return (inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))) @ weights["down_proj.weight"].T


def reference_model(
    weights: Weights, config: Any, uses: list[SchemeUse], ids: torch.Tensor, sees: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Last hidden states `(batch, length, hidden_size)` of a model without a head.

    Args:
        weights: the model's own, by the names of its `state_dict`.
        config: its configuration, of which only sizes and the order of normalisation are read.
        uses: the scheme of each layer.
        ids: `(batch, length)`.
        sees: `(batch, query, key)`.
        position: `(batch, length)`.
    """
    heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    hidden = weights["embed_tokens.weight"][ids]
    if config.scale_embedding:
        hidden = hidden * math.sqrt(config.hidden_size)
    if uses[0].row.embed is not None:
        hidden = hidden + uses[0].row.embed(
            parts_of(weights, f"position_schemes.{uses[0].owner}."), position, config.hidden_size
        ).to(hidden.dtype)
    for index, use in enumerate(uses):
        own, eps = parts_of(weights, f"layers.{index}."), config.layer_norm_eps
        first, second = parts_of(own, "attention_norm."), parts_of(own, "mlp_norm.")
        pre = config.norm_position == "pre"
        entering = normalise(hidden, first, eps) if pre else hidden
        q, k, v = (
            (entering @ own[f"attention.{name}_proj.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        k, v = (torch.stack([part[:, head // groups] for head in range(heads)], 1) for part in (k, v))
        scheme = parts_of(weights, f"position_schemes.{use.owner}.")
        known = scheme | parts_of(own, "attention.")
        layer = Layer(index, q, k, position, sees, config.causal, known, use.parameters, entering)
        mixed = attention(layer, v, use.row).transpose(1, 2).flatten(2) @ own["attention.o_proj.weight"].T
        hidden = hidden + mixed
        if not pre:
            hidden = normalise(hidden, first, eps)
        hidden = hidden + feed_forward(normalise(hidden, second, eps) if pre else hidden, parts_of(own, "mlp."))
        if not pre:
            hidden = normalise(hidden, second, eps)
    return normalise(hidden, parts_of(weights, "norm."), config.layer_norm_eps) if config.norm_position == "pre" else hidden
