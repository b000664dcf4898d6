"""Generation and memory: whatever was read before, the tokens are those of one pass over everything."""

import pytest
import torch
from segments import MEMORY_SCHEMES
from segments import VOCABULARY
from segments import make_config
from segments import make_model

from hf_relpos import RelPosDecoderForCausalLM

EXACT = {"rtol": 0, "atol": 1e-10}
PROMPT = torch.randint(1, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))
NEW = 12


def double(scheme="transformer_xl", **fields):
    return make_model(scheme, torch.float64, pad_token_id=0, **fields)


@torch.no_grad()
def longhand(model, ids, new=NEW):
    """Greedy decoding that passes over the whole text for each token, with the sliding window and without a state."""
    for _ in range(new):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize("scheme", MEMORY_SCHEMES)
def test_a_memory_becomes_a_cache(scheme):
    model = double(scheme)
    wanted = model(input_ids=PROMPT, use_cache=False).logits
    for split in (0, 1, 4, 30, 39):
        cache, mask = model.memory_to_cache(model.read(PROMPT[:, :split], segment_len=9))
        assert mask.tolist() == [[1] * min(split, 6)]
        mask = torch.cat([mask, torch.ones_like(PROMPT[:, split:])], 1)
        logits = model(input_ids=PROMPT[:, split:], cache=cache, attention_mask=mask).logits
        torch.testing.assert_close(logits, wanted[:, split:], **EXACT)


@pytest.mark.parametrize("scheme", MEMORY_SCHEMES)
def test_greedy_generation_from_a_memory_is_that_of_full_passes(scheme):
    model = double(scheme)
    wanted = longhand(model, PROMPT)
    for split in (0, 7, 39):
        memory = model.read(PROMPT[:, :split])
        found = model.generate(PROMPT[:, split:], memory=memory, max_new_tokens=NEW, do_sample=False)
        assert found.tolist() == wanted[:, split:].tolist()


@pytest.mark.parametrize("segment_len", [1, 7, 64])
def test_a_long_prompt_is_read_segment_by_segment(segment_len):
    model = double()
    whole, read = model.read(PROMPT, segment_len=64), model.read(PROMPT, segment_len=segment_len)
    torch.testing.assert_close(read.hidden, whole.hidden, **EXACT)
    assert read.length.tolist() == [6]
    chunked = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False, prefill_chunk_size=segment_len)
    assert chunked.tolist() == longhand(model, PROMPT).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"num_beams": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3, "do_sample": False},
        {"assistant_model": double(), "do_sample": False},
        {"repetition_penalty": 1.0, "prefill_chunk_size": 4, "do_sample": False},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("scheme", ["transformer_xl", "rope", "t5"])
def test_every_way_of_decoding(scheme, options):
    model = double(scheme)
    texts = PROMPT if "prompt_lookup_num_tokens" in options or "assistant_model" in options else PROMPT.view(2, 20)
    torch.manual_seed(0)
    wanted = model.generate(texts, max_new_tokens=NEW, **options)
    assert wanted.shape[1] == texts.shape[1] + NEW
    for split in (3, texts.shape[1] - 1):
        torch.manual_seed(0)
        memory = model.read(texts[:, :split])
        found = model.generate(texts[:, split:], memory=memory, max_new_tokens=NEW, **options)
        assert found.tolist() == wanted[:, split:].tolist()


def test_a_generation_config_can_ask_for_beams():
    model = double()
    model.generation_config.num_beams = 4
    wanted = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    found = model.generate(PROMPT[:, 9:], memory=model.read(PROMPT[:, :9]), max_new_tokens=NEW, do_sample=False)
    assert found.tolist() == wanted[:, 9:].tolist()


def test_a_static_cache_equals_the_growing_one():
    model = double()
    static = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False, cache_implementation="static")
    assert static.tolist() == longhand(model, PROMPT).tolist()
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(PROMPT, memory=model.read(PROMPT), max_new_tokens=2, cache_implementation="static")


@pytest.mark.parametrize("scheme", MEMORY_SCHEMES)
def test_rows_of_unequal_memories(scheme):
    """Two rows have read 2 and 10 tokens, padded anywhere: they go on as each of them alone."""
    model = double(scheme)
    read = torch.tensor([[0] * 5 + PROMPT[0, :2].tolist() + [0] * 3, PROMPT[0, 10:20].tolist()])
    asked = torch.stack([PROMPT[0, 2:6], PROMPT[0, 20:24]])
    memory = model.read(read, attention_mask=(read != 0).long(), segment_len=4)
    assert memory.length.tolist() == [2, 6]
    found = model.generate(asked, memory=memory, max_new_tokens=NEW, do_sample=False)
    wanted = [longhand(model, PROMPT[:, :6])[0, 2:].tolist(), longhand(model, PROMPT[:, 10:24])[0, 10:].tolist()]
    assert found.tolist() == wanted


@pytest.mark.parametrize("scheme", MEMORY_SCHEMES)
def test_rows_of_unequal_prompts_are_read_up_to_their_last_token(scheme):
    model = double(scheme)
    memory = model.read(torch.stack([PROMPT[0, :10], PROMPT[0, 20:30]]))
    prompts = torch.tensor([PROMPT[0, 10:15].tolist(), [0, 0, *PROMPT[0, 30:33].tolist()]])
    mask = (prompts != 0).long()
    with pytest.raises(ValueError, match="padding between a memory and a prompt"):
        model.generate(prompts, memory=memory, attention_mask=mask)
    memory = model.read(prompts[:, :-1], memory, mask[:, :-1])
    found = model.generate(prompts[:, -1:], memory=memory, max_new_tokens=NEW, do_sample=False)
    wanted = [longhand(model, PROMPT[:, :15])[0, 14:].tolist(), longhand(model, PROMPT[:, 20:33])[0, 12:].tolist()]
    assert found.tolist() == wanted


def test_a_conversation_goes_on_from_what_was_said():
    model = double()
    memory, text = model.empty_memory(1), PROMPT[:, :0]
    for turn in range(3):
        question = PROMPT[:, 13 * turn : 13 * turn + 9]
        said = model.generate(question, memory=memory, max_new_tokens=5, do_sample=False)
        assert said.tolist() == longhand(model, torch.cat([text, question], 1), 5)[:, text.shape[1] :].tolist()
        memory, text = model.read(said, memory), torch.cat([text, said], 1)
    torch.testing.assert_close(memory.hidden, model.read(text).hidden, **EXACT)


def test_a_memory_is_not_used_up():
    model = double()
    memory = model.read(PROMPT[:, :20])
    before = memory.hidden.clone()
    answers = [model.generate(PROMPT[:, 20:25], memory=memory, max_new_tokens=4, do_sample=False) for _ in range(2)]
    assert answers[0].tolist() == answers[1].tolist() and torch.equal(memory.hidden, before)


def test_the_cache_stays_as_small_as_the_memory():
    model = double()
    memory, options = model.read(PROMPT[:, :30]), {"max_new_tokens": 50, "return_dict_in_generate": True}
    output = model.generate(PROMPT[:, 30:], memory=memory, do_sample=False, **options)
    assert {layer.keys.shape[2] for layer in output.cache.layers} == {6}


@pytest.mark.parametrize("scheme", ["transformer_xl", "rope"])
def test_the_original_window_keeps_the_memory_and_the_whole_segment(scheme):
    model = double(scheme, sliding_window=None)
    memory = model.read(PROMPT[:, :20], segment_len=10)
    ids = PROMPT[:, 20:25]
    found = model.generate(ids, memory=memory, max_new_tokens=NEW, do_sample=False)
    for _ in range(NEW):  # memory and one segment that grows
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids, memory=memory).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert found.tolist() == ids.tolist()


def test_another_memory_length_at_evaluation():
    model = double()
    model.set_memory_length(15)
    assert (model.config.mem_len, model.config.sliding_window) == (15, 16)
    twin = double(mem_len=15)
    assert model.generate(PROMPT, max_new_tokens=NEW, do_sample=False).tolist() == longhand(twin, PROMPT).tolist()
    assert model.read(PROMPT).slots == 15
    model.set_memory_length(4, sliding_window=None)
    assert model.config.layer_types == ["full_attention"] * 2
    model.set_memory_length(0)
    assert (model.config.mem_len, model.config.sliding_window) == (0, None)
    assert model(input_ids=PROMPT).memory is None
    for mem_len, window, reason in ((-1, "auto", "mem_len=-1"), (4, 1, "sliding_window=1")):
        with pytest.raises(ValueError, match=reason):
            model.set_memory_length(mem_len, window)
    with pytest.raises(ValueError, match="'sinusoidal' is refused for mem_len=4"):
        RelPosDecoderForCausalLM(make_config("sinusoidal", mem_len=0)).set_memory_length(4)


@pytest.mark.parametrize("method", ["read", "memory_to_cache", "generate", "empty_memory"])
def test_a_model_without_memory_says_so(method):
    memory = double().read(PROMPT)
    model = double(mem_len=0)
    calls = {
        "read": lambda: model.read(PROMPT),
        "memory_to_cache": lambda: model.memory_to_cache(memory),
        "generate": lambda: model.generate(PROMPT, memory=memory),
        "empty_memory": lambda: model.empty_memory(1),
    }
    with pytest.raises(ValueError, match="mem_len=0"):
        calls[method]()


def test_a_memory_that_does_not_fit_is_refused():
    model = double()
    memory = model.read(PROMPT)
    for wrong, reason in (
        (memory._replace(hidden=memory.hidden[:, :1]), "shape"),
        (memory.resize(9), "shape"),
        (memory.to(torch.float32), "dtype"),
        (memory._replace(length=memory.length + 1), "between 0 and mem_len=6"),
        (memory._replace(length=memory.length - 7), "between 0 and mem_len=6"),
    ):
        with pytest.raises(ValueError, match=reason):
            model.generate(PROMPT, memory=wrong, max_new_tokens=1)
    with pytest.raises(ValueError, match="memory has 1 rows, input_ids have 2"):
        model.generate(PROMPT.view(2, -1), memory=memory)
    with pytest.raises(ValueError, match="no cache beside the memory"):
        model.generate(PROMPT, memory=memory, cache=model.memory_to_cache(memory)[0])
    with pytest.raises(ValueError, match="takes input_ids"):
        model.generate(memory=memory)
    for name in ("past_key_values", "cache_implementation"):
        with pytest.raises(ValueError, match=f"no cache beside the memory: got {name}"):
            model.generate(PROMPT, memory=memory, **{name: "static"})
    with pytest.raises(ValueError, match="must be a SegmentMemory"):
        model.generate(PROMPT, memory=memory.hidden)
    with pytest.raises(ValueError, match="reset_mask is refused by generate"):
        model.generate(PROMPT, memory=memory, reset_mask=True)
    with pytest.raises(ValueError, match="at least 1 token a row"):
        model.generate(PROMPT[:, :0], memory=memory)
    with pytest.raises(ValueError, match="that of input_ids, without what is remembered"):
        model.generate(PROMPT, memory=memory, attention_mask=torch.ones(1, PROMPT.shape[1] + 6))
    for ids in (PROMPT[0], PROMPT.tolist(), "text"):
        with pytest.raises(ValueError, match="input_ids of .* are refused: expected a tensor of shape"):
            model.read(ids)
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(PROMPT, memory=memory, use_cache=False)
    with pytest.raises(ValueError, match="segment_len=0"):
        model.read(PROMPT, segment_len=0)
