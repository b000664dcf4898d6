"""Segment memory: however a document is cut, what comes out is what one pass over all of it gives."""

from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import SIZES
from matrix import Case
from matrix import cases
from matrix import expected
from matrix import ids_of
from matrix import visibility

from hf_relpos import SegmentMemory

EXACT = {"rtol": 1e-9, "atol": 1e-10}
CUTS = {
    "whole": [11],
    "tokens": [1] * 11,
    "uneven": [3, 1, 7],
    "longer than memory": [8, 3],
    "shorter than memory": [2, 2, 3, 2, 2],
}
ROPE = Case("decoder", "rope", {})


def stream(model: Any, ids: torch.Tensor, cuts: list[int], memory: Any = None, **inputs: Any) -> tuple[Any, Any]:
    """Hidden states of all segments, joined, and the last memory; tensors in `inputs` are cut like the tokens."""
    states, start = [], 0
    for length in cuts:
        part = slice(start, start + length)
        output = model(ids[:, part], memory=memory, **{name: tensor[:, part] for name, tensor in inputs.items()})
        states.append(output.last_hidden_state)
        memory, start = output.memory, start + length
    return torch.cat(states, 1), memory


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("case", cases("decoder", memory=True, variants=True))
def test_segments_equal_one_windowed_pass(case: Case, norm_position: str) -> None:
    model = case.model(mem_len=5, norm_position=norm_position)
    assert model.config.sliding_window == 6, "with memory the window is what every token can have"
    ids = ids_of()
    wanted = case.model(sliding_window=6, norm_position=norm_position)(ids).last_hidden_state
    for cuts in CUTS.values():
        torch.testing.assert_close(stream(model, ids, cuts)[0], wanted, **EXACT)


@pytest.mark.parametrize("mem_len, window", [(1, "auto"), (8, 4), (20, "auto")])
@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_any_window_within_the_memory(case: Case, mem_len: int, window: Any) -> None:
    model = case.model(mem_len=mem_len, sliding_window=window)
    wanted = case.model(sliding_window=model.config.sliding_window)(ids_of()).last_hidden_state
    for cuts in CUTS.values():
        torch.testing.assert_close(stream(model, ids_of(), cuts)[0], wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_gradients_through_segments(case: Case) -> None:
    """A memory that is not detached carries the gradients of one windowed pass."""
    ids, direction = ids_of(), torch.randn(BATCH, LENGTH, SIZES["hidden_size"], dtype=torch.float64)

    def gradients(model: Any, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((states * direction).sum(), list(model.parameters()))

    model = case.model(mem_len=5, detach_memory=False)
    whole = case.model(sliding_window=6)
    wanted = gradients(whole, whole(ids).last_hidden_state)
    torch.testing.assert_close(gradients(model, stream(model, ids, [3, 1, 7])[0]), wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_original_memory(case: Case) -> None:
    """`sliding_window=None` is the Transformer-XL of the paper: all of the memory and the own segment are seen."""
    model, ids = case.model(mem_len=3, sliding_window=None), ids_of()
    starts = [0] * 4 + [4] * 4 + [8] * 3

    def hidden(b: int, i: int, j: int) -> bool:
        return j < starts[i] - 3

    wanted = expected(model, ids, visibility(model.config, BATCH, LENGTH, hidden))
    torch.testing.assert_close(stream(model, ids, [4, 4, 3])[0], wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_padding_in_segments(case: Case) -> None:
    """Padding left, right or between tokens, or a whole row of it, is neither seen nor remembered."""
    model = case.model(mem_len=5)
    masks = [torch.tensor(rows) for rows in ([[1, 1, 1, 1], [0, 0, 1, 1]], [[1, 0, 0, 1], [0] * 4], [[1, 1, 0, 0], [1] * 4])]
    streams = [ids_of(1, sum(int(mask[row].sum()) for mask in masks), seed=row) for row in range(BATCH)]
    wanted = [stream(model, ids, [ids.shape[1]])[0][0] for ids in streams]
    memory, found, used = None, [[], []], [0, 0]
    for mask in masks:
        ids = torch.zeros(BATCH, 4, dtype=torch.long)
        for row in range(BATCH):
            count = int(mask[row].sum())
            ids[row, mask[row].bool()] = streams[row][0, used[row] : used[row] + count]
            used[row] += count
        output = model(ids, attention_mask=mask, memory=memory)
        memory = output.memory
        for row in range(BATCH):
            found[row].append(output.last_hidden_state[row, mask[row].bool()])
    assert memory.length.tolist() == [5, 5]
    for row in range(BATCH):
        torch.testing.assert_close(torch.cat(found[row]), wanted[row], **EXACT)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_documents_in_segments(case: Case, cuts: list[int]) -> None:
    """Nothing before the first token of a document is seen, in memory or in segment, wherever the cut is."""
    model, ids, reset = case.model(mem_len=5), ids_of(), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    reset[0, [0, 3, 9]] = True
    reset[1, 8] = True
    found, memory = stream(model, ids, cuts, reset_mask=reset)
    whole = case.model(sliding_window=6)
    for row, ends in enumerate(([0, 3, 9, 11], [0, 8, 11])):
        for start, end in zip(ends, ends[1:], strict=False):
            alone = whole(ids[row : row + 1, start:end]).last_hidden_state[0]
            torch.testing.assert_close(found[row, start:end], alone, **EXACT)
    assert memory.length.tolist() == [2, 3]


@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_rows_of_memory(case: Case) -> None:
    """Rows can be reordered, repeated, forgotten; more slots change nothing that the window does not see."""
    model, ids = case.model(mem_len=5), ids_of()
    first, second = ids[:, :6], ids[:, 6:]
    memory = model(first).memory
    wanted = model(second, memory=memory).last_hidden_state
    rows = torch.tensor([1, 1, 0])
    torch.testing.assert_close(model(second[rows], memory=memory.select(rows)).last_hidden_state, wanted[rows], **EXACT)
    forgotten = model(second, memory=memory.reset(torch.tensor([True, False]))).last_hidden_state
    torch.testing.assert_close(forgotten[0], model(second).last_hidden_state[0], **EXACT)
    torch.testing.assert_close(forgotten[1], wanted[1], **EXACT)
    wider = case.model(mem_len=9, sliding_window=6)
    torch.testing.assert_close(wider(second, memory=memory.resize(9)).last_hidden_state, wanted, **EXACT)
    torch.testing.assert_close(memory.resize(9).resize(5).hidden, memory.hidden, rtol=0, atol=0)
    with pytest.raises(ValueError, match="a memory cannot have -3 slots"):
        memory.resize(-3)


def test_shape_order_and_reading_only() -> None:
    """Always `mem_len` slots, right aligned, batch first; neither the given memory nor the model changes."""
    model, ids = ROPE.model(mem_len=5, head=True), ids_of()
    memory = model(ids[:, :3]).memory
    assert memory.hidden.shape == (BATCH, SIZES["num_hidden_layers"], 5, SIZES["hidden_size"])
    assert memory.length.tolist() == [3, 3] and not memory.hidden.requires_grad
    embedded = model.get_input_embeddings()(ids[:, :3])
    assert torch.equal(memory.hidden[:, 0, 2:], embedded), "slot -1 of layer 0 holds the newest embedding"
    before = SegmentMemory(memory.hidden.clone(), memory.length.clone())
    again = [model(ids[:, 3:], memory=memory).logits for _ in range(2)]
    assert torch.equal(*again) and torch.equal(memory.hidden, before.hidden) and torch.equal(memory.length, before.length)


def test_memory_stands_in_the_output() -> None:
    model, ids = ROPE.model(mem_len=5, head=True), ids_of()
    assert model(ids, return_dict=False)[1].length.tolist() == [5, 5]
    assert model.train()(ids, labels=ids).memory.length.tolist() == [5, 5]
    assert ROPE.model(head=True)(ids, use_cache=False).memory is None
    cached = model(ids, use_cache=True)
    assert cached.memory is None and cached.cache.get_seq_length() == LENGTH


def broken_memories() -> dict[str, tuple[Any, str]]:
    size = SIZES["hidden_size"]
    length = torch.full((BATCH,), 5)
    return {
        "batch": (SegmentMemory(torch.zeros(3, 2, 5, size), length), r"\(3, 2, 5, 24\), expected \(2, 2, 5, 24\)"),
        "layers": (SegmentMemory(torch.zeros(2, 3, 5, size), length), r"\(2, 3, 5, 24\), expected \(2, 2, 5, 24\)"),
        "slots": (SegmentMemory(torch.zeros(2, 2, 4, size), length), r"\(2, 2, 4, 24\), expected \(2, 2, 5, 24\)"),
        "size": (SegmentMemory(torch.zeros(2, 2, 5, 8), length), r"\(2, 2, 5, 8\), expected \(2, 2, 5, 24\)"),
        "dtype": (SegmentMemory(torch.zeros(2, 2, 5, size).half(), length), "dtype torch.float16.*torch.float32"),
        "length shape": (SegmentMemory(torch.zeros(2, 2, 5, size), length[:1]), r"length has the shape \(1,\)"),
        "length dtype": (SegmentMemory(torch.zeros(2, 2, 5, size), length.float()), "float32, expected .2,. integers"),
        "length range": (
            SegmentMemory(torch.zeros(2, 2, 5, size), length + 1),
            r"between 0 and mem_len=5, got \[6, 6\]",
        ),
        "kind": (torch.zeros(2, 2, 5, size), "must be a SegmentMemory.*got Tensor"),
        "a number as length": (
            SegmentMemory(torch.zeros(2, 2, 5, size), 5),
            "of two tensors, got SegmentMemory of Tensor, int",
        ),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("memory, message", broken_memories().values(), ids=broken_memories())
def test_memory_of_another_model_is_refused(memory: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ROPE.model(mem_len=5, dtype=torch.float32)(ids_of(), memory=memory)


def test_memory_without_use_is_refused() -> None:
    model, ids = ROPE.model(mem_len=5), ids_of()
    memory = model(ids).memory
    with pytest.raises(ValueError, match="mem_len=0"):
        ROPE.model()(ids, memory=memory)
    with pytest.raises(ValueError, match="exclude each other"):
        model(ids, memory=memory, use_cache=True)
    with pytest.raises(ValueError, match="exclude each other"):
        model(ids, memory=memory, cache=model(ids, use_cache=True).cache)
