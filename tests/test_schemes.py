"""What single schemes promise beyond the matrix: ranges, settings of their own, refusals with the reason."""

from typing import Any

import pytest
import torch
from matrix import LENGTH
from matrix import Case
from matrix import expected
from matrix import ids_of
from plain_attention import terms_of

from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderModel
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_tables import DistanceTables
from hf_relpos.model.scheme_terms import dense_bias

EXACT = {"rtol": 1e-9, "atol": 1e-10}


def refuse(family: str, scheme: str, parameters: dict[str, Any], message: str, **fields: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Case(family, scheme, parameters).config(**fields)


@torch.no_grad()
def test_xpos_at_any_position() -> None:
    """Decay cancels wherever the tokens stand, and 20 000 of them in one pass do not overflow bfloat16."""
    model, ids = Case("decoder", "xpos", {}).model(), ids_of()
    wanted = model(ids).last_hidden_state
    for first in (1_000, 1_000_000):
        found = model(ids, position_ids=torch.arange(first, first + LENGTH)[None]).last_hidden_state
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    model, position = model.bfloat16(), torch.linspace(0, 20_000, LENGTH).long()[None]
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert model(ids, position_ids=position).last_hidden_state.isfinite().all()
        cache = model(ids[:, :1], position_ids=position[:, :1], use_cache=True).cache
        far = model(ids[:, 1:2], position_ids=position[:, -1:], cache=cache).last_hidden_state
        assert far.isfinite().all()


def test_xpos_range_of_one_pass() -> None:
    """A pass over more positions than the precision can hold says so; the same tokens one by one are fine."""
    model, ids = Case("decoder", "xpos", {"scale_base": 2}).model(dtype=torch.float16), ids_of(1, 24)
    with pytest.raises(ValueError, match="xpos scales queries over 23 positions.*torch.float16: 22 at most"):
        model(ids)
    cache = None
    for token in ids[0]:
        output = model(token[None, None], cache=cache, use_cache=True)
        cache = output.cache
        assert output.last_hidden_state.isfinite().all()


def test_xpos_is_for_decoders() -> None:
    refuse("encoder", "xpos", {}, "'xpos' is refused for a bidirectional model: .*grows")


SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("parameters", SCALED, ids=lambda given: given["rope_type"])
@torch.no_grad()
def test_scaled_rope_is_cut_anywhere(parameters: dict[str, Any]) -> None:
    """Cached decoding and segments give what one windowed pass gives."""
    case, ids = Case("decoder", "rope", parameters), ids_of(length=24)
    wanted = case.model(sliding_window=6)(ids).last_hidden_state
    model, memory, cache, states, cached = case.model(mem_len=5), None, None, [], []
    for part in ids.split([7, 1, 16], 1):
        output = model(part, memory=memory)
        memory = output.memory
        states.append(output.last_hidden_state)
        output = model(part, cache=cache, use_cache=True)
        cache = output.cache
        cached.append(output.last_hidden_state)
    torch.testing.assert_close(torch.cat(states, 1), wanted, **EXACT)
    torch.testing.assert_close(torch.cat(cached, 1), wanted, **EXACT)


def test_scaled_rope_refusals() -> None:
    refuse("decoder", "rope", {"rope_type": "ntk"}, "rope_type='ntk' is not allowed: one of 'default', 'linear'")
    refuse("decoder", "rope", {"rope_type": "linear", "factor": 0.5}, "factor=0.5 is not allowed: float at least 1")
    refuse("decoder", "rope", {"rope_type": "dynamic"}, "'dynamic' is refused for mem_len=4: .*segments", mem_len=4)
    refuse("decoder", "rope", {"rope_type": "dynamic"}, "turns 1 pairs.*at least 2 is needed", head_dim=2)
    refuse("decoder", "rope", {"rope_type": "llama3", "low_freq_factor": 5.0}, "low_freq_factor=5.0 is not allowed")


@pytest.mark.parametrize("scheme", ["fire", "sandwich"])
@torch.no_grad()
def test_bias_of_far_and_near_keys_in_half_precision(scheme: str) -> None:
    """Neighbouring keys keep different biases in bfloat16, whose numbers near 64 lie half a unit apart."""
    model = Case("decoder", scheme, {}).model(dtype=torch.bfloat16, num_hidden_layers=1)
    own = model.position_schemes[0]
    positions = build_positions((1, 600), torch.empty(0, dtype=torch.bfloat16), causal=True)
    query = torch.zeros(1, 3, 600, 8, dtype=torch.bfloat16)
    bias = dense_bias(terms_of(own, positions), DistanceTables(positions), query, query, 1.0)
    assert bias[0, 0, -1, -8:].unique().numel() == 8


@pytest.mark.parametrize("family", ["decoder", "encoder"])
@torch.no_grad()
def test_fire_says_it_per_distance_where_it_can(family: str) -> None:
    """While no query looks beyond the threshold, one number per head and distance is all."""
    case, causal = Case(family, "fire", {"threshold": 11.0}), family == "decoder"
    model, ids = case.model(num_hidden_layers=1), ids_of(length=13)
    own = model.position_schemes[0]
    own.threshold_factor.fill_(1.0)

    def terms(length: int) -> Any:
        positions = build_positions((1, length), own.slope, causal=causal)
        return terms_of(own, positions)

    assert terms(12).bias.shape == (3, 12 if causal else 23) and terms(12).factors is None
    assert terms(13).bias is None and terms(13).factors is not None
    # A key more, that nobody sees, asks for the pairs: the others must not notice.
    seen = torch.ones_like(ids).index_fill(1, torch.tensor(12), 0)
    short, long = model(ids[:, :12]).last_hidden_state, model(ids, attention_mask=seen).last_hidden_state
    torch.testing.assert_close(long[:, :12], short, **EXACT)


def test_refusals_of_bias_schemes() -> None:
    refuse("decoder", "kerple", {"acts_as": "weight"}, "acts_as='weight' needs kernel='power'")


def test_kerple_starts_where_the_paper_does() -> None:
    """a within U(0, 1), p within U(0, 2), whatever makes them positive."""
    for parameters in ({}, {"kernel": "power"}):
        config = Case("decoder", "kerple", parameters).config(num_attention_heads=48, hidden_size=96)
        own = RelPosDecoderModel(config).position_schemes[0]
        a, p = torch.nn.functional.softplus(own.bias_a), torch.nn.functional.softplus(own.bias_p)
        p = 2 * own.bias_p.sigmoid() if parameters else p
        assert 0 < a.min() < 0.2 and 0.8 < a.max() < 1 and 0 < p.min() < 0.4 and 1.6 < p.max() < 2


@torch.no_grad()
def test_cope_counts_only_what_is_seen() -> None:
    """Gates of padding, of other documents and of the future are shut: open gates would push positions on."""
    model = Case("decoder", "cope", {"positions": 32}).model(num_hidden_layers=1)
    own, query, key = model.position_schemes[0], torch.zeros(1, 3, 6, 8), torch.zeros(1, 3, 6, 8)
    own.table.copy_(torch.arange(32.0)[:, None].expand(-1, 8))
    query += 1  # all gates are half open at zero keys, and what is added is 8 p
    for given, places in (
        ({}, [3.0, 2.5, 2.0, 1.5, 1.0, 0.5]),
        ({"attention_mask": torch.tensor([[0, 0, 1, 0, 1, 1]])}, [1.5, 1.5, 1.5, 1.0, 1.0, 0.5]),
        ({"reset_mask": torch.tensor([[1, 0, 0, 1, 0, 0]])}, [1.5, 1.5, 1.5, 1.5, 1.0, 0.5]),
        ({"window": 2}, [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]),
    ):
        positions = build_positions((1, 6), query, causal=True, **given)
        terms = terms_of(own, positions)
        added = terms.dense(positions, query, key, *terms.learned, *terms.learned_by_head)
        assert (added[0, 0, -1] / 8).tolist() == places


def test_cope_is_for_decoders() -> None:
    refuse("encoder", "cope", {}, "'cope' is refused for a bidirectional model: it counts the tokens from a key")


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_dape_adapts_a_bias_of_pairs(family: str) -> None:
    """FIRE beyond its threshold is no table: DAPE asks it for the pairs of a block, and each weight learns in blocks as in eager."""
    case, ids = Case(family, "dape", {"prior": "fire"}), ids_of()
    models = [case.model(), case.model(attn_implementation="sdpa", attention_path="blockwise")]
    found = []
    for model in models:
        for own in model.position_schemes:
            torch.nn.init.constant_(own.prior.threshold_factor, 5 / 512)
        states = model(ids).last_hidden_state
        torch.testing.assert_close(states, expected(model, ids), **EXACT)
        found.append(torch.autograd.grad(states.square().sum(), list(model.parameters())))
    terms = terms_of(models[0].position_schemes[0], build_positions((1, 11), states, causal=family == "decoder"))
    assert terms.bias is None
    torch.testing.assert_close(*found, **EXACT)


def test_dape_names_its_priors() -> None:
    refuse("decoder", "dape", {"prior": "t5"}, "prior='t5' is not allowed: one of 'kerple', 'alibi', 'fire'")


def test_deberta_has_one_table() -> None:
    """Whatever is shared, the table is the model's; projections belong to layers unless the model has one set."""

    def weights(**fields: Any) -> dict[str, tuple[int, ...]]:
        config = Case("encoder", "deberta", {"max_distance": 4}).config(num_hidden_layers=3, **fields)
        found = RelPosEncoderModel(config).position_schemes.named_parameters()
        return {name: tuple(weight.shape) for name, weight in found}

    layered, single = weights(), weights(share_positions="model")
    assert layered["shared.deberta.table"] == single["shared.deberta.table"] == (8, 24)
    names = [f"shared.deberta.{kind}_projections.{layer}.weight" for kind in ("key", "query") for layer in range(3)]
    assert [name for name in layered if name.endswith("weight")] == names
    assert [name for name in single if name.endswith("weight")] == [names[0], names[3]]
    config = Case("encoder", ["rope", "deberta", "rope"], {}).config(num_hidden_layers=3)
    mixed = [name for name, _ in RelPosEncoderModel(config).position_schemes.named_parameters()]
    assert mixed == [
        "shared.deberta.table",
        "shared.deberta.key_projections.1.weight",
        "shared.deberta.query_projections.1.weight",
        "shared.deberta.query_projections.1.bias",
    ]


def test_deberta_refusals() -> None:
    refuse("decoder", "deberta", {}, "'deberta' is refused for a causal model: it is defined for bidirectional")
    refuse("encoder", "deberta", {"max_distance": 5, "num_buckets": 8}, "max_distance=5 is not allowed: more than 5")


def test_learned_distances_are_not_clamped_twice() -> None:
    both = {"clamp_len": 4, "max_distance": 5}
    refuse("decoder", "transformer_xl", both, "clamp_len=4 is not allowed with max_distance=5: .*give one of the two")
    refuse("decoder", "xlnet", {"max_distance": 5}, "unknown parameter 'max_distance' of XLNet")


def test_xlnet_refuses_types_in_a_decoder() -> None:
    refuse(
        "decoder",
        "xlnet",
        {},
        "type_vocab_size=2 is refused for position_scheme 'xlnet' in a decoder",
        type_vocab_size=2,
    )
