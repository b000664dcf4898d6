"""Loads the weights of other models into this package's and compares what both compute."""

import re
from typing import Any

import torch
from matrix import ids_of

Weights = dict[str, torch.Tensor]
SIZES = {"vocab_size": 37, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
"""For models of transformers with a part that computes in float32 whatever their dtype."""


@torch.no_grad()
def randomised(model: Any) -> Any:
    """Weights that are neither zero nor one nor small."""
    for weight in model.parameters():
        weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.5))
    return model.double().eval()


def renamed(weights: Weights, *rules: tuple[str, str]) -> Weights:
    """The weights under this package's names: for each, the first rule whose pattern fits whole."""
    found = {}
    for name, weight in weights.items():
        new = next((re.sub(old, new, name) for old, new in rules if re.fullmatch(old, name)), None)
        assert new is not None, f"no rule for {name}"
        if new:
            found[new] = weight
    return found


def split_fused(weights: Weights, name: str, heads: int, by_head: bool) -> Weights:
    """Replace a fused projection by `q`, `k` and `v`; `by_head`: each head's three parts stand together."""
    found = {}
    for key, weight in weights.items():
        if f".{name}." not in key:
            found[key] = weight
            continue
        parts = weight.unflatten(0, (heads, 3, -1)).unbind(1) if by_head else weight.unflatten(0, (3, heads, -1)).unbind(0)
        for letter, part in zip("qkv", parts, strict=True):
            found[key.replace(name, f"{letter}_proj")] = part.flatten(0, 1)
    return found


def assert_same(
    ours: Any, theirs: Any, weights: Weights, tolerance: dict[str, float], output: str = "logits", **inputs: Any
) -> None:
    """Load `weights` strictly, and compare the output and the gradient that reaches the token embeddings."""
    ours = ours.double().eval()
    ours.load_state_dict(weights)
    found, wanted = (getattr(model(ids_of(), **inputs), output) for model in (ours, theirs))
    valid = inputs.get("attention_mask", torch.ones(found.shape[:2])).bool()
    torch.testing.assert_close(found[valid], wanted[valid], **tolerance)
    direction = torch.randn_like(found) * valid[..., None]
    gradients = [
        torch.autograd.grad((states * direction).sum(), model.get_input_embeddings().weight)[0]
        for states, model in ((found, ours), (wanted, theirs))
    ]
    torch.testing.assert_close(*gradients, rtol=tolerance["rtol"], atol=tolerance["atol"] * gradients[1].abs().max())


def left_padding() -> torch.Tensor:
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    return mask
