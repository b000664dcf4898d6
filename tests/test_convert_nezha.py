"""Nezha, which transformers removed, converted, against the formulas of its code written out."""

import math
from typing import Any

import pytest
import torch
from matrix import ids_of
from originals import converted
from parity import left_padding

from hf_relpos.conversion.api import convert_checkpoint

Weights = dict[str, torch.Tensor]
HEADS, SIZE, REACH = 2, 6, 3
WIDTH = HEADS * SIZE
CONFIG = {
    "model_type": "nezha", "architectures": ["NezhaForMaskedLM"], "vocab_size": 37, "hidden_size": WIDTH,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 20, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 512,
    "max_relative_position": REACH, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "classifier_dropout": 0.1, "is_decoder": False, "use_cache": True, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
LAYER = {
    "attention.self.query": (WIDTH, WIDTH), "attention.self.key": (WIDTH, WIDTH), "attention.self.value": (WIDTH, WIDTH),
    "attention.output.dense": (WIDTH, WIDTH), "attention.output.LayerNorm": (WIDTH,), "intermediate.dense": (20, WIDTH),
    "output.dense": (WIDTH, 20), "output.LayerNorm": (WIDTH,),
}  # fmt: skip


def checkpoint() -> Weights:
    """Random weights by the names of the masked language model, with the buffers of older versions."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * 0.5

    weights = {"nezha.embeddings.word_embeddings.weight": random(37, WIDTH)}
    weights["nezha.embeddings.token_type_embeddings.weight"] = random(2, WIDTH)
    parts = {f"nezha.encoder.layer.{index}.{name}": shape for index in range(2) for name, shape in LAYER.items()}
    parts |= {"nezha.embeddings.LayerNorm": (WIDTH,), "nezha.pooler.dense": (WIDTH, WIDTH)}
    parts |= {"cls.predictions.transform.dense": (WIDTH, WIDTH), "cls.predictions.transform.LayerNorm": (WIDTH,)}
    for name, shape in parts.items():
        weights |= {f"{name}.weight": random(*shape), f"{name}.bias": random(shape[0])}
    for index in range(2):
        buffer = f"nezha.encoder.layer.{index}.attention.self.relative_positions_encoding.positions_encoding"
        weights[buffer] = torch.zeros(8, 8, SIZE)
    weights["cls.predictions.bias"] = random(37)
    return weights


def vector(query: int, key: int) -> list[float]:
    """The row of the fixed table for key minus query: a sine and a cosine in turn, of the row, 0 to 2 max."""
    row = max(-REACH, min(REACH, key - query)) + REACH
    angles = [row / 10000 ** (2 * (channel // 2) / SIZE) for channel in range(SIZE)]
    return [math.cos(angle) if channel % 2 else math.sin(angle) for channel, angle in enumerate(angles)]


def normed(weights: Weights, name: str, states: torch.Tensor) -> torch.Tensor:
    centred = states - states.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(weights: Weights, name: str, states: torch.Tensor) -> torch.Tensor:
    return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def gelu(states: torch.Tensor) -> torch.Tensor:
    return states * 0.5 * (1 + torch.erf(states / math.sqrt(2)))


def reference(weights: Weights, ids: torch.Tensor, types: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The logits of one text, `(sequence, vocab_size)`; keys where `valid` is 0 are hidden."""
    table = torch.tensor([[vector(i, j) for j in range(len(ids))] for i in range(len(ids))], dtype=torch.float64)
    embeddings = "nezha.embeddings."
    hidden = weights[f"{embeddings}word_embeddings.weight"][ids] + weights[f"{embeddings}token_type_embeddings.weight"][types]
    hidden = normed(weights, f"{embeddings}LayerNorm", hidden)
    for index in range(2):
        own = f"nezha.encoder.layer.{index}."
        q, k, v = (
            linear(weights, f"{own}attention.self.{name}", hidden).unflatten(-1, (HEADS, SIZE))
            for name in ("query", "key", "value")
        )
        keys, values = k[None] + table[:, :, None], v[None] + table[:, :, None]  # (query, key, heads, size)
        scores = (q[:, None] * keys).sum(-1) / math.sqrt(SIZE)
        shares = scores.masked_fill(valid[None, :, None] == 0, -math.inf).softmax(1)
        mixed = (shares[..., None] * values).sum(1).flatten(-2)
        added = linear(weights, f"{own}attention.output.dense", mixed)
        hidden = normed(weights, f"{own}attention.output.LayerNorm", hidden + added)
        inner = gelu(linear(weights, f"{own}intermediate.dense", hidden))
        hidden = normed(weights, f"{own}output.LayerNorm", hidden + linear(weights, f"{own}output.dense", inner))
    head = "cls.predictions.transform."
    last = normed(weights, f"{head}LayerNorm", gelu(linear(weights, f"{head}dense", hidden)))
    return last @ weights[f"{embeddings}word_embeddings.weight"].T + weights["cls.predictions.bias"]


@torch.no_grad()
def test_nezha() -> None:
    """Logits with padding and token types; each weight is used, or left out with the reason."""
    weights = checkpoint()
    model, report = converted("nezha", CONFIG, weights)
    assert report.model == "RelPosEncoderForMaskedLM" and not report.missing
    assert {name.split(".")[-1] for name in report.unused} == {"positions_encoding", "weight", "bias"}
    assert {reason for reason in report.unused.values()} == {
        "follows from the configuration",
        "classifiers here read the hidden states without a pooler",
    }
    ids, mask = ids_of(), left_padding()
    types = (ids % 2).long()
    found = model(ids, attention_mask=mask, token_type_ids=types).logits
    for row in range(len(ids)):
        wanted = reference(weights, ids[row], types[row], mask[row])
        torch.testing.assert_close(found[row][mask[row] == 1], wanted[mask[row] == 1], rtol=1e-11, atol=1e-11)


def test_nezha_refuses_a_decoder() -> None:
    with pytest.raises(ValueError, match="nezha: is_decoder=True cannot be converted: only the encoder is"):
        convert_checkpoint("nezha", {**CONFIG, "is_decoder": True}, {})


def test_nezha_names_what_its_configuration_lacks() -> None:
    lacking: dict[str, Any] = {name: value for name, value in CONFIG.items() if name != "max_relative_position"}
    with pytest.raises(ValueError, match="nezha: the configuration has no max_relative_position"):
        convert_checkpoint("nezha", lacking, {})
