"""Schemes against numbers that other people's implementations produced, forward and gradients, in float64."""

from typing import Any

import pytest
import torch
from goldens import assert_gradients, assert_outputs, golden

from hf_relpos import RelPosDecoderConfig
from hf_relpos.position_builder import build_positions
from hf_relpos.scheme_base import dense_bias
from hf_relpos.schemes import build_scheme

Weights = dict[str, torch.Tensor]


def scheme_of(name: str, parameters: dict[str, Any], head_dim: int = 8) -> Any:
    """A decoder's scheme of four heads alone."""
    config = RelPosDecoderConfig(
        hidden_size=32, num_attention_heads=4, head_dim=head_dim, position_scheme=name, position_parameters=parameters
    )
    return build_scheme(config, name)


def scores_of(scheme: Any, weights: Weights, scores: torch.Tensor) -> torch.Tensor:
    """Causal scores `(batch, heads, query, key)` after the scheme; keys are unit vectors, so queries are scores."""
    positions = build_positions((1, scores.shape[-1]), scores, causal=True)
    query, key = scores / scheme.scale(), torch.eye(scores.shape[-1], dtype=scores.dtype).expand_as(scores)
    with torch.nn.utils.stateless._reparametrize_module(scheme, weights):
        terms = scheme.score_terms(positions, scheme.prepare(positions), query, key)
    return (scores + dense_bias(terms, positions, query, key, scheme.scale())).tril()


KERPLE = {
    "kerple_log": ({}, {"bias": "bias"}),
    "kerple_power_ap_": ({"kernel": "power"}, {"bias": "bias"}),
    "kerple_power__ap": ({"kernel": "power", "acts_as": "weight"}, {"weight": "wei"}),
    "kerple_power_ap_ap": ({"kernel": "power", "acts_as": "both"}, {"bias": "bias", "weight": "wei"}),
}


@pytest.mark.parametrize("case", KERPLE)
def test_kerple(case: str) -> None:
    """The released code clamps a and p before each use: here what is learned is made from their clamped values."""
    reader, (parameters, kinds) = golden("kerple"), KERPLE[case]
    furthest = {"p": 2.0 if parameters else None, "a": None}
    weights = {
        name: weight.clamp(0.01, furthest[name[-1]]).requires_grad_()
        for name, weight in reader.weights(fp64=True, case=case).items()
    }
    mapped = {}
    for ours, theirs in kinds.items():
        a, p = (weights[f"{theirs}_{letter}"].flatten() for letter in "ap")
        mapped[f"{ours}_a"], mapped[f"{ours}_p"] = a.expm1().log(), (p / 2).logit() if parameters else p.expm1().log()
    scores = reader.inputs(case, fp64=True)["scores"]
    outputs = {"causal_scores_out": scores_of(scheme_of("kerple", parameters, 12), mapped, scores)}
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)


def test_kerple_original_is_alibi() -> None:
    """With slopes clamped from below, a quirk of that code."""
    reader, case = golden("kerple"), "kerple_power_original"
    slopes = reader.weights(fp64=True, case=case)["bias_a"].flatten().clamp(min=0.01)
    scores = reader.inputs(case, fp64=True)["scores"]
    found = scores_of(scheme_of("alibi", {"learned": True}, 12), {"slope": slopes}, scores)
    assert_outputs(reader, case, {"causal_scores_out": found})


@pytest.mark.parametrize("case", ["fire_L5", "fire_L512", "fire_dape_pe_L6"])
def test_fire(case: str) -> None:
    """Thresholds within and beyond the text; the last bias of that network, the same for all keys, is added here."""
    reader = golden("fire")
    weights = {name: weight.requires_grad_() for name, weight in reader.weights(fp64=True, case=case).items()}
    names = {"c": "slope", "L_multiplier": "threshold_factor", "mlp.0.weight": "hidden_weight"}
    names |= {"mlp.0.bias": "hidden_bias", "mlp.2.weight": "output_weight"}
    mapped = {new: weights[old].flatten() for old, new in names.items()}
    mapped["output_weight"] = weights["mlp.2.weight"]
    scheme = scheme_of("fire", {"width": 16, "threshold": weights["init_L"].item()}, 12)
    found = scores_of(scheme, mapped, reader.inputs(case, fp64=True)["scores"])
    outputs = {"causal_scores_out": (found + weights["mlp.2.bias"][:, None, None]).tril()}
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)
