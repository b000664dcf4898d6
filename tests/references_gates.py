"""What the papers of schemes say that add up a number per token from a key to a query: a part of `references.py`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from references import Layer
from references import content


def between(layer: Layer, b: int, i: int, j: int, gate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Sum of a number per token over the tokens after the key up to the query, padding left out, `(heads,)`."""
    entering: Any = layer.entering
    tokens = [t for t in range(j + 1, i + 1) if layer.sees[b, i, t]]
    return sum((gate(entering[b, t]) for t in tokens), torch.zeros_like(layer.q[b, :, i, 0]))


def projected(layer: Layer, entering: torch.Tensor) -> torch.Tensor:
    return layer.weights["gate_weight"] @ entering + layer.weights["gate_bias"]


def fox(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Equation 5 of arXiv 2503.02130: the logarithm of the product of forget gates, sigmoids, between key and query."""

    def log_gate(entering: torch.Tensor) -> torch.Tensor:
        if layer.parameters["gate"] == "full":
            return -torch.log(1 + torch.exp(-projected(layer, entering)))
        if layer.parameters["gate"] == "bias_only":
            return -torch.log(1 + torch.exp(-layer.weights["gate_bias"]))
        first, last = (math.log(layer.parameters[f"decay_time_{end}"]) for end in ("min", "max"))
        steps = [first + (last - first) * head / (layer.heads - 1) for head in range(layer.heads)]
        return layer.like([-math.exp(-step) for step in steps])

    return content(layer, b, i, j) + between(layer, b, i, j, log_gate)


def data_dependent_alibi(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """x-transformers' `DataDependentAlibi`: forget gates times a factor."""
    factor = layer.parameters["post_log_scale"]
    return content(layer, b, i, j) - between(
        layer, b, i, j, lambda entering: factor * torch.log(1 + torch.exp(-projected(layer, entering)))
    )


def cable(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 3 of arXiv 2503.08067: b_i - b_j with running sums of -softplus."""
    scale = 1 / math.sqrt(layer.head_dim) if layer.parameters["scale_scores"] else 1.0
    return layer.product(b, i, j) * scale - between(
        layer, b, i, j, lambda entering: torch.log(1 + torch.exp(projected(layer, entering)))
    )
