"""Cached decoding in any portions, and `generate`, give what full passes give."""

from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import SIZES
from matrix import Case
from matrix import cases
from matrix import ids_of
from matrix import sharpen
from transformers import DynamicCache
from transformers import StaticCache

from hf_relpos.model import position_tables

EXACT = {"rtol": 1e-9, "atol": 1e-10}
PORTIONS = {"tokens": [1] * 11, "chunks": [3, 1, 5, 2], "prompt": [8, 1, 1, 1]}
ROPE = Case("decoder", "rope", {})
GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}


def decode(model: Any, ids: torch.Tensor, portions: list[int], cache: Any = None, mask: Any = None) -> tuple[Any, Any]:
    """Hidden states of all portions, joined, and the cache."""
    states, start = [], 0
    for length in portions:
        stop = start + length
        given = None if mask is None else mask[:, :stop]
        output = model(ids[:, start:stop], cache=cache, use_cache=True, attention_mask=given)
        states.append(output.last_hidden_state)
        cache, start = output.cache, stop
    return torch.cat(states, 1), cache


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("case", cases("decoder", variants=True))
def test_decoding_equals_one_pass(case: Case, window: int | None) -> None:
    model, ids = case.model(sliding_window=window), ids_of()
    wanted = model(ids, use_cache=False).last_hidden_state
    for portions in PORTIONS.values():
        torch.testing.assert_close(decode(model, ids, portions)[0], wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder", variants=True))
@torch.no_grad()
def test_steps_share_tables(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of distances serve several steps, also after a crop, and a cache of another model has its own."""
    monkeypatch.setattr(position_tables, "DECODED_ALIKE", 4)
    model, other, ids = case.model(), sharpen(case.model(), seed=1), ids_of()
    scheme, made = model.position_schemes[0], []
    plain = scheme.score_terms
    monkeypatch.setattr(scheme, "score_terms", lambda *given: made.append(given) or plain(*given))
    states, cache = decode(model, ids, [1] * 11)
    layers = model.position_schemes.of_layers.count(0)
    expected = layers * (1 + 3) if scheme.adds_terms() else 0  # the first token, and three groups of up to four behind it
    assert len(made) == expected
    torch.testing.assert_close(states, model(ids, use_cache=False).last_hidden_state, **EXACT)
    cache.crop(-6)
    again = model(ids[:, 5:7], cache=cache, use_cache=True).last_hidden_state
    torch.testing.assert_close(again, states[:, 5:7], **EXACT)
    wanted = other(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(decode(other, ids, [1] * 11)[0], wanted, **EXACT)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("case", cases("decoder"))
def test_decoding_with_left_padding(case: Case, window: int | None) -> None:
    model, ids, mask = case.model(sliding_window=window), ids_of(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    wanted = model(ids[:1, 4:], use_cache=False).last_hidden_state
    for portions in PORTIONS.values():
        torch.testing.assert_close(decode(model, ids, portions, mask=mask)[0][:1, 4:], wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder"))
def test_decoding_after_right_padding(case: Case) -> None:
    """Padding between the prompt and what follows is neither seen nor counted."""
    model, ids, mask = case.model(), ids_of(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, 3:6] = 0
    wanted = model(ids[:1, mask[0].bool()]).last_hidden_state
    found = decode(model, ids, [6, 1, 4], mask=mask)[0][:1, mask[0].bool()]
    torch.testing.assert_close(found, wanted, **EXACT)


BEHIND_TOKENS = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1]])
"""Padding behind tokens, in the first places of the one row and among the last of the other."""


@pytest.mark.parametrize("portions", [[7, 4], [7, 1, 1, 1, 1], [4, 3, 4]], ids=str)
@pytest.mark.parametrize("case", cases("decoder"))
def test_a_window_over_padding_behind_tokens(case: Case, portions: list[int]) -> None:
    """Padding takes no place of a token that the window shows: the cache, ours or the caller's, keeps all keys."""
    model, ids, counts = case.model(sliding_window=4), ids_of(), BEHIND_TOKENS.bool()
    wanted = model(ids, attention_mask=BEHIND_TOKENS, use_cache=False).last_hidden_state[counts]
    alone = [model(ids[row : row + 1, counts[row]], use_cache=False).last_hidden_state[0] for row in range(BATCH)]
    torch.testing.assert_close(wanted, torch.cat(alone), **EXACT)
    mine = DynamicCache(config=model.config)
    for cache in (None, mine) if portions[0] > 4 else (DynamicCache(),):
        found, used = decode(model, ids, portions, cache, BEHIND_TOKENS)
        torch.testing.assert_close(found[counts], wanted, **EXACT)
        assert used.get_seq_length() == LENGTH and cache in (None, used)


def test_a_window_that_lacks_keys_is_refused() -> None:
    """Where a cache has dropped what padding pushed out; rows that are over do not matter."""
    model, ids, later = ROPE.model(sliding_window=4), ids_of(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    later[0, 6:8] = 0
    with pytest.raises(ValueError, match="a sliding cache counts padding, so that it lacks keys that sliding_window=4 shows"):
        decode(model, ids, [5, 3, 3], mask=later)
    with pytest.raises(ValueError, match="padding follows tokens: .*give a cache that keeps all keys, cache=DynamicCache"):
        decode(model, ids, [8, 3], StaticCache(config=model.config, max_cache_len=16), later)
    later[0, 6:] = 0
    found = decode(model, ids, [5, 3, 3], mask=later)[0]
    torch.testing.assert_close(found[0, :6], model(ids[:1, :6]).last_hidden_state[0], **EXACT)
    torch.testing.assert_close(found[1:], model(ids[1:]).last_hidden_state, **EXACT)


def test_generate_with_a_window_behind_right_padding() -> None:
    """As without a cache; a static cache, which cannot keep more, is refused before a token is generated."""
    model, ids = ROPE.model(head=True, sliding_window=4), ids_of(length=6)
    settings = {**GREEDY, "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])}
    wanted = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(model.generate(ids, **settings), wanted)
    assert torch.equal(model.generate(ids, num_beams=1, cache=DynamicCache(config=model.config), **settings), wanted)
    with pytest.raises(ValueError, match="padding follows tokens in the prompt: a sliding cache counts padding"):
        model.generate(ids, cache_implementation="static", disable_compile=True, **settings)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("case", cases("decoder"))
def test_static_cache(case: Case, padding: int, window: int | None) -> None:
    """A cache of a fixed size, larger than what is in it, hides its empty places."""
    model, ids = case.model(sliding_window=window), ids_of()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[:, :padding] = 0
    wanted = model(ids[:, padding:], use_cache=False).last_hidden_state
    for portions in PORTIONS.values():
        cache = StaticCache(config=model.config, max_cache_len=16)
        found = decode(model, ids, portions, cache, mask if padding else None)[0][:, padding:]
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder"))
def test_beam_reorder_and_crop(case: Case) -> None:
    model, ids = case.model(), ids_of()
    rows = torch.tensor([1, 1])
    _, cache = decode(model, ids, [9])
    cache.reorder_cache(rows)
    found = model(ids[rows][:, 9:], cache=cache).last_hidden_state
    torch.testing.assert_close(found, model(ids[rows]).last_hidden_state[:, 9:], **EXACT)
    cache.crop(6 - cache.get_seq_length())
    torch.testing.assert_close(model(ids[rows][:, 6:], cache=cache).last_hidden_state[:, 3:], found, **EXACT)


@pytest.mark.parametrize("case", cases("decoder"))
def test_decoding_with_position_ids(case: Case) -> None:
    """New tokens numbered after the cached ones, or all keys numbered, in a dynamic and in a static cache."""
    model, ids = case.model(), ids_of()
    wanted = model(ids).last_hidden_state[:, 6:]
    for given in (torch.arange(6, 11)[None], torch.arange(11)[None]):
        _, cache = decode(model, ids, [6])
        found = model(ids[:, 6:], cache=cache, position_ids=given).last_hidden_state
        torch.testing.assert_close(found, wanted, **EXACT)
    _, cache = decode(model, ids, [6], StaticCache(config=model.config, max_cache_len=16))
    found = model(ids[:, 6:], cache=cache, position_ids=torch.arange(6, 11)[None]).last_hidden_state
    torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("case", cases("decoder"))
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 5}], ids=["full", "window"])
def test_generate(case: Case, fields: dict[str, int]) -> None:
    assert_generates(case, fields)


@pytest.mark.parametrize("case", cases("decoder", memory=True))
def test_generate_with_a_memory_model(case: Case) -> None:
    """The sliding cache of transformers sees what the memory would hold."""
    assert_generates(case, {"mem_len": 4})


def assert_generates(case: Case, fields: dict[str, int]) -> None:
    """Greedy search, sampling and beams with a cache, dynamic or static, choose the tokens that full passes choose."""
    model, ids = case.model(head=True, **fields), ids_of(length=6)

    def generate(**kwargs: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(ids, **{**GREEDY, **kwargs})

    greedy = generate(use_cache=False)
    tokens = ids
    for _ in range(GREEDY["max_new_tokens"]):
        tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy, tokens)
    assert torch.equal(generate(), greedy)
    assert torch.equal(generate(cache_implementation="static", disable_compile=True), greedy)
    for search in ({"do_sample": True, "top_k": 20}, {"num_beams": 3}):
        assert torch.equal(generate(**search), generate(**search, use_cache=False))


@pytest.mark.parametrize("case", cases("decoder"))
def test_generate_with_left_padding(case: Case) -> None:
    """A batch of prompts of different lengths continues as each prompt alone, greedily and with beams."""
    model = case.model(head=True)
    prompts = [ids_of(1, 3, seed=1), ids_of(1, 8, seed=2)]
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 8 - prompt.shape[1] :], mask[row, 8 - prompt.shape[1] :] = prompt[0], 1
    for search in ({}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}):
        together = model.generate(ids, attention_mask=mask, **GREEDY, **search)
        for row, prompt in enumerate(prompts):
            alone = model.generate(prompt, **GREEDY, **search)[0, prompt.shape[1] :]
            assert torch.equal(together[row, 8:], alone)


def test_generate_from_embeddings() -> None:
    model, ids = ROPE.model(head=True), ids_of()
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY), model.generate(ids, **GREEDY)[:, LENGTH:])


def test_generate_in_chunks_of_the_prompt() -> None:
    model, ids = ROPE.model(head=True), ids_of()
    assert torch.equal(model.generate(ids, prefill_chunk_size=4, **GREEDY), model.generate(ids, **GREEDY))


def test_names_and_kinds_of_cache() -> None:
    model, ids = ROPE.model(head=True), ids_of()
    cache = model(ids[:, :6]).cache
    assert isinstance(cache, DynamicCache) and model(ids, use_cache=False).cache is None
    assert model.train()(ids).cache is None, "training leaves no cache unless asked"
    found = model.eval()(ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids).logits[:, 6:], **EXACT)
    with pytest.raises(ValueError, match="the cache holds a batch of 2, the input a batch of 1"):
        model(ids[:1], cache=cache)
    with pytest.raises(ValueError, match="a KV cache continues one document"):
        model(ids, use_cache=True, reset_mask=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="attention_mask covers 3 tokens, expected 14: the cached tokens and the new"):
        model(ids[:, :3], cache=cache, attention_mask=torch.ones(2, 3))


@pytest.mark.parametrize("memory", [0, LENGTH])
def test_a_given_cache_is_read_whatever_use_cache_says(memory: int) -> None:
    """PEFT's prefix tuning hands its prefix on as a cache where none is wanted, and does so anew at each step of generation."""
    model, ids = ROPE.model(mem_len=memory), ids_of()
    wanted = model(ids, use_cache=False).last_hidden_state[:, 6:]
    cache = model(ids[:, :6], use_cache=True).cache
    found = model(ids[:, 6:], cache=cache, use_cache=False)
    torch.testing.assert_close(found.last_hidden_state, wanted, **EXACT)
    assert found.cache is None and found.memory is None, "none was asked for"


def test_logits_to_keep() -> None:
    model, ids = ROPE.model(head=True), ids_of()
    logits = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=3).logits, logits[:, -3:])
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, logits[:, [0, 4]])
    assert logits.shape == (BATCH, LENGTH, SIZES["vocab_size"])
