"""Numbers per token that add up from a key to a query: kept with the keys, exact over long texts, refused where they mean nothing."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from matrix import ids_of
from matrix import sharpen
from transformers import AutoModel
from transformers import DynamicCache

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderConfig
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


@pytest.mark.parametrize("name", GATED)
def test_another_schemes_cache_is_refused(name: str) -> None:
    ids, others = ids_of(length=4), model_of("nope")
    cache = others(ids, use_cache=True).cache
    with pytest.raises(ValueError, match=r"holds 6 numbers a key in layer 0.* keeps 7.*new cache"):
        model_of(name)(ids, cache=cache)
    with pytest.raises(ValueError, match=r"holds 7 numbers a key in layer 0.* keeps 6.*new cache"):
        others(ids, cache=model_of(name)(ids, cache=DynamicCache()).cache)


@pytest.mark.parametrize("name", GATED)
def test_an_encoder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*adds up the tokens from a key to a query after it"):
        RelPosEncoderConfig(**SIZES, position_scheme=name)


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
