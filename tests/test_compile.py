"""`torch.compile` in one graph and `torch.export` with a free length, for every scheme.

One scheme for each shape of score term runs by default; the others are marked slow.
"""

from typing import Any

import pytest
import torch
from matrix import LENGTH
from matrix import Case
from matrix import cases
from matrix import ids_of

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
QUICK = {"rope", "t5", "transformer_xl", "shaw"}


def some(**kinds: Any) -> list[Any]:
    """Cases of the matrix, all but the quick ones marked slow."""
    given = [(param.values[0], param.id) for param in cases(**kinds)]
    return [pytest.param(case, id=name, marks=[] if case.scheme in QUICK else pytest.mark.slow) for case, name in given]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any) -> Any:
    """One graph or an error; the backend keeps the operations as they are, so nothing is built for the machine."""
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def without_cache(case: Case) -> dict[str, Any]:
    return {"use_cache": False} if case.family == "decoder" else {}


@pytest.mark.parametrize("case", some())
def test_training_step_in_one_graph(case: Case) -> None:
    model, ids = case.model(head=True, attn_implementation=None), ids_of()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    results = []
    for runner in (model, compiled(model)):
        output = runner(ids, attention_mask=mask, labels=labels, **without_cache(case))
        results.append((output.loss, *torch.autograd.grad(output.loss, list(model.parameters()))))
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("case", some(family="decoder"))
def test_position_ids_in_one_graph(case: Case) -> None:
    """A compiler knows no distances of given position ids; without one, wide gaps between them take another way."""
    model, ids = case.model(head=True, attn_implementation=None), ids_of()
    numbers = torch.arange(ids.shape[1])[None] * (1 if case.scheme == "learned_absolute" else 40)
    results = []
    for runner in (model, compiled(model)):
        loss = runner(ids, torch.ones_like(ids), position_ids=numbers, labels=ids, use_cache=False).loss
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("case", some(family="decoder", memory=True))
@torch.no_grad()
def test_segments_in_one_graph(case: Case) -> None:
    model, ids = case.model(mem_len=5, attn_implementation=None), ids_of()
    runner, memory, states = compiled(model), None, []
    for part in (ids[:, :6], ids[:, 6:]):
        output = runner(part, memory=memory)
        memory = output.memory
        states.append(output.last_hidden_state)
    wanted = case.model(sliding_window=6)(ids).last_hidden_state
    torch.testing.assert_close(torch.cat(states, 1), wanted, **CLOSE)


class Exportable(torch.nn.Module):
    """A model as a function of ids and mask."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.model(attn_implementation=None)
        self.settings = without_cache(case)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(ids, attention_mask=mask, **self.settings).last_hidden_state


@pytest.mark.parametrize("case", some())
@torch.no_grad()
def test_export_with_a_free_length(case: Case) -> None:
    model, ids = Exportable(case), ids_of()
    length = torch.export.Dim("length", min=2, max=512)
    shapes = ({1: length}, {1: length})
    program = torch.export.export(model, (ids, torch.ones_like(ids)), dynamic_shapes=shapes, strict=False).module()
    for size in (LENGTH, 23):
        ids = ids_of(2, size, seed=size)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        valid = mask.bool()
        torch.testing.assert_close(program(ids, mask)[valid], model(ids, mask)[valid], **CLOSE)
