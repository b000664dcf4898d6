"""Tables kept between the steps of decoding: whatever changes in between, a step answers as one without them."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import LENGTH
from matrix import Case
from matrix import cases
from matrix import ids_of
from matrix import sharpen
from test_decoding import decode
from transformers import DynamicCache
from transformers.exporters.exporter_dynamo import register_pytree_node

from hf_relpos.model import position_tables

EXACT = {"rtol": 1e-9, "atol": 1e-10}
FAR_FIRE = pytest.param(Case("decoder", "fire", {"threshold": 3.0, "width": 6}), id="fire beyond its threshold")
T5, XL = Case("decoder", "t5", {}), Case("decoder", "transformer_xl", {})


@pytest.fixture(autouse=True)
def _no_gradients(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tables are kept where no gradients are; those of these tests serve four steps."""
    monkeypatch.setattr(position_tables, "DECODED_ALIKE", 4)
    with torch.no_grad():
        yield


def kept_for(cache: Any) -> dict[Any, Any]:
    return position_tables._STORES.get(cache, {})


def step_of(model: Any, cache: Any, index: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of one more token, with what the cache's steps kept and without."""
    ids = ids_of()[:, index : index + 1]
    fresh = copy.deepcopy(cache)
    assert not kept_for(fresh)
    states = (model(ids, cache=used, use_cache=True, **given).last_hidden_state for used in (cache, fresh))
    found, wanted = states
    return found, wanted


@pytest.mark.parametrize("path", ["dense", "blockwise"])
@pytest.mark.parametrize("case", [*cases("decoder"), FAR_FIRE])
def test_steps_and_chunks(case: Case, path: str) -> None:
    """Chunks behind steps and steps behind chunks give what one pass gives."""
    model, ids = case.model(attn_implementation="sdpa", attention_path=path), ids_of()
    wanted = model(ids, use_cache=False).last_hidden_state
    for portions in ([1] * 11, [2, 1, 1, 4, 1, 2]):
        torch.testing.assert_close(decode(model, ids, portions)[0], wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder"))
def test_masks_that_show_the_future(case: Case) -> None:
    """A prefix or a draft tree behind a step: the table of the step ends at distance 0, this pass needs those ahead."""
    model, ids = case.model(), ids_of()
    shown = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    shown[7:] = True
    wanted = model(ids, attention_mask=shown[None, None], use_cache=False).last_hidden_state
    _, cache = decode(model, ids, [6, 1])
    found = model(ids[:, 7:], attention_mask=shown[None, None, 7:], cache=cache, use_cache=True).last_hidden_state
    torch.testing.assert_close(found, wanted[:, 7:], **EXACT)


def in_place(model: Any) -> None:
    for weight in model.position_schemes.parameters():
        weight.add_(torch.randn_like(weight))


def by_data(model: Any) -> None:
    for weight in model.position_schemes.parameters():
        weight.data = weight.data + torch.randn_like(weight)


def by_loading(model: Any) -> None:
    model.load_state_dict(sharpen(copy.deepcopy(model), seed=1).state_dict())


def by_replacing(model: Any) -> None:
    for module in model.position_schemes.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(weight + torch.randn_like(weight)))


@pytest.mark.parametrize("change", [in_place, by_data, by_loading, by_replacing])
@pytest.mark.parametrize("case", cases("decoder"))
def test_changed_weights(case: Case, change: Callable[[Any], None]) -> None:
    model = case.model()
    _, cache = decode(model, ids_of(), [5, 1])
    change(model)
    found, wanted = step_of(model, cache, 6)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("case", cases("decoder"))
def test_gradients_behind_kept_tables(case: Case) -> None:
    """A step that is differentiated reaches the weights of the scheme, though steps before it kept what they made of them."""
    model = case.model()
    _, cache = decode(model, ids_of(), [5, 1])
    with torch.enable_grad():
        states = step_of(model, cache, 6)
    found, wanted = (_gradients(model, of) for of in states)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], **EXACT)


def _gradients(model: Any, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the position schemes' weights that the states depend on."""
    weights = dict(model.position_schemes.named_parameters())
    if not weights:
        return {}
    with torch.enable_grad():
        gradients = torch.autograd.grad(states.square().sum(), list(weights.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(weights, gradients, strict=True) if gradient is not None}


@pytest.mark.parametrize("case", cases("decoder"))
def test_a_cache_that_was_emptied(case: Case) -> None:
    """A cache that begins anew forgets what was kept, even where a change of the weights leaves no trace."""
    model, ids = case.model(), ids_of()
    for empty in (lambda cache: cache.reset(), lambda cache: cache.crop(-LENGTH)):
        _, cache = decode(model, ids, [5, 1, 1])
        for weight in model.position_schemes.parameters():
            weight.data.mul_(1.5)
        empty(cache)
        found = decode(model, ids, [5, 1, 1], cache=cache)[0]
        torch.testing.assert_close(found, decode(model, ids, [5, 1, 1])[0], rtol=0, atol=0)


def test_training_mode_draws_anew() -> None:
    """Dropout of sinusoids is drawn in each pass, and no later step sees what was drawn."""
    model = XL.model(hidden_dropout=0.5)
    _, cache = decode(model, ids_of(), [5, 1])
    model.train()
    drawn = [model(ids_of()[:, 6:7], cache=copy.deepcopy(cache), use_cache=True).last_hidden_state for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.manual_seed(0)
    found = model(ids_of()[:, 6:7], cache=cache, use_cache=True).last_hidden_state
    cache.crop(6 - cache.get_seq_length())
    torch.manual_seed(0)
    fresh = model(ids_of()[:, 6:7], cache=copy.deepcopy(cache), use_cache=True).last_hidden_state
    torch.testing.assert_close(found, fresh, rtol=0, atol=0)
    found, wanted = step_of(model.eval(), cache, 6)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_models_may_take_turns_on_one_cache() -> None:
    """Parameters of a scheme without weights count too; a model of another scheme is refused, and leaves the cache as it is."""
    alibi = Case("decoder", "alibi", {}).model()
    _, cache = decode(alibi, ids_of(), [5, 1])
    for index, model in enumerate([Case("decoder", "alibi", {"slopes": "geometric"}).model(), alibi], 6):
        for other in ("sandwich", "t5"):
            with pytest.raises(ValueError, match=f"position_scheme 'alibi' in layer 0, where this model has '{other}'"):
                step_of(Case("decoder", other, {}).model(), cache, index)
        found, wanted = step_of(model, cache, index)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_autocast_is_a_setting() -> None:
    model = XL.model(dtype=torch.float32)
    _, cache = decode(model, ids_of(), [5, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = step_of(model, cache, 6)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    found, wanted = step_of(model, cache, 7)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_weights_that_do_not_tell_of_changes() -> None:
    """Inference tensors count no versions: with them nothing is kept."""
    with torch.inference_mode():
        model = T5.model()
        _, cache = decode(model, ids_of(), [5, 1])
        assert not kept_for(cache)
        model.position_schemes[0].bias.add_(1.0)
        found, wanted = step_of(model, cache, 6)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_what_is_kept_goes_with_the_cache_and_is_no_part_of_it() -> None:
    model, before = T5.model(), len(position_tables._STORES)
    new = model(ids_of()[:, :5], use_cache=True).cache
    _, cache = decode(model, ids_of(), [5, 1, 1])
    assert kept_for(cache) and not kept_for(new)
    assert vars(cache).keys() == vars(new).keys()
    assert pickle.loads(pickle.dumps(cache)).get_seq_length() == 7
    del cache
    gc.collect()
    assert len(position_tables._STORES) == before


def test_a_cache_in_use_is_exported() -> None:
    register_pytree_node(DynamicCache)
    model, ids = T5.model(num_hidden_layers=1), ids_of()
    _, cache = decode(model, ids, [5, 1])

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
            return self.model(ids, cache=cache, use_cache=True).last_hidden_state

    exported = torch.export.export(Step(), (ids[:, 6:7], copy.deepcopy(cache)), strict=False)
    found = exported.module()(ids[:, 6:7], copy.deepcopy(cache))
    wanted = model(ids[:, 6:7], cache=cache, use_cache=True).last_hidden_state
    torch.testing.assert_close(found, wanted, **EXACT)
