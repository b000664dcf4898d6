"""A pass on an accelerator does not wait for numbers of its tensors, but where that is listed here with the reason.

Tried on a processor, told to be read as an accelerator is: every read of a number goes through one of three operators of torch.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import Case
from matrix import cases
from matrix import ids_of
from torch.utils._python_dispatch import TorchDispatchMode

from hf_relpos.model import attention
from hf_relpos.model import blockwise_forward
from hf_relpos.model import positions

MODEL = Path(positions.__file__).parent
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::unique_consecutive")

FIRE = {
    "scheme_dense.py": "whether all queries look within its learned threshold, and which of its units differ, decide on shapes"
}
MASK = {"position_builder.py": "a mask without padding, or with padding at the ends alone, makes no tensor of all pairs"}
XPOS = {
    "scheme_rotary.py": "behind padding, how far queries are apart; beyond the range of half precision its numbers would be wrong"
}
ANSWERS = {"head_classification.py": "padding that only input_ids tell of"}


class Watch(TorchDispatchMode):
    """Notes which files of the model let the processor wait."""

    def __init__(self) -> None:
        super().__init__()
        self.files: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in WAITING:
            frames = [Path(frame.filename) for frame in traceback.extract_stack()]
            own = [path.name for path in frames if path.parent == MODEL and path.name != "positions.py"]
            self.files.add(own[-1] if own else "outside")
        return func(*args, **(kwargs or {}))


def waits(work: Callable[[], Any]) -> set[str]:
    """Return the files of the model that read numbers while something runs."""
    with Watch() as watch:
        work()
    return watch.files


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "READ_FREELY", ())
    monkeypatch.setattr(blockwise_forward, "BLOCK", 4)
    monkeypatch.setattr(attention, "MIN_PAIRS", 0)


def allowed(case: Case, **more: str) -> set[str]:
    """Return the files that may wait in a pass of a case."""
    return set(more) | (set(FIRE) if "fire" in str((case.scheme, case.parameters)) else set())


def step(model: Any, **given: Any) -> None:
    """Make a train step's forward and backward pass."""
    model(ids_of(), **given).last_hidden_state.sum().backward()


@pytest.mark.parametrize("case", cases(variants=True))
def test_train_step(case: Case) -> None:
    model = case.model(attn_implementation="sdpa").train()
    assert waits(lambda: step(model)) <= allowed(case)


@pytest.mark.parametrize("case", cases())
def test_padding(case: Case) -> None:
    mask = torch.ones(BATCH, LENGTH).index_fill(1, torch.arange(3), 0)
    model = case.model(attn_implementation="sdpa").train()
    found = waits(lambda: step(model, attention_mask=mask))
    assert found <= allowed(case, **MASK, **(XPOS if "xpos" in case.scheme else {}))


@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_memory(case: Case) -> None:
    model = case.model(attn_implementation="sdpa", mem_len=6, sliding_window=None).train()
    memory = model(ids_of()).memory.detach()
    assert waits(lambda: step(model, memory=memory)) <= allowed(case, **(XPOS if "xpos" in case.scheme else {}))


@pytest.mark.parametrize("case", cases("decoder"))
def test_decoding(case: Case) -> None:
    model = case.model(attn_implementation="sdpa")
    with torch.no_grad():
        cache = model(ids_of(), use_cache=True).cache
        assert waits(lambda: model(ids_of(length=1), cache=cache)) <= allowed(case)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_losses(family: str) -> None:
    model = Case(family, "alibi", {}).model(head=True, attn_implementation="sdpa").train()
    assert not waits(lambda: model(ids_of(), labels=ids_of()).loss.backward())


def test_a_read_is_seen() -> None:
    assert waits(lambda: torch.ones(1).item()) == {"outside"}
    assert waits(lambda: positions.known(torch.ones(1))) == {"outside"}
