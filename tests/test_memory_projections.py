"""Keys and values of a memory, projected once where no gradients run: nothing changes but the time, whatever changes in between."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import Case
from matrix import cases
from matrix import ids_of
from test_memory import CUTS
from test_memory import EXACT
from test_memory import stream
from torch import nn

from hf_relpos import SegmentMemory
from hf_relpos.model import memory_projections
from hf_relpos.model.memory_projections import begin_projections

SHAW = Case("decoder", "shaw", {})


def known(model: Any, memory: SegmentMemory | None) -> bool:
    """Whether a pass behind a memory would find its keys and values."""
    found = begin_projections(memory, model.layers, model.config.mem_len)
    return found is not None and found.before is not None


def fresh(memory: SegmentMemory) -> SegmentMemory:
    """The same memory, of which nothing is known."""
    return SegmentMemory(memory.hidden.clone(), memory.length.clone())


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("case", cases("decoder", memory=True, variants=True))
def test_segments_without_gradients_equal_those_with(case: Case, norm_position: str) -> None:
    model = case.model(mem_len=5, norm_position=norm_position)
    reset = torch.zeros_like(ids_of(), dtype=torch.bool)
    reset[0, [3, 9]] = reset[1, 8] = True
    gated = any(scheme.gates() for scheme in model.schemes_of_layers())
    for cuts in CUTS.values():
        for marks in ({}, {"reset_mask": reset}):
            wanted, memory = stream(model, ids_of(), cuts, **marks)
            with torch.no_grad():
                found, same = stream(model, ids_of(), cuts, **marks)
                assert gated != known(model, same)
                forgotten = same.reset(torch.tensor([True, False]))
                after = model(ids_of(), memory=forgotten)
            torch.testing.assert_close((found, same), (wanted, memory), **EXACT)
            plain = model(ids_of(), memory=fresh(forgotten))
            torch.testing.assert_close(after.last_hidden_state, plain.last_hidden_state, **EXACT)


def test_padding_moves_what_is_remembered() -> None:
    model, mask = SHAW.model(mem_len=5), torch.tensor([[1, 0, 1, 1], [0, 0, 1, 1]])
    with torch.no_grad():
        memory = model(ids_of()[:, :4], attention_mask=mask).memory
        assert not known(model, memory)
        memory = model(ids_of()[:, 4:8], memory=memory).memory
        assert known(model, memory)
        found = model(ids_of()[:, 4:8], memory=memory, attention_mask=mask)
    wanted = model(ids_of()[:, 4:8], memory=fresh(memory), attention_mask=mask)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **EXACT)
    torch.testing.assert_close(found.memory, wanted.memory, **EXACT)


def write(model: Any, memory: SegmentMemory) -> None:
    model.layers[1].attention.k_proj.weight.mul_(2)


def write_norm(model: Any, memory: SegmentMemory) -> None:
    model.layers[1].attention_norm.weight.mul_(2)


def replace(model: Any, memory: SegmentMemory) -> None:
    layer = model.layers[0].attention
    layer.v_proj.weight = nn.Parameter(2 * layer.v_proj.weight)


def move(model: Any, memory: SegmentMemory) -> None:
    weight = model.layers[0].attention.v_proj.weight
    weight.data = 2 * weight.data


def load(model: Any, memory: SegmentMemory) -> None:
    model.load_state_dict({name: 2 * weight for name, weight in model.state_dict().items()})


class Adapted(nn.Module):
    """A projection and something beside it, as adapters are put in."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 2 * self.plain(states)


def adapt(model: Any, memory: SegmentMemory) -> None:
    layer = model.layers[0].attention
    layer.k_proj = Adapted(layer.k_proj)


def hook(model: Any, memory: SegmentMemory) -> None:
    model.layers[0].attention.k_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def hook_before(model: Any, memory: SegmentMemory) -> None:
    model.layers[0].attention.v_proj.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def wrap(model: Any, memory: SegmentMemory) -> None:
    plain = model.layers[0].attention.k_proj
    whole = plain.forward
    plain.forward = lambda states: 2 * whole(states)


def parametrise(model: Any, memory: SegmentMemory) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[0].attention.k_proj)
    model.layers[0].attention.k_proj.parametrizations.weight.original0.mul_(2)


def write_memory(model: Any, memory: SegmentMemory) -> None:
    memory.hidden[0].zero_()


CHANGES = [write, write_norm, replace, move, load, adapt, hook, hook_before, wrap, parametrise, write_memory]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nothing_outlives_what_it_was_made_of(change: Callable[[Any, SegmentMemory], None]) -> None:
    model = SHAW.model(mem_len=5)
    memory = stream(model, ids_of(), [4, 4, 3])[1]
    before = model(ids_of(), memory=memory).last_hidden_state
    assert known(model, memory)
    change(model, memory)
    assert not known(model, memory)
    found = model(ids_of(), memory=memory).last_hidden_state
    torch.testing.assert_close(found, model(ids_of(), memory=fresh(memory)).last_hidden_state, **EXACT)
    assert (found - before).abs().max() > 1e-3, "the change matters"


@torch.no_grad()
def test_another_model_projects_anew() -> None:
    model, other = SHAW.model(mem_len=5), SHAW.model(mem_len=5)
    other.layers[0].attention.k_proj.weight.mul_(2)
    memory = stream(model, ids_of(), [4, 4, 3])[1]
    assert known(model, memory) and not known(other, memory) and not known(copy.deepcopy(model), memory)
    found, wanted = (other(ids_of(), memory=kind).last_hidden_state for kind in (memory, fresh(memory)))
    torch.testing.assert_close(found, wanted, **EXACT)


def test_where_nothing_is_known() -> None:
    """With gradients, in another precision, in inference mode, where what is written is not counted, and of any other memory."""
    model = SHAW.model(mem_len=5).float()
    with torch.no_grad():
        memory = stream(model, ids_of(), [4, 4, 3])[1]
        assert known(model, memory) and known(model, memory.detach()) and known(model, memory.to(torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            assert not known(model, memory)
        for other in (fresh(memory), copy.deepcopy(memory), memory.select(torch.tensor([1, 0])), memory.resize(4), None):
            assert not known(model, other)
    assert begin_projections(memory, model.layers, 5) is None
    with torch.inference_mode():
        assert known(model, memory) and not known(model, stream(model, ids_of(), [4, 4, 3])[1])


def test_gradients_reach_the_projections_behind_a_known_memory() -> None:
    model = SHAW.model(mem_len=5)
    with torch.no_grad():
        memory = stream(model, ids_of(), [4, 4, 3])[1]
    weights = [getattr(model.layers[1].attention, name).weight for name in ("k_proj", "v_proj")]
    sums = [model(ids_of(), memory=kind).last_hidden_state.square().sum() for kind in (memory, fresh(memory))]
    found, wanted = (torch.autograd.grad(total, weights) for total in sums)
    torch.testing.assert_close(found, wanted, **EXACT)


@torch.no_grad()
def test_what_is_known_goes_with_the_memory() -> None:
    model = SHAW.model(mem_len=5)
    gc.collect()
    before = len(memory_projections._KEPT)
    memory = stream(model, ids_of(), [4, 4, 3])[1]
    gc.collect()
    assert len(memory_projections._KEPT) == before + 1
    del memory
    gc.collect()
    assert len(memory_projections._KEPT) == before
