"""Rows in which documents run on: however their starts are told, each document is what it is alone."""

from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import Case
from matrix import cases
from matrix import expected
from matrix import ids_of
from pairs import pairs
from transformers import DataCollatorWithFlattening
from transformers import DynamicCache

from hf_relpos.model.position_documents import restarts

EXACT = {"rtol": 1e-9, "atol": 1e-10}
DOCUMENTS = [ids_of(1, length, seed=length) for length in (4, 1, 6, 3)]
ROW = torch.cat(DOCUMENTS, 1)
STARTS = [0, 4, 5, 11]
NUMBERS = torch.cat([torch.arange(document.shape[1]) for document in DOCUMENTS])[None]
RESET = torch.zeros_like(ROW).index_fill(1, torch.tensor(STARTS), 1)
ROPE, ALIBI = Case("decoder", "rope", {}), Case("decoder", "alibi", {})


def packed(**options: Any) -> dict[str, Any]:
    """What transformers' collator makes of the documents."""
    rows = [{"input_ids": document[0].tolist()} for document in DOCUMENTS]
    return dict(DataCollatorWithFlattening(return_tensors="pt", **options)(rows))


def alone(model: Any) -> torch.Tensor:
    return torch.cat([model(document).last_hidden_state for document in DOCUMENTS], 1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", cases())
def test_position_ids_that_begin_anew(case: Case, implementation: str) -> None:
    """As `reset_mask` says it, to the bit, and as each document alone; also where the first document began in another row."""
    model = case.model(attn_implementation=implementation)
    found = model(ROW, position_ids=NUMBERS).last_hidden_state
    assert torch.equal(found, model(ROW, reset_mask=RESET).last_hidden_state)
    torch.testing.assert_close(found, alone(model), **EXACT)
    skipping = 3 * NUMBERS + (NUMBERS > 1)
    pieces = zip(DOCUMENTS, skipping.split([document.shape[1] for document in DOCUMENTS], 1), strict=True)
    wanted = torch.cat([model(document, position_ids=given).last_hidden_state for document, given in pieces], 1)
    torch.testing.assert_close(model(ROW, position_ids=skipping).last_hidden_state, wanted, **EXACT)
    cut = model(ROW[:, 2:], position_ids=NUMBERS[:, 2:]).last_hidden_state
    torch.testing.assert_close(cut[:, 2:], alone(model)[:, 4:], **EXACT)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    ],
)
def test_what_the_collator_of_transformers_hands_over(family: str, options: dict[str, Any]) -> None:
    """In training and out of it, every way to mark documents is one."""
    case = Case(family, "t5", {})
    model, batch = case.model(head=True), packed(**options)
    labels = batch.pop("labels")
    for mode in (model, model.train()):
        found = mode(**batch, labels=labels)
        wanted = mode(ROW, reset_mask=RESET, labels=labels)
        assert torch.equal(found.logits, wanted.logits) and torch.equal(found.loss, wanted.loss)


def test_rows_of_a_batch_are_packed_each_in_its_own_way() -> None:
    model, ids = ALIBI.model(), ids_of()
    numbers = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    found = model(ids, position_ids=numbers).last_hidden_state
    wanted = torch.cat([model(ids[:1, :4]).last_hidden_state, model(ids[:1, 4:]).last_hidden_state], 1)
    torch.testing.assert_close(found[:1], wanted, **EXACT)
    torch.testing.assert_close(found[1:], model(ids[1:]).last_hidden_state, **EXACT)


@pytest.mark.parametrize(
    "numbers, starts",
    [
        ([0, 1, 2, 0, 1, 0, 1, 2], [3, 5]),
        ([5, 6, 7, 0, 1, 2, 3, 4], [3]),
        ([0, 2, 9, 0, 5, 5, 0, 1], [3, 6]),
        ([0, 0, 1, 2, 0, 0, 1, 2], [1, 4, 5]),
        ([0, 1, 2, 0, 0, 0, 0, 0], [3, 4, 5, 6, 7]),
        ([0, 0, 1, 1, 2, 2, 3, 3], []),
        ([0, 0, 1, 1, 0, 0, 1, 1], [4]),
        ([0, 0, 0, 0, 0, 0, 0, 0], []),
        ([7, 3, 6, 2, 5, 1, 4, 0], []),
        ([2, 3, 4, 2, 3, 2, 3, 4], []),
        ([-2, -1, 0, 1, 2, 3, 4, 5], []),
        ([3, 4, 5, 6, 7, 8, 9, 10], []),
    ],
    ids=lambda given: " ".join(map(str, given)),
)
def test_where_numbers_begin_anew(numbers: list[int], starts: list[int]) -> None:
    """Each corner case of the docstring of `restarts`."""
    assert restarts(torch.tensor([numbers]))[0].nonzero()[:, 0].tolist() == starts


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_what_keeps_numbers_from_marking_documents(family: str) -> None:
    """A field of the configuration, an attention mask and a `reset_mask` leave numbers their other meaning: who stands where."""
    case = Case(family, "alibi", {})
    off, model = case.model(position_ids_mark_documents=False), case.model()
    wanted = expected(off, ROW, position=NUMBERS)
    ones = {"attention_mask": torch.ones_like(ROW)}
    torch.testing.assert_close(off(ROW, position_ids=NUMBERS).last_hidden_state, wanted, **EXACT)
    torch.testing.assert_close(model(ROW, position_ids=NUMBERS, **ones).last_hidden_state, wanted, **EXACT)
    one = model(ROW, position_ids=NUMBERS, reset_mask=torch.zeros_like(ROW)).last_hidden_state
    torch.testing.assert_close(one, wanted, **EXACT)


def test_a_cache_and_a_memory_leave_numbers_their_meaning() -> None:
    """What is asked to make a cache or to read one numbers tokens; a cache that nobody asked for is not made."""
    model = ROPE.model()
    wanted = expected(model, ROW, position=NUMBERS)
    for given in ({"use_cache": True}, {"cache": DynamicCache()}):
        output = model(ROW, position_ids=NUMBERS, **given)
        torch.testing.assert_close(output.last_hidden_state, wanted, **EXACT)
        assert output.cache.get_seq_length() == ROW.shape[1]
    assert model(ROW, position_ids=NUMBERS).cache is None
    assert model(ROW, position_ids=NUMBERS * 2 + 1).cache is not None, "these only number tokens"
    for given in ({"use_cache": True}, {"cache": DynamicCache()}):
        with pytest.raises(ValueError, match="a KV cache continues one document"):
            model(ROW, seq_idx=packed(return_seq_idx=True)["seq_idx"], **given)
    remembering = ROPE.model(mem_len=5)
    memory = remembering(ROW, position_ids=NUMBERS).memory
    assert memory.length.tolist() == [3], "what is remembered is the last document"
    numbers = torch.cat([torch.arange(5)[None], NUMBERS], 1)
    found = remembering(ROW, position_ids=numbers, memory=memory).memory
    assert found.length.tolist() == [5], "beside a memory they number tokens"


def test_gradient_checkpointing_makes_no_cache_to_ask_for() -> None:
    model = ROPE.model().train()
    model.gradient_checkpointing_enable()
    found = model(ROW, position_ids=NUMBERS, use_cache=True).last_hidden_state
    torch.testing.assert_close(found, alone(model.eval()), **EXACT)


def test_marks_that_do_not_fit() -> None:
    model = ROPE.model()
    with pytest.raises(ValueError, match=r"seq_idx of \(1, 3\) is refused: expected whole numbers of shape \(2, 11\)"):
        model(ids_of(), seq_idx=torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cu_seq_lens_q=\[0, 11, 22\] is refused for an input of shape \(2, 11\)"):
        model(ids_of(), cu_seq_lens_q=torch.tensor([0, LENGTH, BATCH * LENGTH]))
    with pytest.raises(ValueError, match=r"cu_seq_lens_q=\[0, 4\] is refused .* from 0 to 14"):
        model(ROW, cu_seq_lens_q=torch.tensor([0, 4]))


def test_encoder_decoders_only_number() -> None:
    """Nothing pairs the documents of the source with those of the target: so none are found, and the field is refused."""
    pair = next(given.values[0] for given in pairs() if given.id == "rope")
    with pytest.raises(ValueError, match="position_ids_mark_documents=True is refused for an encoder-decoder: documents of"):
        pair.config(position_ids_mark_documents=True)
    model = pair.model()
    states = model(ROW, decoder_input_ids=ROW, position_ids=NUMBERS, decoder_position_ids=NUMBERS, use_cache=False)
    masked = {"attention_mask": torch.ones_like(ROW), "decoder_attention_mask": torch.ones_like(ROW)}
    wanted = model(ROW, decoder_input_ids=ROW, position_ids=NUMBERS, decoder_position_ids=NUMBERS, use_cache=False, **masked)
    torch.testing.assert_close(states.last_hidden_state, wanted.last_hidden_state, **EXACT)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scheme", ["rope", "nope"])
def test_traced(scheme: str, training: bool) -> None:
    """A traced pass, in which no number can be looked at, keeps documents apart as well."""
    model = Case("decoder", scheme, {}).model(attn_implementation="sdpa").train(training)
    wanted = model(ROW, position_ids=NUMBERS)

    def whole(ids: torch.Tensor, numbers: torch.Tensor) -> Any:
        return model(ids, position_ids=numbers)

    found = torch.compile(whole, backend="eager", fullgraph=True)(ROW, NUMBERS)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **EXACT)
    assert found.cache is None and wanted.cache is None
