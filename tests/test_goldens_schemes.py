"""Schemes against numbers that other people's implementations produced, forward and gradients, in float64.

The numbers live beside the repository and are skipped where they are absent.
"""

import importlib.util
import pathlib
from typing import Any

import pytest
import torch

from hf_relpos import RelPosDecoderConfig
from hf_relpos.position_builder import build_positions
from hf_relpos.positions import Positions
from hf_relpos.scheme_base import dense_bias
from hf_relpos.schemes import build_scheme

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "goldens"
pytestmark = pytest.mark.skipif(not GOLDENS.exists(), reason="the numbers in ../shared/goldens are absent")
EXACT = {"rtol": 1e-9, "atol": 1e-9}
Weights = dict[str, torch.Tensor]


def golden(name: str) -> Any:
    """One folder of numbers, read by the script that lies beside them."""
    spec = importlib.util.spec_from_file_location("compare", GOLDENS / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Golden(str(GOLDENS / name))


def scheme_of(name: str, parameters: dict[str, Any], head_dim: int = 8, family: Any = RelPosDecoderConfig) -> Any:
    """A scheme of four heads alone, in float64."""
    config = family(
        hidden_size=32, num_attention_heads=4, head_dim=head_dim, position_scheme=name, position_parameters=parameters
    )
    return build_scheme(config, name).double()


def positions_of(length: int, causal: bool = True) -> Positions:
    return build_positions((1, length), torch.empty(0, dtype=torch.float64), causal=causal)


def scores_of(scheme: Any, scores: torch.Tensor) -> torch.Tensor:
    """Scaled scores `(batch, heads, query, key)` after the scheme; keys are unit vectors, so that queries are scores."""
    length = scores.shape[-1]
    query, key = scores / scheme.scale(), torch.eye(length, dtype=scores.dtype).expand_as(scores)
    positions = positions_of(length)
    terms = scheme.score_terms(positions, scheme.prepare(positions), query, key)
    return scores + dense_bias(terms, positions, query, key, scheme.scale())


def assert_gradients(case: Any, name: str, loss: torch.Tensor, parameters: Weights) -> None:
    """Compare the gradients of `loss` with those under the names of the reference."""
    found = torch.autograd.grad(loss, list(parameters.values()))
    wanted = case.grads(name, fp64=True)
    for key, gradient in zip(parameters, found, strict=True):
        torch.testing.assert_close(gradient.reshape(wanted[key].shape), wanted[key], **EXACT)


KERPLE = {
    "kerple_log": ({}, {"bias": "bias"}),
    "kerple_power_ap_": ({"kernel": "power"}, {"bias": "bias"}),
    "kerple_power__ap": ({"kernel": "power", "acts_as": "weight"}, {"weight": "wei"}),
    "kerple_power_ap_ap": ({"kernel": "power", "acts_as": "both"}, {"bias": "bias", "weight": "wei"}),
}


@pytest.mark.parametrize("name", KERPLE)
def test_kerple(name: str) -> None:
    """The released code clamps a and p before each use; here their clamped values are made from what is learned."""
    case, (parameters, kinds) = golden("kerple"), KERPLE[name]
    weights, scheme = case.weights(True, name), scheme_of("kerple", parameters, head_dim=12)
    positive = {}
    for ours, theirs in kinds.items():
        for letter in "ap":
            value = weights[f"{theirs}_{letter}"].flatten().clamp(min=0.01)
            learned = value.expm1().log()
            if letter == "p" and parameters:
                value = value.clamp(max=2)
                learned = (value / 2).logit()
            parameter = scheme.get_parameter(f"{ours}_{letter}")
            parameter.data.copy_(learned)
            positive[f"{theirs}_{letter}"] = parameter
    found = scores_of(scheme, case.inputs(name, True)["scores"]).tril()
    torch.testing.assert_close(found, case.expect(name, True)["causal_scores_out"], **EXACT)
    loss = case.loss(name, {"causal_scores_out": found})
    for key, wanted in case.grads(name, True).items():
        slope = torch.autograd.grad(torch.nn.functional.softplus(positive[key]).sum(), positive[key])[0]
        if key.endswith("p") and parameters:
            slope = 2 * positive[key].sigmoid() * (1 - positive[key].sigmoid())
        gradient = torch.autograd.grad(loss, positive[key], retain_graph=True)[0] / slope
        torch.testing.assert_close(gradient, wanted.flatten(), **EXACT)


def test_kerple_original_is_alibi() -> None:
    """With slopes clamped from below, a quirk of that code."""
    case, scheme = golden("kerple"), scheme_of("alibi", {"learned": True}, head_dim=12)
    name = "kerple_power_original"
    scheme.slope.data.copy_(case.weights(True, name)["bias_a"].flatten().clamp(min=0.01))
    found = scores_of(scheme, case.inputs(name, True)["scores"]).tril()
    torch.testing.assert_close(found, case.expect(name, True)["causal_scores_out"], **EXACT)


@pytest.mark.parametrize("name", ["fire_L5", "fire_L512", "fire_dape_pe_L6"])
def test_fire(name: str) -> None:
    """Thresholds within and beyond the text; the last bias of that network, the same for all keys, is added here."""
    case = golden("fire")
    weights = case.weights(True, name)
    scheme = scheme_of("fire", {"width": 16, "threshold": weights["init_L"].item()}, head_dim=12)
    ours = {
        "c": scheme.slope,
        "L_multiplier": scheme.threshold_factor,
        "mlp.0.weight": scheme.hidden_weight,
        "mlp.0.bias": scheme.hidden_bias,
        "mlp.2.weight": scheme.output_weight,
    }
    for key, parameter in ours.items():
        parameter.data.copy_(weights[key].view_as(parameter))
    found = scores_of(scheme, case.inputs(name, True)["scores"]) + weights["mlp.2.bias"][:, None, None]
    torch.testing.assert_close(found.tril(), case.expect(name, True)["causal_scores_out"], **EXACT)
    del ours["mlp.0.bias"]
    assert_gradients(case, name, case.loss(name, {"causal_scores_out": found.tril()}), ours)
