"""Numbers that the caller gives: skipping, repeating and interleaved ones mean the same in one pass, in a cache and beside a memory."""

from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import Case
from matrix import cases
from matrix import expected
from matrix import ids_of
from pairs import Pair
from pairs import pairs
from transformers import DynamicCache
from transformers import StaticCache

from hf_relpos import RelPosEncoderModel
from hf_relpos.model.scheme_registry import scheme_class

EXACT = {"rtol": 1e-9, "atol": 1e-10}
NUMBERS = {
    "random": torch.tensor([[0, 3, 4, 9, 10, 17, 21, 22, 30, 31, 40], [2, 3, 5, 8, 13, 14, 15, 20, 26, 33, 34]]),
    "stretched": torch.arange(LENGTH)[None] * 3 + 7,
    "repeated": torch.tensor([[0, 0, 1, 1, 1, 2, 2, 5, 5, 6, 6]]),
    "far": torch.tensor([[0, 1, 2, 90, 91, 92, 300, 301, 301, 470, 471]]),
    "interleaved": torch.tensor([[0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7], [7, 3, 10, 6, 2, 9, 5, 1, 8, 4, 0]]),
}
ROWS = {
    "of each row": torch.cat([*NUMBERS.values()]),
    "of all rows": NUMBERS["far"],
}
"""All of them at once, as rows of a batch, and one row for a whole batch."""
PORTIONS = {"tokens": [1] * 11, "chunks": [3, 1, 5, 2], "prompt": [8, 1, 1, 1]}
ROPE, ALIBI = Case("decoder", "rope", {}), Case("decoder", "alibi", {})
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def decode(model: Any, ids: torch.Tensor, numbers: torch.Tensor, portions: list[int], cache: Any = None, **given: Any) -> Any:
    """Hidden states of all portions, each given its own numbers alone, and the cache."""
    states, start = [], 0
    for length in portions:
        part = slice(start, start + length)
        mask = {name: mask[:, : part.stop] for name, mask in given.items()}
        output = model(ids[:, part], position_ids=numbers[:, part], cache=cache, use_cache=True, **mask)
        states.append(output.last_hidden_state)
        cache, start = output.cache, part.stop
    return torch.cat(states, 1), cache


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "random"])
@pytest.mark.parametrize("case", cases())
def test_formula_on_the_given_numbers(case: Case, name: str) -> None:
    """Random ones, and gradients, are those of `test_matrix.py`."""
    numbers = NUMBERS[name]
    model, ids = case.model(), ids_of()
    found = model(ids, position_ids=numbers).last_hidden_state
    torch.testing.assert_close(found, expected(model, ids, position=numbers), **EXACT)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("numbers", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("case", cases("decoder"))
def test_decoding_equals_one_pass(case: Case, numbers: torch.Tensor, window: int | None) -> None:
    """The cache knows the numbers of its tokens, one that slides and one of a fixed size too; without a window none slides."""
    model, ids = case.model(sliding_window=window), ids_of(max(BATCH, len(numbers)))
    wanted = model(ids, position_ids=numbers, use_cache=False).last_hidden_state
    for portions in PORTIONS.values():
        for cache in (None, StaticCache(config=model.config, max_cache_len=16), DynamicCache())[: 3 if window else 2]:
            torch.testing.assert_close(decode(model, ids, numbers, portions, cache)[0], wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder"))
def test_padding(case: Case) -> None:
    """Left padding, its numbers as transformers' generation fills them, changes nothing."""
    model, ids, mask = case.model(), ids_of(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    numbers = (2 * (mask.cumsum(-1) - 1)).masked_fill(mask == 0, 1)
    wanted = model(ids[:1, 4:], position_ids=numbers[:1, 4:]).last_hidden_state
    for portions in PORTIONS.values():
        for cache in (None, StaticCache(config=model.config, max_cache_len=16)):
            found = decode(model, ids, numbers, portions, cache, attention_mask=mask)[0]
            torch.testing.assert_close(found[:1, 4:], wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder"))
def test_numbers_follow_the_cache(case: Case) -> None:
    """Reordered, cropped and emptied, the cache still knows which token has which number."""
    model, ids, numbers, rows = case.model(), ids_of(), NUMBERS["random"], torch.tensor([1, 0])
    _, cache = decode(model, ids, numbers, [9])
    cache.reorder_cache(rows)
    wanted = model(ids[rows], position_ids=numbers[rows]).last_hidden_state
    found = model(ids[rows][:, 9:], cache=cache, position_ids=numbers[rows][:, 9:]).last_hidden_state
    torch.testing.assert_close(found, wanted[:, 9:], **EXACT)
    cache.crop(6 - cache.get_seq_length())
    found = model(ids[rows][:, 6:], cache=cache, position_ids=numbers[rows][:, 6:]).last_hidden_state
    torch.testing.assert_close(found, wanted[:, 6:], **EXACT)
    cache.crop(-LENGTH)
    torch.testing.assert_close(model(ids, cache=cache).last_hidden_state, model(ids).last_hidden_state, **EXACT)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("case", cases("decoder"))
def test_numbers_begin_behind_counted_tokens(case: Case, window: int | None) -> None:
    """Cached tokens that were not numbered are numbered by counting them; the numbers of all tokens may be given instead."""
    model, ids, numbers = case.model(sliding_window=window), ids_of(), torch.tensor([[*range(6), 8, 9, 9, 12, 15]])
    wanted = model(ids, position_ids=numbers, use_cache=False).last_hidden_state[:, 6:]
    for portions in ([5], [2, 3]):
        for make in (DynamicCache, lambda **given: StaticCache(max_cache_len=16, **given)):
            for first in (0, 6, 8):
                cache = make(config=model.config)
                model(ids[:, :6], cache=cache)
                states = []
                for start, stop in zip([6, 6 + portions[0]], [6 + portions[0], 11], strict=True):
                    if start < stop:
                        given = numbers[:, start if first == 6 or start > 6 else 0 : stop] if first < 8 else numbers[:, :stop]
                        states.append(model(ids[:, start:stop], cache=cache, position_ids=given).last_hidden_state)
                torch.testing.assert_close(torch.cat(states, 1), wanted, **EXACT)


@pytest.mark.parametrize("window, kind", [(None, "dynamic"), (4, "dynamic"), (None, "static"), (4, "static")])
def test_a_refused_call_leaves_the_numbers_alone(window: int | None, kind: str) -> None:
    """What refuses it may stand behind the cache: a mask that does not fit, a position that was not learned."""
    for case in (ROPE, Case("decoder", "learned_absolute", {})):
        model, ids, numbers = case.model(sliding_window=window, max_position_embeddings=64), ids_of(), NUMBERS["random"]
        wanted = model(ids, position_ids=numbers, use_cache=False).last_hidden_state
        cache = StaticCache(model.config, max_cache_len=LENGTH) if kind == "static" else DynamicCache(config=model.config)
        decode(model, ids[:, :7], numbers, [5, 2], cache)
        wrong = {"attention_mask": torch.ones(BATCH, 3)} if case is ROPE else {}
        far = numbers[:, 7:9] if case is ROPE else numbers[:, 7:9] + 64
        for _ in range(3):
            with pytest.raises(ValueError, match="attention_mask covers 3 tokens|is beyond the learned positions"):
                model(ids[:, 7:9], position_ids=far, cache=cache, use_cache=True, **wrong)
        found = decode(model, ids[:, 7:], numbers[:, 7:], [2, 2], cache)[0]
        torch.testing.assert_close(found, wanted[:, 7:], **EXACT)


def test_counting_on_behind_numbers_is_refused() -> None:
    for case in (ROPE, ALIBI):
        model, ids = case.model(), ids_of()
        _, cache = decode(model, ids, NUMBERS["random"], [9])
        with pytest.raises(
            ValueError, match="cached tokens were numbered by position_ids: give position_ids of the 2 new tok"
        ):
            model(ids[:, 9:], cache=cache)
    mask = torch.ones(BATCH, LENGTH)
    mask[0, :2] = 0
    cache = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True).cache
    with pytest.raises(
        ValueError, match="those in the cache were counted, padding included: give position_ids from the first"
    ):
        model(ids[:, 9:], attention_mask=mask, cache=cache, position_ids=torch.tensor([[9, 10]]))


@pytest.mark.parametrize(
    "given, message",
    [
        (torch.arange(7)[None], "position_ids number 7 tokens, expected 2 \\(new\\) or 11 \\(all keys\\)"),
        (torch.zeros(3, 2).long(), "shape \\(3, 2\\) and torch.int64 are refused: expected whole numbers, 1 row or 2"),
        (torch.tensor([[0.5, 1.5]]), "torch.float32 are refused: expected whole numbers"),
        (torch.tensor([[True, False]]), "torch.bool are refused: expected whole numbers, 1 row or 2"),
        ([[0, 1]], "of type list are refused: expected a tensor of whole numbers"),
    ],
)
def test_numbers_that_do_not_fit(given: Any, message: str) -> None:
    model, ids = ROPE.model(), ids_of()
    _, cache = decode(model, ids, NUMBERS["random"], [9])
    for used in (cache, model(ids[:, :9], use_cache=True).cache):
        with pytest.raises(ValueError, match=message):
            model(ids[:, 9:], position_ids=given, cache=used)


@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_memory_needs_the_numbers_of_its_slots(case: Case) -> None:
    """A memory holds hidden states and no numbers: those of its slots stand first, those of empty ones are not read."""
    model, ids, numbers = case.model(mem_len=5), ids_of(), NUMBERS["random"]
    wanted = case.model(sliding_window=6)(ids, position_ids=numbers).last_hidden_state
    first = model(ids[:, :3], position_ids=numbers[:, :3])
    torch.testing.assert_close(first.last_hidden_state, wanted[:, :3], **EXACT)
    with pytest.raises(
        ValueError, match="number 3 tokens, but a memory holds no numbers: expected 8, those of its 5 slots first"
    ):
        model(ids[:, 3:6], position_ids=numbers[:, 3:6], memory=first.memory)
    given = torch.cat([torch.full((BATCH, 2), 9), numbers[:, :6]], 1)
    second = model(ids[:, 3:6], position_ids=given, memory=first.memory)
    torch.testing.assert_close(second.last_hidden_state, wanted[:, 3:6], **EXACT)
    last = model(ids[:, 6:], position_ids=numbers[:, 1:], memory=second.memory).last_hidden_state
    torch.testing.assert_close(last, wanted[:, 6:], **EXACT)


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 5}], ids=["full", "window"])
@pytest.mark.parametrize("case", cases("decoder"))
def test_generate(case: Case, fields: dict[str, int]) -> None:
    """What is generated is numbered on from the last number, with any cache and without; beams and a cache in use too."""
    model, ids, numbers = case.model(head=True, **fields), ids_of(length=6), NUMBERS["random"][:, 2:8]
    tokens, places = ids, numbers
    for _ in range(GREEDY["max_new_tokens"]):
        tokens = torch.cat([tokens, model(tokens, position_ids=places, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        places = torch.cat([places, places[:, -1:] + 1], 1)

    def generate(start: torch.Tensor = ids, **given: Any) -> torch.Tensor:
        return model.generate(start, position_ids=numbers, **{**GREEDY, **given})

    assert torch.equal(generate(use_cache=False), tokens)
    assert torch.equal(generate(), tokens)
    assert torch.equal(generate(cache_implementation="static", disable_compile=True), tokens)
    beams = {"num_beams": 3, "length_penalty": 0.0}
    assert torch.equal(generate(**beams), generate(**beams, use_cache=False))
    cache = model(ids[:, :4], position_ids=numbers[:, :4], use_cache=True).cache
    assert torch.equal(generate(cache=cache), tokens)
    cache = model(ids[:, :4], position_ids=numbers[:, :4], use_cache=True).cache
    with pytest.raises(ValueError, match="cached tokens were numbered by position_ids"):
        model.generate(ids, cache=cache, **GREEDY)


def test_generation_from_a_memory_counts() -> None:
    model, ids = ROPE.model(head=True, mem_len=5), ids_of(length=6)
    with pytest.raises(ValueError, match="position_ids are refused beside a memory"):
        model.generate(ids, memory=model.read(ids), position_ids=NUMBERS["stretched"][:, :6], **GREEDY)


@pytest.mark.parametrize("pair", pairs())
def test_encoder_decoder(pair: Pair) -> None:
    """Both sides: the encoder as it is alone, which the first test holds to the formula; the decoder in a cache as in one pass."""
    model, source, target = pair.model(), ids_of(length=LENGTH), ids_of(length=LENGTH, seed=1)
    given = {"position_ids": NUMBERS["random"], "decoder_position_ids": NUMBERS["interleaved"]}
    whole = model(source, decoder_input_ids=target, use_cache=False, **given)
    encoder = model.encoder
    assert isinstance(encoder, RelPosEncoderModel)
    alone = encoder(source, position_ids=given["position_ids"]).last_hidden_state
    torch.testing.assert_close(whole.encoder_last_hidden_state, alone, **EXACT)
    wanted, cache, states = whole.last_hidden_state, None, []
    for part in (slice(0, 4), slice(4, 5), slice(5, 11)):
        output = model(
            encoder_outputs=(whole.encoder_last_hidden_state,),
            decoder_input_ids=target[:, part],
            decoder_position_ids=given["decoder_position_ids"][:, part],
            cache=cache,
            use_cache=True,
        )
        states.append(output.last_hidden_state)
        cache = output.cache
    torch.testing.assert_close(torch.cat(states, 1), wanted, **EXACT)
    names = [pair.decoder] if isinstance(pair.decoder, str) else pair.decoder
    if pair.decoder not in ("nope", "cope") and not all(scheme_class(name).gates() for name in names):
        counted = model(source, decoder_input_ids=target, position_ids=given["position_ids"]).last_hidden_state
        assert (counted - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("pair", [given for given in pairs() if given.id in ("rope", "t5", "shaw", "rope+t5", "lists")])
def test_encoder_decoder_generates(pair: Pair) -> None:
    model, source, start = pair.model(head=True), ids_of(), ids_of(length=4, seed=1)
    start[:, 0] = model.config.decoder_start_token_id
    numbers = {"position_ids": NUMBERS["random"], "decoder_position_ids": NUMBERS["random"][:, :4]}
    tokens, places = start, numbers["decoder_position_ids"]
    for _ in range(GREEDY["max_new_tokens"]):
        given = {**numbers, "decoder_position_ids": places}
        logits = model(source, decoder_input_ids=tokens, use_cache=False, **given).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        places = torch.cat([places, places[:, -1:] + 1], 1)
    for use_cache in (True, False):
        found = model.generate(source, decoder_input_ids=start, **numbers, **GREEDY, use_cache=use_cache)
        assert torch.equal(found, tokens)
