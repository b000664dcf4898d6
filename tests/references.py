"""What each scheme's paper says about one query and one key, written for reading and not for speed.

Nothing here comes from the package. The reference of a scheme is a function of a `Layer` and the indices of a row of
the batch, a query and a key; it returns the score of all heads, scaled, as it enters the softmax. `reference_model.py`
loops over them. Numbers that come from positions are computed in float64 and cast to the precision of the queries, so
that the same functions also serve as the independent reference in half precision.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch


@dataclass
class Layer:
    """One attention layer.

    Attributes:
        index: its number.
        q, k: `(batch, heads, length, head_dim)` projected and nothing more.
        position: `(batch, length)` position number of each token.
        sees: `(batch, query, key)` whether the query attends to the key.
        causal: whether the model is a decoder.
        weights: the scheme's weights and the layer's projections by name.
        parameters: the scheme's own parameters, complete; of a combination by the name of each part.
        entering: `(batch, length, hidden_size)` what the queries and keys are projected from.
        turned: the product of a query and a key that a rotary scheme has turned, beside a scheme that adds to the score.
    """

    index: int
    q: torch.Tensor
    k: torch.Tensor
    position: torch.Tensor
    sees: torch.Tensor
    causal: bool
    weights: dict[str, torch.Tensor]
    parameters: dict[str, Any]
    entering: torch.Tensor | None = None
    turned: "Callable[[int, int, int], torch.Tensor] | None" = None

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def distance(self, b: int, i: int, j: int) -> int:
        """Key minus query."""
        return int(self.position[b, j] - self.position[b, i])

    def product(self, b: int, i: int, j: int) -> torch.Tensor:
        """q_i . k_j, `(heads,)`."""
        return dot(self.q[b, :, i], self.k[b, :, j]) if self.turned is None else self.turned(b, i, j)

    def like(self, numbers: list[float] | torch.Tensor) -> torch.Tensor:
        """Exact numbers in the precision of the model."""
        return torch.as_tensor(numbers, dtype=torch.float64).to(self.q.dtype)


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product of each head's two vectors, `(heads,)`."""
    return (a * b).sum(-1)


def content(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """q_i . k_j / sqrt(d): attention without positions."""
    return layer.product(b, i, j) / math.sqrt(layer.head_dim)


def clipped(layer: Layer, b: int, i: int, j: int) -> int:
    """Row of a table over distances -k..k (a decoder's ends at 0) for clip(j - i, -k, k)."""
    reach = layer.parameters["max_distance"]
    return max(-reach, min(0 if layer.causal else reach, layer.distance(b, i, j))) + reach


def fixed_vector(layer: Layer, row: int) -> torch.Tensor:
    """Nezha's fixed table, sines at even and cosines at odd channels: of the clipped distance (arXiv 1909.00204, section 2.2), or
    of the row itself, 0 to 2k, in which its released code numbers them (huawei-noah/Pretrained-Language-Model)."""
    number = row if layer.parameters["table"] == "sinusoidal_rows" else row - layer.parameters["max_distance"]
    angles = [number / 10000 ** (2 * (c // 2) / layer.head_dim) for c in range(layer.head_dim)]
    return layer.like([math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(angles)])


def shaw_vector(layer: Layer, name: str, b: int, i: int, j: int) -> torch.Tensor:
    row = clipped(layer, b, i, j)
    if layer.parameters["outside"] == "zero" and abs(layer.distance(b, i, j)) > layer.parameters["max_distance"]:
        return torch.zeros_like(layer.q[b, 0, i])
    return layer.weights[name][row] if layer.parameters["table"] == "learned" else fixed_vector(layer, row)


def shaw(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Equation 4 of arXiv 1803.02155: q_i . (k_j + a^K_ij) / sqrt(d); BERT's second kind adds k_j . a^K_ij."""
    q, k, vector = layer.q[b, :, i], layer.k[b, :, j], shaw_vector(layer, "key_table", b, i, j)
    score = dot(q, k + vector) + (dot(k, vector) if layer.parameters["meets"] == "both" else 0)
    return score / math.sqrt(layer.head_dim)


def shaw_value(layer: Layer, b: int, i: int, j: int) -> torch.Tensor | None:
    """Equation 3 of arXiv 1803.02155: a^V_ij, which is added to v_j."""
    names = {True: "value_table", "shared": "key_table"}
    values = layer.parameters["values"]
    return shaw_vector(layer, names[values], b, i, j) if values else None


def transformer_xl(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 3.3 of arXiv 1901.02860: the four terms (a) to (d), all divided by sqrt(d); or `attn_type` 1 of the released code, whose
    r_emb and r_bias begin with the furthest distance, which repeats."""
    if layer.parameters.get("max_distance"):
        w, row, q, k = layer.weights, clipped(layer, b, i, j), layer.q[b, :, i], layer.k[b, :, j]
        attended, placed = dot(q + w["key_offset"], k), dot(q, w["distance_table"][:, row]) + w["distance_bias"][:, row]
        return (attended + placed) / math.sqrt(layer.head_dim)
    back, clamp = -layer.distance(b, i, j), layer.parameters["clamp_len"]
    if clamp is not None:
        back = max(-clamp, min(clamp, back))
    size = layer.weights["distance_projection.weight"].shape[1]
    angles = [back / 10000 ** (2 * t / size) for t in range(size // 2)]
    sinusoids = layer.like([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    projected = (layer.weights["distance_projection.weight"] @ sinusoids).view(layer.heads, layer.head_dim)
    q, k = layer.q[b, :, i], layer.k[b, :, j]
    u, v = layer.weights["key_offset"], layer.weights["distance_offset"]
    return (dot(q, k) + dot(q, projected) + dot(u, k) + dot(v, projected)) / math.sqrt(layer.head_dim)


def music(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 3.4 of arXiv 1809.04281: (q_i . k_j + q_i . E_r) / sqrt(d); the last row of E is distance 0."""
    q, table = layer.q[b, :, i], layer.weights["table"]
    row = layer.parameters["max_distance"] - 1 + layer.distance(b, i, j)
    beyond = not 0 <= row < layer.parameters["max_distance"]
    relative = torch.zeros_like(q) if beyond else table[:, row]
    return (dot(q, layer.k[b, :, j]) + dot(q, relative)) / math.sqrt(layer.head_dim)


def rope(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Equation 12 of arXiv 2104.09864: Re(q_m conj(k_n) exp(i (m - n) theta)), channel pairs as complex numbers."""
    return rope_product(layer, b, i, j) / math.sqrt(layer.head_dim)


def rope_product(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """RoPE's score before it is scaled."""
    p, q, k = layer.parameters, layer.q[b, :, i], layer.k[b, :, j]
    pairs = int(layer.head_dim * p["partial_rotary_factor"] / 2)
    total = dot(q[:, 2 * pairs :], k[:, 2 * pairs :])
    for t in range(pairs):
        x, y = (2 * t, 2 * t + 1) if p["interleaved"] else (t, t + pairs)
        angle = -layer.distance(b, i, j) * p["rope_theta"] ** (-2 * t / (2 * pairs))
        real = q[:, x] * k[:, x] + q[:, y] * k[:, y]
        imaginary = q[:, y] * k[:, x] - q[:, x] * k[:, y]
        total = total + real * math.cos(angle) - imaginary * math.sin(angle)
    return total


def xpos(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Algorithm 1 of arXiv 2212.10554: pair t of RoPE's product times zeta_t^((i - j) / base)."""
    return xpos_product(layer, b, i, j) / math.sqrt(layer.head_dim)


def xpos_product(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """xPos' score before it is scaled."""
    p, q, k = layer.parameters, layer.q[b, :, i], layer.k[b, :, j]
    pairs = int(layer.head_dim * p["partial_rotary_factor"] / 2)
    total = dot(q[:, 2 * pairs :], k[:, 2 * pairs :])
    for t in range(pairs):
        x, y = (2 * t, 2 * t + 1) if p["interleaved"] else (t, t + pairs)
        back = -layer.distance(b, i, j)
        angle = back * p["rope_theta"] ** (-t / pairs)
        decay = ((t / pairs + p["gamma"]) / (1 + p["gamma"])) ** (back / p["scale_base"])
        real = q[:, x] * k[:, x] + q[:, y] * k[:, y]
        imaginary = q[:, y] * k[:, x] - q[:, x] * k[:, y]
        total = total + (real * math.cos(angle) - imaginary * math.sin(angle)) * decay
    return total


def pope(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 3 of arXiv 2509.10534: magnitudes of contents and a cosine of the distance, channel by channel."""
    return pope_product(layer, b, i, j) / math.sqrt(layer.head_dim)


def pope_product(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """PoPE's score before it is scaled."""
    nothing = torch.zeros_like(layer.q[b, :, i])
    magnitude = torch.logaddexp(layer.q[b, :, i], nothing) * torch.logaddexp(layer.k[b, :, j], nothing)
    total = torch.zeros_like(magnitude[:, 0])
    for c in range(layer.head_dim):
        angle = layer.distance(b, i, j) * layer.parameters["rope_theta"] ** (-c / layer.head_dim)
        if layer.parameters["learned_bias"]:
            phase = layer.weights["phase"][:, c].clamp(-2 * math.pi, 0.0)
            angle = angle + phase.repeat_interleave(layer.heads // len(phase))
        total = total + magnitude[:, c] * torch.cos(torch.as_tensor(angle, dtype=total.dtype))
    return total


def together(rotary: Callable[..., torch.Tensor], added: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The score of two schemes in one layer: that of the one which adds, on the product that the rotary one makes."""

    def score(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
        first, second = layer.parameters.values()
        weights = {name.removeprefix("added."): weight for name, weight in layer.weights.items()}
        turning = replace(layer, parameters=first)
        turned = replace(layer, parameters=second, weights=weights, turned=lambda b, i, j: rotary(turning, b, i, j))
        return added(turned, b, i, j)

    return score


def cope(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Section 4 of arXiv 2405.18719: gates that open from j to i are counted, and e between two positions is mixed."""
    q, table = layer.q[b, :, i], layer.weights["table"]
    gates = [1 / (1 + (-content(layer, b, i, t)).exp()) for t in range(j, i + 1) if layer.sees[b, i, t]]
    place = sum(gates).clamp(max=layer.parameters["positions"] - 1)
    low, high = place.floor().long(), place.ceil().long()
    share = (place - place.floor())[:, None]
    added = dot(q, share * table[high] + (1 - share) * table[low])
    return content(layer, b, i, j) + (added / math.sqrt(layer.head_dim) if layer.parameters["divide"] else added)


def deberta_bucket(distance: int, half: int, furthest: int) -> int:
    """Distances up to half of the buckets stand for themselves, the others share buckets of growing width."""
    if abs(distance) <= half:
        return distance
    ratio = math.log(abs(distance) / half) / math.log((furthest - 1) / half) * (half - 1)
    return int(math.copysign(half + math.ceil(ratio - 1e-9), distance))


def deberta_vectors(layer: Layer, letter: str, distance: int) -> torch.Tensor:
    """The key or query of a distance (query minus key), `(heads, head_dim)`."""
    p, w = layer.parameters, layer.weights
    half = p["num_buckets"]
    span = half or p["max_distance"]
    bucket = deberta_bucket(distance, half // 2, p["max_distance"]) if half else distance
    row = w["table"][max(0, min(2 * span - 1, bucket + span))]
    if p["normalise"]:
        row = torch.nn.functional.layer_norm(row, row.shape, w["norm.weight"], w["norm.bias"])
    if p["projections"] == "layer":
        projected = (w[f"{letter}_proj.weight"] @ row).view(-1, layer.head_dim)
        return projected.repeat_interleave(layer.heads // len(projected), 0)
    name = f"{'key' if letter == 'k' else 'query'}_projections"
    owner = layer.index if f"{name}.{layer.index}.weight" in w else 0
    projected = w[f"{name}.{owner}.weight"] @ row
    return (projected if letter == "k" else projected + w[f"{name}.{owner}.bias"]).view(-1, layer.head_dim)


def deberta(layer: Layer, b: int, i: int, j: int) -> torch.Tensor:
    """Equation 4 of arXiv 2006.03654: content to content, to position and from position, over sqrt(d x terms)."""
    p, q, k = layer.parameters, layer.q[b, :, i], layer.k[b, :, j]
    back = -layer.distance(b, i, j)
    terms = [dot(q, k)]
    if p["terms"] != "p2c":
        terms.append(dot(q, deberta_vectors(layer, "k", back)))
    if p["terms"] != "c2p":
        terms.append(dot(k, deberta_vectors(layer, "q", back if p["p2c_index"] == "code" else -back)))
    return sum(terms) / math.sqrt(layer.head_dim * len(terms))


def sinusoidal(weights: dict[str, torch.Tensor], position: torch.Tensor, size: int) -> torch.Tensor:
    """Section 3.5 of arXiv 1706.03762, sines before cosines: added to the embeddings, `(batch, length, size)`."""
    angles = [position.double() / 10000 ** (2 * t / size) for t in range(size // 2)]
    return torch.stack([a.sin() for a in angles] + [a.cos() for a in angles], -1)


def learned_absolute(weights: dict[str, torch.Tensor], position: torch.Tensor, size: int) -> torch.Tensor:
    """One vector per position, `(batch, length, size)`."""
    return torch.stack([torch.stack([weights["position_embeddings"][int(p)] for p in row]) for row in position])
