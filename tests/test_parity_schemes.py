"""Schemes against the implementations of other people that are installed, on the same weights."""

import re
from typing import Any

import parity
import pytest
import torch
import transformers
from matrix import ids_of
from plain_attention import terms_of
from transformers.models.llama import modeling_llama as llama

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderModel
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_tables import DistanceTables
from hf_relpos.model.positions import Positions
from hf_relpos.model.running_sums import running_sums
from hf_relpos.model.scheme_registry import build_scheme
from hf_relpos.model.scheme_terms import ScoreTerms
from hf_relpos.model.scheme_terms import dense_bias

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def scheme_of(name: str, parameters: dict[str, Any], **fields: Any) -> Any:
    """A decoder's scheme alone."""
    return build_scheme(RelPosDecoderConfig(position_scheme=name, position_parameters=parameters, **SIZES, **fields), name)


def positions_of(length: int, dtype: torch.dtype = torch.float64, causal: bool = True) -> Positions:
    return build_positions((1, length), torch.empty(0, dtype=dtype), causal=causal)


SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0},
]


@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("parameters", SCALED, ids=str)
def test_scaled_rope_is_that_of_llama(parameters: dict[str, Any], length: int) -> None:
    """Below and beyond `max_position_embeddings`."""
    parameters = {"rope_theta": 500.0, **parameters}
    scheme = scheme_of("rope", parameters, max_position_embeddings=128)
    theirs = llama.LlamaRotaryEmbedding(
        llama.LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=128, rope_parameters=parameters)
    )
    query, key = torch.randn(2, 4, length, 8), torch.randn(2, 4, length, 8)
    prepared = scheme.prepare(positions_of(length, torch.float32))
    wanted = llama.apply_rotary_pos_emb(query, key, *theirs(query, torch.arange(length)[None]))
    torch.testing.assert_close(scheme.encode_query(query, prepared), wanted[0])
    torch.testing.assert_close(scheme.encode_key(key, prepared), wanted[1])


def test_xpos_is_that_of_x_transformers() -> None:
    """Products of queries and keys, behind a memory too, where that code counts from minus the memory's length."""
    xt = pytest.importorskip("x_transformers.x_transformers")
    scheme, theirs = (
        scheme_of("xpos", {"scale_base": 32}),
        xt.RotaryEmbedding(8, use_xpos=True, scale_base=32).double(),
    )
    query, key = torch.randn(2, 4, 20, 8, dtype=torch.float64), torch.randn(2, 4, 20, 8, dtype=torch.float64)
    for length in (20, 13):
        angles, scale = theirs(torch.arange(20)[None] - (20 - length))
        queries = query[:, :, -length:]
        wanted = xt.apply_rotary_pos_emb(queries, angles, scale) @ xt.apply_rotary_pos_emb(key, angles, 1 / scale).mT
        positions = build_positions(
            (1, length), query, causal=True, memory_slots=20 - length, memory_length=torch.tensor([20 - length])
        )
        prepared = scheme.prepare(positions)
        met = scheme.scale_after_cache(scheme.encode_query(queries, prepared), scheme.encode_key(key, prepared), prepared)
        found = met[0] @ met[1].mT
        torch.testing.assert_close(found[..., positions.visible[0, 0]], wanted[..., positions.visible[0, 0]])


@pytest.mark.parametrize("count", [4, 16, 30])
def test_cope_is_that_of_x_transformers(count: int) -> None:
    """With fewer vectors than keys, and with more."""
    xt = pytest.importorskip("x_transformers.x_transformers")
    scheme, theirs = scheme_of("cope", {"positions": count}), xt.CoPE(8, 4, count).double()
    theirs.pos_emb.data.normal_()
    query, key = (torch.randn(2, 4, 20, 8, dtype=torch.float64, requires_grad=True) for _ in "qk")
    positions = positions_of(20)
    hidden = ~positions.visible
    scores = (query @ key.mT / 8**0.5).masked_fill(hidden, -torch.finfo(torch.float64).max)
    wanted = theirs(query, scores).masked_fill(hidden, 0.0)
    with torch.nn.utils.stateless._reparametrize_module(scheme, {"table": theirs.pos_emb}):
        terms = terms_of(scheme, positions)
        found = terms.dense(positions, query, key, *terms.learned, *terms.learned_by_head).masked_fill(hidden, 0.0)
    torch.testing.assert_close(found, wanted)
    direction = torch.randn_like(found)
    gradients = [torch.autograd.grad((term * direction).sum(), [theirs.pos_emb, query, key]) for term in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_pope_is_that_of_x_transformers() -> None:
    """Products of queries and keys with a phase of their own in each head, also outside of its range."""
    xt = pytest.importorskip("x_transformers.x_transformers")
    theirs = xt.PolarEmbedding(8, 4)
    theirs.learned_bias.data.uniform_(-8, 1)
    scheme, positions = scheme_of("pope", {}), positions_of(20, torch.float32)
    query, key = torch.randn(2, 4, 20, 8), torch.randn(2, 4, 20, 8)
    angles, phase = theirs(torch.arange(20))
    wanted = xt.apply_polar_pos_emb(query, angles) @ xt.apply_polar_pos_emb(key, angles + phase).mT
    with torch.nn.utils.stateless._reparametrize_module(scheme, {"phase": theirs.learned_bias[:, 0]}):
        prepared = scheme.prepare(positions)
        found = scheme.encode_query(query, prepared) @ scheme.encode_key(key, prepared).mT
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("log_distance", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_dynamic_bias_is_that_of_x_transformers(depth: int, log_distance: bool) -> None:
    """Beside the last bias, which adds the same to all keys of a query."""
    xt = pytest.importorskip("x_transformers.x_transformers")
    theirs = xt.DynamicPositionBias(6, heads=4, depth=depth, log_distance=log_distance)
    scheme = scheme_of("dynamic_bias", {"width": 6, "depth": depth, "log_distance": log_distance})
    linear = [next(part for part in layer if part is not None) for layer in theirs.mlp[:-1]]
    weights = {
        "input_weight": linear[0].weight[:, 0],
        "hidden_bias": torch.stack([layer.bias for layer in linear]),
        "output_weight": theirs.mlp[-1].weight,
    }
    if depth > 1:
        weights["hidden_weight"] = torch.stack([layer.weight for layer in linear[1:]])
    positions, query = positions_of(20, torch.float32), torch.zeros(1, 4, 20, 8)
    with torch.nn.utils.stateless._reparametrize_module(scheme, weights):
        terms = terms_of(scheme, positions)
        found = dense_bias(terms, DistanceTables(positions), query, query, 1.0)[0]
    wanted = theirs(20, 20) - theirs.mlp[-1].bias[:, None, None]
    torch.testing.assert_close(found[:, positions.visible[0, 0]], wanted[:, positions.visible[0, 0]])


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_data_dependent_alibi_is_that_of_x_transformers(factor: float) -> None:
    xt = pytest.importorskip("x_transformers.x_transformers")
    theirs, states = xt.DataDependentAlibi(32, heads=4, post_log_scale=factor), torch.randn(2, 20, 32)
    scheme = scheme_of("data_dependent_alibi", {"post_log_scale": factor})
    scheme.load_state_dict({f"gate_{name}": weight for name, weight in theirs.to_forget_gates[0].state_dict().items()})
    positions, query = positions_of(20, torch.float32), torch.zeros(2, 4, 20, 8)
    terms = ScoreTerms(sums=running_sums(scheme.gate_tokens(states), positions))
    found: Any = dense_bias(terms, DistanceTables(positions), query, query, 1.0)
    seen = positions.visible[0, 0]
    torch.testing.assert_close(found[..., seen], theirs(states)[..., seen], rtol=1e-5, atol=1e-5)


DEBERTA_RULES = [
    (r"embeddings\.word_embeddings\.weight", "embed_tokens.weight"),
    (r"embeddings\.LayerNorm\.(\w+)", r"embed_norm.\1"),
    (r"embeddings\.position_ids", ""),
    (r"encoder\.rel_embeddings\.weight", "position_schemes.shared.deberta.table"),
    (r"encoder\.LayerNorm\.(\w+)", r"position_schemes.shared.deberta.norm.\1"),
    (
        r"encoder\.layer\.(\d+)\.attention\.self\.pos_key_proj\.weight",
        r"position_schemes.shared.deberta.key_projections.\1.weight",
    ),
    (r"encoder\.layer\.(\d+)\.attention\.self\.pos_key_proj\.bias", ""),
    (
        r"encoder\.layer\.(\d+)\.attention\.self\.pos_query_proj\.(\w+)",
        r"position_schemes.shared.deberta.query_projections.\1.\2",
    ),
    (r"encoder\.layer\.(\d+)\.attention\.self\.(\w)\w+_proj\.(\w+)", r"layers.\1.attention.\2_proj.\3"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(\w+)", r"layers.\1.attention.o_proj.\2"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(\w+)", r"layers.\1.attention_norm.\2"),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense\.(\w+)", r"layers.\1.mlp.up_proj.\2"),
    (r"encoder\.layer\.(\d+)\.output\.dense\.(\w+)", r"layers.\1.mlp.down_proj.\2"),
    (r"encoder\.layer\.(\d+)\.output\.LayerNorm\.(\w+)", r"layers.\1.mlp_norm.\2"),
]


@pytest.mark.parametrize("buckets", [None, 4])
@pytest.mark.parametrize("projections", ["own", "layer"])
@pytest.mark.parametrize("terms, types", [("both", ["c2p", "p2c"]), ("c2p", ["c2p"]), ("p2c", ["p2c"])])
def test_deberta_v2(terms: str, types: list[str], projections: str, buckets: int | None) -> None:
    """The whole encoder; its table is shared by all layers. The bias of its position keys changes no probability."""
    config = transformers.DebertaV2Config(
        **parity.SIZES, intermediate_size=60, relative_attention=True, pos_att_type=types, type_vocab_size=0,
        share_att_key=projections == "layer", position_buckets=buckets or -1, max_relative_positions=7,
        norm_rel_ebd="layer_norm" if buckets else "none", position_biased_input=False, hidden_act="gelu",
    )  # fmt: skip
    theirs = parity.randomised(transformers.DebertaV2Model(config))
    parameters = {"max_distance": 7, "num_buckets": buckets, "terms": terms, "projections": projections}
    ours = RelPosEncoderModel(
        RelPosEncoderConfig(
            **parity.SIZES, intermediate_size=60, norm_position="post", embedding_norm=True, layer_norm_eps=1e-7,
            attention_bias=True, mlp_bias=True, position_scheme="deberta",
            position_parameters=parameters | {"normalise": buckets is not None},
        )
    )  # fmt: skip
    weights = parity.renamed(theirs.state_dict(), *DEBERTA_RULES)
    for inputs in ({}, {"attention_mask": parity.left_padding().flip(1)}):
        parity.assert_same(ours, theirs, weights, parity.FLOAT32, "last_hidden_state", **inputs)


def xlnet_weights(weights: parity.Weights, segments: bool) -> parity.Weights:
    """XLNet's weights by this package's names: its projections are stored by heads, and from input to output."""
    flat = {
        name: weight.flatten(1).T if re.fullmatch(r".*rel_attn\.[qkvr]", name) else weight for name, weight in weights.items()
    }
    flat = {name: weight.flatten(1) if name.endswith("rel_attn.o") else weight for name, weight in flat.items()}
    return parity.renamed(
        flat,
        (r"mask_emb", ""),
        (r"word_embedding\.weight", "embed_tokens.weight"),
        (r"layer\.(\d+)\.rel_attn\.([qkvo])", r"layers.\1.attention.\2_proj.weight"),
        (r"layer\.(\d+)\.rel_attn\.r", r"position_schemes.\1.xlnet.distance_projection.weight"),
        (r"layer\.(\d+)\.rel_attn\.r_w_bias", r"position_schemes.\1.xlnet.key_offset"),
        (r"layer\.(\d+)\.rel_attn\.r_r_bias", r"position_schemes.\1.xlnet.distance_offset"),
        (r"layer\.(\d+)\.rel_attn\.r_s_bias", r"position_schemes.\1.xlnet.segment_offset" if segments else ""),
        (r"layer\.(\d+)\.rel_attn\.seg_embed", r"position_schemes.\1.xlnet.segment_table" if segments else ""),
        (r"layer\.(\d+)\.rel_attn\.layer_norm\.(\w+)", r"layers.\1.attention_norm.\2"),
        (r"layer\.(\d+)\.ff\.layer_1\.(\w+)", r"layers.\1.mlp.up_proj.\2"),
        (r"layer\.(\d+)\.ff\.layer_2\.(\w+)", r"layers.\1.mlp.down_proj.\2"),
        (r"layer\.(\d+)\.ff\.layer_norm\.(\w+)", r"layers.\1.mlp_norm.\2"),
    )


def xlnet(**fields: Any) -> tuple[Any, dict[str, Any]]:
    """A model of transformers, and what the same model is called here."""
    config = transformers.XLNetConfig(
        vocab_size=37, d_model=48, n_layer=2, n_head=6, d_inner=60, dropout=0.0, ff_activation="gelu", **fields
    )
    settings = {"intermediate_size": 60, "norm_position": "post", "mlp_bias": True, "layer_norm_eps": 1e-12}
    return parity.randomised(transformers.XLNetModel(config)), {**parity.SIZES, **settings, "position_scheme": "xlnet"}


@pytest.mark.parametrize("clamp", [-1, 4])
def test_xlnet_in_both_directions(clamp: int) -> None:
    """With two segments and padding, and without either."""
    theirs, settings = xlnet(attn_type="bi", clamp_len=clamp, mem_len=None)
    settings["position_parameters"] = {"clamp_len": None if clamp < 0 else clamp}
    ours = RelPosEncoderModel(RelPosEncoderConfig(**settings, type_vocab_size=2))
    assert ours.embed_types is None, "types enter by their own term"
    weights = xlnet_weights(theirs.state_dict(), segments=True)
    types = (ids_of() % 2).long()
    for inputs in ({}, {"token_type_ids": types, "attention_mask": parity.left_padding()}, {"token_type_ids": types}):
        parity.assert_same(ours, theirs, weights, parity.FLOAT32, "last_hidden_state", **inputs)
    with torch.no_grad():
        typed, plain = (ours(ids_of(), token_type_ids=given).last_hidden_state for given in (types, None))
    assert not torch.allclose(typed, plain)


@torch.no_grad()
def test_xlnet_in_one_direction_with_memory() -> None:
    """`attn_type="uni"` over three segments; the memory holds fewer tokens than a segment."""
    theirs, settings = xlnet(attn_type="uni", mem_len=5)
    ours = RelPosDecoderModel(RelPosDecoderConfig(**settings, mem_len=5, sliding_window=None)).double().eval()
    ours.load_state_dict(xlnet_weights(theirs.state_dict(), segments=False))
    memory = memories = None
    for seed in range(3):
        found, wanted = ours(ids_of(seed=seed), memory=memory), theirs(ids_of(seed=seed), mems=memories, use_mems=True)
        torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **parity.FLOAT32)
        memory, memories = found.memory, wanted.mems
