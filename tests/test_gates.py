"""Numbers per token that add up from a key to a query: kept with the keys, exact over long texts, refused where they mean nothing."""

import copy
import math
import re
from typing import Any
from unittest import mock

import pytest
import torch
from matrix import ids_of
from matrix import sharpen
from transformers import AutoModel
from transformers import DynamicCache
from transformers import StaticCache

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos.model.blockwise_attention import blockwise_attention
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.running_sums import join_gates
from hf_relpos.model.running_sums import running_sums
from hf_relpos.model.running_sums import split_gates
from hf_relpos.model.scheme_gates import TokenGates
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.model.scheme_registry import build_scheme
from hf_relpos.model.scheme_terms import ScoreTerms

GATED = [name for name, kind in SCHEMES.items() if kind.gates()]
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 28,
}


def model_of(name: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    return sharpen(RelPosDecoderModel(RelPosDecoderConfig(**SIZES, position_scheme=name, **fields))).to(dtype).eval()


@pytest.mark.parametrize(
    ("dtype", "steep", "bound"), [(torch.float32, 1e-3, 1e-6), (torch.float32, 5.0, 3e-6), (torch.bfloat16, 5.0, 1e-2)]
)
def test_exact_over_a_long_text(dtype: torch.dtype, steep: float, bound: float) -> None:
    """Sums reach 100,000 where their differences decide: single precision tells them apart by 0.008 there."""
    length, rows = 20_000, torch.tensor([1, 200, 9_999, 19_998, 19_999])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, length, 8, generator=generator).to(dtype) for _ in range(3))
    gates = -2 * steep * torch.rand(1, 1, length, generator=generator)
    positions = build_positions((1, length), torch.empty(0), causal=True)
    with torch.no_grad():
        terms = ScoreTerms(sums=running_sums(gates, positions))
        found = blockwise_attention(query, key, value, terms, positions, 0.25)
    query, key, value = query.double(), key.double(), value.double()
    sums = gates.double().cumsum(-1)
    scores = 0.25 * query[:, :, rows] @ key.mT + sums[..., rows, None] - sums[..., None, :]
    wanted = scores.masked_fill(torch.arange(length) > rows[:, None], -math.inf).softmax(-1) @ value
    assert (found[:, rows].transpose(1, 2).double() - wanted).abs().max() < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.0), (torch.bfloat16, 2**-22), (torch.float16, 2**-22)])
def test_a_cache_keeps_gates_as_they_are(dtype: torch.dtype, bound: float) -> None:
    """Also in the channels of half-precision keys, and for queries that share keys in groups; gradients come back whole."""
    key, gates = torch.randn(2, 2, 5, 8).to(dtype), (-torch.rand(2, 6, 5)).requires_grad_()
    again, found = split_gates(join_gates(key, gates), 8)
    assert torch.equal(again, key) and found.dtype == torch.float32
    torch.testing.assert_close(found, gates, rtol=bound, atol=0.0)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), gates)[0], torch.ones_like(gates))


@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_caches_carry_them(name: str) -> None:
    """A cache that was cropped, reordered and selected from goes on as if it had read what is left."""
    model, ids = model_of(name, num_key_value_heads=2), ids_of(batch=3, length=12)
    cache = model(ids, use_cache=True).cache
    cache.crop(-5)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    kept = torch.cat([ids[[2, 1], :7], ids[:2, 7:]], 1)
    found = model(kept[:, 7:], cache=cache).last_hidden_state
    torch.testing.assert_close(found, model(kept).last_hidden_state[:, 7:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_padding_between_tokens_adds_nothing(name: str) -> None:
    model, ids = model_of(name), ids_of(batch=1, length=9)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
    found = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    torch.testing.assert_close(found, model(ids[mask.bool()][None]).last_hidden_state[0], rtol=1e-9, atol=1e-10)


OTHERS = [("nope", name) for name in GATED] + [("rope", "nope"), ("fox", "cable"), ("rope", "fox"), ("pope", "rope")]
OTHERS += [("alibi", "rope+alibi"), ("rope+fox", "fox"), ("rope", "t5")]


@pytest.mark.parametrize("made, read", OTHERS + [pair[::-1] for pair in OTHERS])
@torch.no_grad()
def test_another_schemes_cache_is_refused(made: str, read: str) -> None:
    """By both names, also where keys are as wide; a copy too."""
    ids = ids_of(length=4)
    cache = model_of(made)(ids, cache=DynamicCache()).cache
    model = model_of(read)
    for given in (cache, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match=re.escape(f"position_scheme {made!r} in layer 0, where this model has {read!r}")):
            model(ids, cache=given)


@torch.no_grad()
def test_an_emptied_cache_serves_another_scheme() -> None:
    ids, made, model = ids_of(length=4), model_of("rope"), model_of("nope")
    cache = StaticCache(config=model.config, max_cache_len=8)
    made(ids, cache=cache)
    cache.reset()
    wanted = model(ids).last_hidden_state
    torch.testing.assert_close(model(ids, cache=cache).last_hidden_state, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_a_cache_that_says_nothing_is_refused_by_its_width(name: str) -> None:
    ids, others, model = ids_of(length=4), model_of("nope"), model_of(name)
    caches = [one(ids, cache=DynamicCache()).cache for one in (others, model)]
    for cache in caches:
        for layer in cache.layers:
            del layer.position_scheme
    with pytest.raises(ValueError, match=rf"holds 6 numbers a key in layer 0.* {name!r} keeps 7.*new cache"):
        model(ids, cache=caches[0])
    with pytest.raises(ValueError, match=r"holds 7 numbers a key in layer 0.* 'nope' keeps 6.*new cache"):
        others(ids, cache=caches[1])


@pytest.mark.parametrize("name", GATED)
def test_an_encoder_is_refused(name: str) -> None:
    """Alone, in some layers, beside `rope`, and as the encoder of an encoder-decoder, whose decoder may have it."""
    reason = f"{name}.*adds up the tokens from a key to a query after it"
    for scheme in (name, ["rope", name], f"rope+{name}"):
        with pytest.raises(ValueError, match=reason):
            RelPosEncoderConfig(**SIZES, position_scheme=scheme)
        with pytest.raises(ValueError, match=reason):
            RelPosSeq2SeqConfig(**SIZES, position_scheme=scheme)
        RelPosSeq2SeqConfig(**SIZES, encoder_position_scheme="rope", decoder_position_scheme=scheme)


EXTREME: dict[str, dict[str, Any]] = {
    "fox": {"gate": "fixed", "decay_time_min": 1e-3, "decay_time_max": 1e-3},
    "data_dependent_alibi": {"post_log_scale": 1e6, "bias_init": -1e4},
}


NUMBERS = [
    (name, parameter) for name, own in EXTREME.items() for parameter, value in own.items() if not isinstance(value, str)
]


@pytest.mark.parametrize("name, parameter", NUMBERS)
def test_sums_that_would_overflow_are_refused(name: str, parameter: str) -> None:
    """By name, where parameters go beyond what keeps sums finite."""
    beyond = EXTREME[name][parameter] * (0.1 if name == "fox" else 10)
    with pytest.raises(ValueError, match=f"{parameter}={beyond!r} is not allowed"):
        RelPosDecoderConfig(**SIZES, position_scheme=name, position_parameters=EXTREME[name] | {parameter: beyond})


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_steepest_sums_are_finite(name: str, dtype: torch.dtype) -> None:
    """With the outermost parameters a token sees itself alone, in blocks and dense; gradients are finite."""
    ids, found = ids_of(batch=1, length=40), []
    for path in ("blockwise", "dense"):
        fields = {"position_parameters": EXTREME[name], "attention_path": path, "attn_implementation": "sdpa"}
        model = model_of(name, dtype, **fields)
        found.append(model(ids).last_hidden_state)
        found[-1].float().square().sum().backward()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
    alone = model(ids.T).last_hidden_state.transpose(0, 1)
    for one in found:
        torch.testing.assert_close(one, alone, rtol=0.02, atol=0.02)


def test_rounding_does_not_add_up_in_gradients() -> None:
    """Of a row's gradients, which sum to zero, rounding leaves something; over keys it would add up to several times the error."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "initializer_range": 0.2}
    config = RelPosDecoderConfig(**sizes, position_scheme="fox", attn_implementation="sdpa", attention_path="blockwise")

    def gradients(model: RelPosDecoderModel, ids: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(ids).last_hidden_state[0], ids[0])
        weights = [weight for name, weight in model.named_parameters() if "gate" in name]
        return torch.cat([grad.double().flatten() for grad in torch.autograd.grad(loss, weights)])

    errors = []
    for seed in range(4):
        torch.manual_seed(seed)
        model, ids = RelPosDecoderModel(config).double(), torch.randint(64, (1, 512))
        exact = gradients(model, ids)
        errors.append(((gradients(model.float(), ids) - exact).norm() / exact.norm()).item())
    assert sum(errors) / 4 < 4e-6, errors


@pytest.mark.parametrize("steep", [1.0, 10.0, 300.0, 1e9])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 0.15)], ids=str)
def test_gradients_of_steep_sums(dtype: torch.dtype, bound: float, steep: float) -> None:
    """As by the formula in double precision: what a key's sum has grown to is as exact in half precision as scores are."""
    torch.manual_seed(0)
    bound, length = (bound if steep <= 10 else max(bound, 1e-3)), 140  # single precision says a sum of 10,000 to 0.001
    states = [torch.randn(1, 1, length, 8).to(dtype).requires_grad_() for _ in range(3)]
    gates = (-steep * torch.rand(1, 1, length) * (torch.rand(1, 1, length) < 0.3)).requires_grad_()
    positions = build_positions((1, length), torch.empty(0), causal=True)
    out = blockwise_attention(*states, ScoreTerms(sums=running_sums(gates, positions)), positions, 0.35)
    out.float().square().sum().backward()
    query, key, value, numbers = others = [part.detach().double().requires_grad_() for part in (*states, gates)]
    sums = numbers.cumsum(-1)
    scores = 0.35 * query @ key.mT + sums[..., :, None] - sums[..., None, :]
    wanted = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1) @ value
    wanted.square().sum().backward()
    torch.testing.assert_close(out.transpose(1, 2).double(), wanted, rtol=bound, atol=bound)
    for mine, other in zip((*states, gates), others, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(
            mine.grad.double(), other.grad, rtol=bound, atol=bound * max(1.0, other.grad.abs().max().item())
        )


FITS = [("full", None, None), ("bias_only", None, None), ("bias_only", 2.0, 64.0), ("fixed", 2.0, 64.0)]


@pytest.mark.parametrize("low", [None, 2.0])
@pytest.mark.parametrize("high", [None, 64.0])
@pytest.mark.parametrize("gate", ["full", "bias_only", "fixed"])
def test_times_of_decay(gate: str, low: float | None, high: float | None) -> None:
    """Given where a gate reads no token: the sum over so many tokens is -1 then, in the first and in the last head."""
    given = {"gate": gate, "decay_time_min": low, "decay_time_max": high}
    if (gate, low, high) not in FITS:
        with pytest.raises(ValueError, match=f"decay_time_min={low} and decay_time_max={high} do not fit gate={gate!r}"):
            RelPosDecoderConfig(**SIZES, position_scheme="fox", position_parameters=given)
        return
    scheme: Any = build_scheme(RelPosDecoderConfig(**SIZES, position_scheme="fox", position_parameters=given), "fox")
    scheme.initialize(0.02)
    if gate != "full":
        gates = scheme.gate_tokens(torch.zeros(1, 1, 24))[0, :, 0]
        times = [2.0, 2 * 32 ** (1 / 3), 2 * 32 ** (2 / 3), 64.0] if low else [1 / math.log(2)] * 4
        torch.testing.assert_close(-1 / gates.detach(), torch.tensor(times))


@pytest.mark.parametrize("name", GATED)
def test_gates_are_left_exact_by_what_quantises_linear_layers(name: str) -> None:
    scheme = build_scheme(RelPosDecoderConfig(**SIZES, position_scheme=name), name)
    assert not [module for module in scheme.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize("name", SCHEMES)
def test_every_table_begins_as_its_scheme_says(name: str) -> None:
    """In a new model, also where the weights stand in a part of the scheme: none is left as the memory was."""
    family = RelPosEncoderConfig if "causal" in SCHEMES[name].refuses else RelPosDecoderConfig
    with mock.patch.object(
        torch, "empty", lambda *size, **kwargs: torch.full(size[0] if isinstance(size[0], tuple) else size, math.nan)
    ):
        model = AutoModel.from_config(family(**SIZES, position_scheme=name))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, TokenGates):
            assert 0.01 < float(module.gate_weight.detach().std()) < 0.03
            assert set(module.gate_bias.tolist()) == {module.bias_init}
