"""The cases of the plain references' goldens: every row of the test matrix with all its parameters, as small as may be."""

import zlib
from typing import Any

import numpy as np
import torch
from matrix import Case
from matrix import cases
from matrix import expected

SIZES = {"vocab_size": 13, "hidden_size": 12, "num_hidden_layers": 1, "intermediate_size": 8}
LENGTH = 9
CASES: dict[str, Case] = {parameter.id: parameter.values[0] for parameter in cases(variants=True)}

Tensors = dict[str, torch.Tensor]


def ids() -> torch.Tensor:
    """Return the tokens of all cases, `(1, LENGTH)`."""
    return torch.tensor([[(5 * place + place * place) % 10 + 3 for place in range(LENGTH)]])


def model_of(case: Case) -> Any:
    """Return the tiny model of a case in float64."""
    return case.model(**SIZES)


def reference_weights(case: Case) -> Tensors:
    """Return float32 weights for a case, that no version of torch changes; a name has the same ones in all cases."""
    found = {}
    for name, weight in model_of(case).named_parameters():
        draw = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).uniform(-1, 1, tuple(weight.shape))
        if "norm" in name and "position_schemes" not in name:
            draw = draw * 0.2 + name.endswith("weight")
        elif "embed_tokens" not in name:
            draw = draw * (0.8 if "position_schemes" in name else 1.7 * weight.shape[-1] ** -0.5)
        found[name] = torch.from_numpy(draw).to(torch.float32)
    return found


def outputs_of(weights: Tensors, states: torch.Tensor) -> Tensors:
    """Return last hidden states, and the gradient of a fixed sum of them with respect to the embeddings."""
    direction = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
    (gradient,) = torch.autograd.grad((states * direction).sum(), [weights["embed_tokens.weight"]])
    return {"states": states.detach(), "gradient": gradient}


def reference_outputs(case: Case, weights: Tensors) -> Tensors:
    """Return what the plain reference computes with the given weights."""
    given = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    return outputs_of(given, expected(model_of(case), ids(), weights=given))
