"""Segment memory of encoders: what is remembered, and that nothing else is."""

from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import Case
from matrix import cases
from matrix import ids_of

from hf_relpos import RelPosEncoderConfig

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
BACKENDS = [("eager", "auto"), ("sdpa", "dense"), ("sdpa", "blockwise")]


def encoder(given: Case, **fields: Any) -> Any:
    return given.model(**{"mem_len": 3 * LENGTH, **fields})


def backend_of(given: Case, number: int) -> dict[str, str]:
    """A backend that can do the scheme, another one as the numbers go by."""
    implementation, path = BACKENDS[number % len(BACKENDS)]
    fused = given.scheme != "shaw" and not (given.scheme == "kerple" and given.parameters)
    return {"attn_implementation": implementation if fused else "eager", "attention_path": path if fused else "auto"}


@pytest.mark.parametrize("number", range(len(BACKENDS)))
@pytest.mark.parametrize("given", cases("encoder", memory=True))
@torch.no_grad()
def test_three_segments_are_one_pass(given: Case, number: int) -> None:
    """With a memory that holds all: each segment sees what came before and itself, as one pass does under such a mask."""
    model = encoder(given, **backend_of(given, number))
    texts, memory, found = [ids_of(seed=seed) for seed in range(3)], None, []
    for ids in texts:
        output = model(ids, memory=memory)
        memory, found = output.memory, [*found, output.last_hidden_state]
    segment = torch.arange(3 * LENGTH) // LENGTH
    sees = (segment[:, None] >= segment)[None, None].expand(BATCH, -1, -1, -1)
    whole = encoder(given)(torch.cat(texts, 1), attention_mask=sees)
    torch.testing.assert_close(torch.cat(found, 1), whole.last_hidden_state, **CLOSE)
    assert memory.length.tolist() == [3 * LENGTH] * BATCH and not memory.hidden.requires_grad
    assert not torch.allclose(found[1], model(texts[1]).last_hidden_state, atol=1e-3), "memory changes nothing"


@pytest.mark.parametrize("reuse_len", [None, 4])
@pytest.mark.parametrize("place", [slice(0, 4), slice(7, 11), slice(3, 6)], ids=["left", "right", "middle"])
@pytest.mark.parametrize("scheme", ["xlnet", "transformer_xl", "t5", "rope"])
@torch.no_grad()
def test_padding_is_not_remembered(scheme: str, place: slice, reuse_len: int | None) -> None:
    """A padded row and the same row alone remember the same tokens, and the next segment cannot tell."""
    model = encoder(Case("encoder", scheme, {}), reuse_len=reuse_len)
    ids, mask = ids_of(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    ids[0, place], mask[0, place] = 0, 0
    padded, alone = model(ids, attention_mask=mask).memory, model(ids[:1, mask[0].bool()]).memory
    count = int(mask[0].sum()) if reuse_len is None else reuse_len
    assert padded.length.tolist() == [count, LENGTH if reuse_len is None else reuse_len]
    assert alone.length.tolist() == [count]
    torch.testing.assert_close(padded.hidden[0, :, -count:], alone.hidden[0, :, -count:], **CLOSE)
    following = ids_of(seed=1)
    found = model(following, memory=padded).last_hidden_state[:1]
    torch.testing.assert_close(found, model(following[:1], memory=alone).last_hidden_state, **CLOSE)
    ids[0, place] = 5
    assert torch.equal(model(ids, attention_mask=mask).memory.hidden[0, :, -count:], padded.hidden[0, :, -count:])


@pytest.mark.parametrize("reuse_len", [None, 8])
@torch.no_grad()
def test_documents_are_kept_apart(reuse_len: int | None) -> None:
    """Packed documents: nothing crosses a boundary, and only the last one that is remembered goes on."""
    model = encoder(Case("encoder", "xlnet", {}), reuse_len=reuse_len)
    before, ids = ids_of(seed=1), ids_of()
    reset = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    reset[0, 5], reset[1, 0] = True, True
    memory = model(before).memory
    output = model(ids, memory=memory, reset_mask=reset)
    states = output.last_hidden_state
    first, second = model(ids[:1, :5], memory=memory.select(torch.tensor([0]))), model(ids[:1, 5:])
    torch.testing.assert_close(states[:1], torch.cat([first[0], second[0]], 1), **CLOSE)
    torch.testing.assert_close(states[1:], model(ids[1:]).last_hidden_state, **CLOSE)
    kept = LENGTH if reuse_len is None else reuse_len
    assert output.memory.length.tolist() == [kept - 5, kept]
    after = model(ids_of(seed=2), memory=output.memory).last_hidden_state[:1]
    lone = encoder(Case("encoder", "xlnet", {}), reuse_len=None if reuse_len is None else reuse_len - 5)
    wanted = lone(ids_of(seed=2)[:1], memory=lone(ids[:1, 5:]).memory).last_hidden_state
    torch.testing.assert_close(after, wanted, **CLOSE)


@torch.no_grad()
def test_what_is_reused() -> None:
    """The first tokens of each segment, for segments that overlap; and no more slots than there are."""
    given = Case("encoder", "xlnet", {})
    model, ids = encoder(given, mem_len=6, reuse_len=4), ids_of()
    states = model(ids, output_hidden_states=True).hidden_states
    memory = model(ids).memory
    assert memory.length.tolist() == [4, 4]
    for layer in range(2):
        torch.testing.assert_close(memory.hidden[:, layer, 2:], states[layer][:, :4], **CLOSE)
    assert model(ids, memory=memory).memory.length.tolist() == [6, 6]
    longer = encoder(given, mem_len=6, reuse_len=40)
    assert torch.equal(longer(ids).memory.hidden, encoder(given, mem_len=6)(ids).memory.hidden)


def test_heads_take_and_give_memory() -> None:
    """The language-model head returns it, as the last of its outputs; gradients do not flow back through it."""
    model = Case("encoder", "xlnet", {}).model(head=True, mem_len=8)
    first = model(ids_of(), labels=ids_of())
    assert list(first.keys()) == ["loss", "logits", "memory"] and not first.memory.hidden.requires_grad
    found = model(ids_of(seed=1), memory=first.memory)
    assert not torch.allclose(found.logits, model(ids_of(seed=1)).logits)
    assert torch.equal(model(ids_of(seed=1), memory=tuple(first.memory), return_dict=False)[0], found.logits)


def test_no_memory_unless_asked_for() -> None:
    assert list(Case("encoder", "xlnet", {}).model()(ids_of()).keys()) == ["last_hidden_state"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mem_len": -1}, "mem_len=-1 must be 0"),
        ({"reuse_len": 4}, "reuse_len=4 needs a memory: mem_len=0"),
        ({"mem_len": 4, "reuse_len": 0}, "reuse_len=0 must be at least 1, or None"),
        ({"mem_len": 4, "position_scheme": "sinusoidal"}, "'sinusoidal' is refused for mem_len=4"),
        ({"mem_len": 4, "position_scheme": "learned_absolute"}, "'learned_absolute' is refused for mem_len=4"),
    ],
)
def test_refused_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelPosEncoderConfig(**{"position_scheme": "xlnet", **fields})


def test_refused_memories() -> None:
    model = encoder(Case("encoder", "xlnet", {}), mem_len=5)
    memory = model(ids_of()).memory
    with pytest.raises(ValueError, match=r"the shape \(2, 2, 5, 24\), expected \(3, 2, 5, 24\)"):
        model(ids_of(3), memory=memory)
    with pytest.raises(ValueError, match=r"memory.length must lie between 0 and mem_len=5, got \[6, 6\]"):
        model(ids_of(), memory=memory._replace(length=memory.length + 1))
    with pytest.raises(ValueError, match="mem_len=0"):
        Case("encoder", "xlnet", {}).model()(ids_of(), memory=memory)
