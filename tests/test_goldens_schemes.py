"""Schemes against numbers that other people's implementations produced, forward and gradients, in float64."""

from dataclasses import replace
from typing import Any

import golden_reader
import pytest
import torch
from golden_reader import assert_gradients
from golden_reader import assert_outputs
from golden_reader import golden
from plain_attention import terms_of
from test_goldens import SIZES
from test_goldens import functional
from test_goldens import layer_of

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos.model import scheme_rotary
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_tables import DistanceTables
from hf_relpos.model.scheme_base import PositionScheme
from hf_relpos.model.scheme_registry import build_scheme
from hf_relpos.model.scheme_terms import ScoreTerms
from hf_relpos.model.scheme_terms import dense_bias

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
        terms = terms_of(scheme, positions)
    return (scores + dense_bias(terms, DistanceTables(positions), query, key, scheme.scale())).tril()


KERPLE = {
    "kerple_log": ({}, {"bias": "bias"}),
    "kerple_power_ap_": ({"kernel": "power"}, {"bias": "bias"}),
    "kerple_power__ap": ({"kernel": "power", "acts_as": "weight"}, {"weight": "wei"}),
    "kerple_power_ap_ap": ({"kernel": "power", "acts_as": "both"}, {"bias": "bias", "weight": "wei"}),
}


@pytest.mark.parametrize("case", KERPLE)
def test_kerple(case: str) -> None:
    """The released code clamps a and p before each use: here what is learned is made from their clamped values."""
    reader, (parameters, kinds) = golden("kerple", case), KERPLE[case]
    furthest = {"p": 2.0 if parameters else None, "a": None}
    weights = {name: weight.clamp(0.01, furthest[name[-1]]).requires_grad_() for name, weight in reader.weights(case).items()}
    mapped = {}
    for ours, theirs in kinds.items():
        a, p = (weights[f"{theirs}_{letter}"].flatten() for letter in "ap")
        mapped[f"{ours}_a"], mapped[f"{ours}_p"] = a.expm1().log(), (p / 2).logit() if parameters else p.expm1().log()
    scores = reader.inputs(case)["scores"]
    outputs = {"causal_scores_out": scores_of(scheme_of("kerple", parameters, 12), mapped, scores)}
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)


def test_kerple_original_is_alibi() -> None:
    """With slopes clamped from below, a quirk of that code."""
    reader, case = golden("kerple"), "kerple_power_original"
    slopes = reader.weights(case)["bias_a"].flatten().clamp(min=0.01)
    scores = reader.inputs(case)["scores"]
    found = scores_of(scheme_of("alibi", {"learned": True}, 12), {"slope": slopes}, scores)
    assert_outputs(reader, case, {"causal_scores_out": found})


@pytest.mark.parametrize("case", ["fire_L5", "fire_L512", "fire_dape_pe_L6"])
def test_fire(case: str) -> None:
    """Thresholds within and beyond the text; the last bias of that network, the same for all keys, is added here."""
    reader = golden("fire", case)
    weights = {name: weight.requires_grad_() for name, weight in reader.weights(case).items()}
    names = {"c": "slope", "L_multiplier": "threshold_factor", "mlp.0.weight": "hidden_weight"}
    names |= {"mlp.0.bias": "hidden_bias", "mlp.2.weight": "output_weight"}
    mapped = {new: weights[old].flatten() for old, new in names.items()}
    mapped["output_weight"] = weights["mlp.2.weight"]
    scheme = scheme_of("fire", {"width": 16, "threshold": weights["init_L"].item()}, 12)
    found = scores_of(scheme, mapped, reader.inputs(case)["scores"])
    outputs = {"causal_scores_out": (found + weights["mlp.2.bias"][:, None, None]).tril()}
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)


class Sum(PositionScheme):
    """Two schemes whose terms are added."""

    def __init__(self, first: PositionScheme, second: PositionScheme) -> None:
        torch.nn.Module.__init__(self)
        self.first, self.second, self.head_dim = first, second, first.head_dim

    def score_terms(self, *args: Any) -> ScoreTerms:
        vectors = self.second.score_terms(*args)
        return replace(self.first.score_terms(*args), query_vectors=vectors.query_vectors, span=vectors.span)


COPE = {"positions": 6, "divide": True}
REL = {"max_distance": 12, "share_heads": True}


@pytest.mark.parametrize(
    "case, schemes",
    [
        ("npos6", {"cope": COPE}),
        ("npos_full", {"cope": COPE | {"positions": 13}}),
        ("nodiv", {"cope": COPE | {"divide": False}}),
        ("rel", {"music": REL}),
        ("cope_rel", {"cope": COPE, "music": REL}),
    ],
)
def test_cope(case: str, schemes: dict[str, Any]) -> None:
    """The released code, divided and not; the relative vectors that it may add are Music Transformer's."""
    reader = golden("cope_ram", case)
    weights = {name: weight.requires_grad_() for name, weight in reader.weights(case).items()}
    parts = {"q": "query", "k": "key", "v": "val", "o": "out"}
    mapped = {
        f"attention.{ours}_proj.{kind}": weights[f"proj_{theirs}.{kind}"]
        for ours, theirs in parts.items()
        for kind in ("weight", "bias")
    }
    built = [layer_of(True, name, parameters) for name, parameters in schemes.items()]
    scheme = built[0][1] if len(built) == 1 else Sum(built[0][1], built[1][1])
    prefixes = ["scheme."] if len(built) == 1 else ["scheme.first.", "scheme.second."]
    for prefix, name in zip(prefixes, schemes, strict=True):
        table = weights["attn.pos_emb" if name == "cope" else "attn.rel_pos_emb.emb"].transpose(1, 2)
        mapped[f"{prefix}table"] = table[0] if name == "cope" else table
    output, probabilities = functional(built[0][0], scheme, mapped, True, reader.inputs(case)["x"], None)
    outputs = {"output": output, "attn": probabilities.flatten(0, 1)}
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)


XT = {
    "rotary": ("rope", {"interleaved": True}),
    "rotary_half": ("rope", {"interleaved": True, "partial_rotary_factor": 0.5}),
    "rotary_xl": ("rope", {"interleaved": True}),
    "rotary_xpos": ("xpos", {"scale_base": 16}),
}


def xt_weights(weights: Weights) -> Weights:
    """Weights of x-transformers by this package's names; it stores the scale of a norm less one."""
    mapped = {
        "model.embed_tokens.weight": weights["token_emb.emb.weight"],
        "lm_head.weight": weights["to_logits.weight"],
    }
    mapped["model.norm.weight"] = weights["attn_layers.final_norm.gamma"] + 1
    for index in range(2):
        attention, mlp = (f"attn_layers.layers.{2 * index + part}" for part in (0, 1))
        ours = f"model.layers.{index}"
        mapped[f"{ours}.attention_norm.weight"] = weights[f"{attention}.0.0.gamma"] + 1
        mapped[f"{ours}.mlp_norm.weight"] = weights[f"{mlp}.0.0.gamma"] + 1
        for letter, name in zip("qkvo", ("q", "k", "v", "out"), strict=True):
            mapped[f"{ours}.attention.{letter}_proj.weight"] = weights[f"{attention}.1.to_{name}.weight"]
        for new, old in (("up_proj", "0.0"), ("down_proj", "2")):
            for kind in ("weight", "bias"):
                mapped[f"{ours}.mlp.{new}.{kind}"] = weights[f"{mlp}.1.ff.{old}.{kind}"]
    return mapped


@pytest.mark.parametrize("case", XT)
def test_x_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole decoders: RoPE of all channels and of half, behind a memory over three segments, and xPos.

    The reference rounded its frequencies and the bases of xPos's decay to float32, whatever it computed in.
    """
    reader, (scheme, parameters) = golden("xt_rotary", case), XT[case]
    weights = {name: weight.requires_grad_() for name, weight in reader.weights(case).items()}
    config = RelPosDecoderConfig(
        **SIZES, norm_bias=False, mlp_bias=True, tie_word_embeddings=False, position_scheme=scheme,
        position_parameters=parameters, mem_len=7 if case == "rotary_xl" else 0, sliding_window=None,
    )  # fmt: skip
    rounded = weights["attn_layers.rotary_pos_emb.inv_freq"].detach()
    monkeypatch.setattr(scheme_rotary, "frequencies", lambda *args: rounded)
    model, mapped = RelPosDecoderForCausalLM(config).double().eval(), xt_weights(weights)
    assert mapped.keys() == dict(model.named_parameters()).keys()
    inputs, memory, outputs = reader.inputs(case)["x"], None, {}
    for index, ids in enumerate(inputs if isinstance(inputs, list) else [inputs]):
        found = torch.func.functional_call(model, mapped, (ids,), {"memory": memory, "use_cache": False})
        memory = found.memory
        outputs[f"seg{index}/logits" if isinstance(inputs, list) else "logits"] = found.logits
    monkeypatch.setattr(golden_reader, "EXACT", 1e-6 if case == "rotary_xpos" else 1e-9)
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)
