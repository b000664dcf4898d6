"""What the papers of schemes that add a number per head and distance say: a part of `references.py`."""

import math
from dataclasses import replace
from typing import Any

import torch
from references import Layer
from references import clipped
from references import content


def learned_bias(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """One number per head and clipped distance."""
    return content(layer, b, i, j) + layer.weights["bias"][:, clipped(layer, b, i, j)]


def bucket_of_distance(distance: int, buckets: int, furthest: int) -> int:
    """T5's bucket of a distance of one direction, in exact integers.

    Bucket exact + m starts where (distance / exact) ** wide >= (furthest / exact) ** m.
    """
    exact = buckets // 2
    wide = buckets - exact
    if distance < exact:
        return distance
    steps = (m for m in range(wide) if distance**wide * exact**m >= furthest**m * exact**wide)
    return exact + max(steps)


def t5(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 2.1 of arXiv 1910.10683: unscaled q_i . k_j and a number per head and bucket."""
    buckets, furthest = layer.parameters["num_buckets"], layer.parameters["max_distance"]
    distance = layer.distance(b, i, j)
    if layer.causal:
        bucket = bucket_of_distance(max(-distance, 0), buckets, furthest)
    else:
        bucket = bucket_of_distance(abs(distance), buckets // 2, furthest) + (buckets // 2 if distance > 0 else 0)
    scale = layer.head_dim**-0.5 if layer.parameters["scale_scores"] else 1.0
    return layer.product(b, i, j) * scale + layer.weights["bias"][:, bucket]


def slopes_of(heads: int, geometric: bool) -> list[float]:
    """Section 3 of arXiv 2108.12409 and, for a number of heads that is no power of two, the released code."""
    if geometric or math.log2(heads).is_integer():
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    lower = 2 ** int(math.log2(heads))
    return slopes_of(lower, False) + slopes_of(2 * lower, False)[::2][: heads - lower]


def alibi(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 3 of arXiv 2108.12409: q_i . k_j / sqrt(d) - m |i - j|.

    With split sides, even heads look back and odd heads ahead.
    """
    distance = layer.distance(b, i, j)
    if layer.parameters["learned"]:
        return content(layer, b, i, j) - layer.weights["slope"] * abs(distance)
    bias = [-slope * abs(distance) for slope in slopes_of(layer.heads, layer.parameters["slopes"] == "geometric")]
    if not layer.causal and layer.parameters["sides"] == "split":
        wrong_side = [distance > 0 if head % 2 == 0 else distance < 0 for head in range(layer.heads)]
        bias = [-math.inf if wrong else number for wrong, number in zip(wrong_side, bias, strict=True)]
    return content(layer, b, i, j) + layer.like(bias)


def kerple_kernel(layer: Layer, name: str, distance: int) -> torch.Tensor:
    """The two kernels of section 4 of arXiv 2205.09921, of positive a and p and an exponent below 2."""
    a, p = torch.log1p(layer.weights[f"{name}_a"].exp()), layer.weights[f"{name}_p"]
    if layer.parameters["kernel"] == "log":
        return -torch.log1p(p.exp()) * torch.log1p(a * abs(distance))
    return -a * (abs(distance) ** (2 / (1 + (-p).exp())) if distance else 0.0)


def kerple(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """The kernel is added, or the score is multiplied by its exponential, or both."""
    distance, acts_as = layer.distance(b, i, j), layer.parameters["acts_as"]
    score = content(layer, b, i, j)
    if acts_as != "bias":
        score = score * kerple_kernel(layer, "weight", distance).exp()
    return score if acts_as == "weight" else score + kerple_kernel(layer, "bias", distance)


def fire(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Equations 2 to 4 of arXiv 2310.04418; i of the paper is the distance to the furthest key in sight."""
    w = layer.weights
    limit = (w["threshold_factor"] * layer.parameters["threshold"]).abs()
    furthest = max(abs(layer.distance(b, i, seen)) for seen in range(layer.k.shape[2]) if layer.sees[b, i, seen])

    def psi(x: Any) -> torch.Tensor:
        return torch.log((w["slope"] * x).abs() + 1)

    share = psi(-layer.distance(b, i, j)) / (psi(furthest if furthest > limit else limit) + 1e-6)
    hidden = (share * w["hidden_weight"] + w["hidden_bias"]).clamp(min=0)
    return content(layer, b, i, j) + w["output_weight"] @ hidden


def sandwich(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 6 of arXiv 2212.10356: H / (8 h) times the product of the two positions' sinusoids, h = 1..H."""
    size, distance = layer.parameters["size"], layer.distance(b, i, j)
    product = sum(math.cos(distance * 10000 ** (-2 * t / size)) for t in range(size // 2))
    return content(layer, b, i, j) + layer.like([layer.heads / (8 * h) * product for h in range(1, layer.heads + 1)])


def dynamic_bias(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """x-transformers' network of the distance from key to query, layer by layer."""
    w, options, back = layer.weights, layer.parameters, -float(layer.distance(b, i, j))
    if options["log_distance"]:
        back = math.copysign(math.log(1 + abs(back)), back)
    hidden = w["input_weight"] * back
    for index in range(options["depth"]):
        hidden = (w["hidden_weight"][index - 1] @ hidden if index else hidden) + w["hidden_bias"][index]
        if options["norm"]:
            centred = hidden - hidden.mean()
            hidden = centred / (centred.pow(2).mean() + 1e-5).sqrt() * w["norm_weight"][index] + w["norm_bias"][index]
        hidden = hidden / (1 + (-hidden).exp())
    return content(layer, b, i, j) + w["output_weight"] @ hidden


PRIORS: dict[str, Any] = {
    "kerple": (kerple, {"kernel": "log", "acts_as": "bias"}),
    "alibi": (alibi, {"learned": False, "slopes": "released", "sides": "symmetric"}),
    "fire": (fire, {"threshold": 512.0}),
}
"""What DAPE starts from, with the parameters of their papers."""


def dape(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 3 of arXiv 2405.14722: A + B + f([A; B]), f two layers with a LeakyReLU of slope 0.01 between them."""
    w, (prior, parameters) = layer.weights, PRIORS[layer.parameters["prior"]]
    of_prior = {name.removeprefix("prior."): weight for name, weight in w.items()}
    silent = replace(layer, q=torch.zeros_like(layer.q), turned=None, weights=of_prior, parameters=parameters)
    score, bias = content(layer, b, i, j), prior(silent, b, i, j)
    hidden = w["hidden_weight"] @ torch.cat([score, bias]) + w["hidden_bias"]
    return score + bias + w["output_weight"] @ torch.maximum(hidden, 0.01 * hidden)
