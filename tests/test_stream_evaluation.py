"""Evaluation of texts, read in segments with memory or in windows without: exact, and the same however it is cut."""

import math

import pytest
import torch
from datasets import Dataset
from segments import MEMORY_SCHEMES
from segments import make_model
from segments import make_trainer
from torch.nn.functional import cross_entropy
from transformers import GPT2Config
from transformers import GPT2LMHeadModel

from hf_relpos.data.packing import pack
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.evaluation.language_model import evaluate_stream
from hf_relpos.evaluation.language_model import evaluate_windows
from hf_relpos.evaluation.language_model import perplexity

TOKENIZER = build_byte_tokenizer()
TEXTS = ["the quick brown fox jumps over the lazy dog " * 2, "é", "0123456789" * 3, "abc", "<|endoftext|> is text"]
BYTES = sum(len(text.encode()) for text in TEXTS)
CUTS = [(1, 1), (7, 2), (16, 8), (500, 3)]


def make(scheme="transformer_xl", **fields):
    return make_model(scheme, vocab_size=len(TOKENIZER), **fields)


@torch.no_grad()
def whole(model, texts=TEXTS):
    """Mean loss and number of targets when each text is one pass."""
    total, count, end = 0.0, 0, TOKENIZER.eos_token_id
    for text in texts:
        tokens = list(text.encode())
        logits = model(input_ids=torch.tensor([[end, *tokens]]), use_cache=False).logits[0]
        total += cross_entropy(logits, torch.tensor([*tokens, end]), reduction="sum").item()
        count += len(tokens) + 1
    return total / count, count


@pytest.mark.parametrize("scheme", MEMORY_SCHEMES)
def test_a_stream_is_one_pass_however_it_is_cut(scheme):
    model = make(scheme)
    loss, count = whole(model)
    for segment_len, batch_size in CUTS:
        found = evaluate_stream(model, TOKENIZER, TEXTS, segment_len, batch_size)
        assert found["loss"] == pytest.approx(loss, abs=1e-5)
        assert found["tokens"] == count == BYTES + len(TEXTS)
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(loss * count / math.log(2) / BYTES, rel=1e-5)


WINDOWS = [{"mem_len": 20, "sliding_window": 4}, {"mem_len": 0}, {"mem_len": 0, "sliding_window": 5}]


@pytest.mark.parametrize("fields", WINDOWS)
def test_windows_of_other_lengths_are_cut_anywhere_too(fields):
    model = make("rope", **fields)
    for segment_len, batch_size in CUTS:
        found = evaluate_stream(model, TOKENIZER, TEXTS, segment_len, batch_size)
        assert found["loss"] == pytest.approx(whole(model)[0], abs=1e-5)


@pytest.mark.parametrize("window", [None, 30])
def test_a_window_beyond_the_memory_is_read_through_the_memory(window):
    model, text = make(sliding_window=window), TEXTS[0]
    ids = torch.tensor([[TOKENIZER.bos_token_id, *text.encode()]])
    targets = torch.tensor([*text.encode(), TOKENIZER.eos_token_id])
    logits, memory = [], None
    for part in ids.split(7, 1):
        with torch.no_grad():
            output = model(input_ids=part, memory=memory)
        memory = output.memory
        logits.append(output.logits[0])
    loss = cross_entropy(torch.cat(logits), targets).item()
    for batch_size in (1, 3):
        alone = evaluate_stream(model, TOKENIZER, [text], 7, batch_size)
        assert alone["loss"] == pytest.approx(loss, abs=1e-6)
    together = evaluate_stream(model, TOKENIZER, [text, *TEXTS], 7, 4)
    apart = evaluate_stream(model, TOKENIZER, [text, *TEXTS], 7, 1)
    assert together["loss"] == pytest.approx(apart["loss"], abs=1e-6)
    assert abs(evaluate_stream(model, TOKENIZER, [text], 20)["loss"] - loss) > 1e-6


def test_the_trainer_finds_the_same_numbers(tmp_path):
    model = make()
    blocks = pack(Dataset.from_dict({"text": TEXTS}), TOKENIZER, 16, keep_tail=True)
    metrics = make_trainer(tmp_path, evaluation=blocks, model=model).evaluate()
    found = evaluate_stream(model, TOKENIZER, TEXTS)
    for name in ("loss", "perplexity", "accuracy"):
        assert metrics[f"eval_{name}"] == pytest.approx(found[name], rel=1e-6)
    assert metrics["eval_tokens"] == found["tokens"]


@torch.no_grad()
@pytest.mark.parametrize("window, stride, batch_size", [(8, 1, 5), (8, 3, 2), (8, 8, 1), (200, 10, 4)])
def test_each_window_predicts_its_last_tokens(window, stride, batch_size):
    model = make("rope", mem_len=0)
    total, hits, count = 0.0, 0, 0
    for text in TEXTS:
        ids, targets = [TOKENIZER.bos_token_id, *text.encode()], [*text.encode(), TOKENIZER.eos_token_id]
        for place, target in enumerate(targets):
            past_first = max(0, place - window)
            start = 0 if place < window else (past_first // stride + 1) * stride
            logits = model(input_ids=torch.tensor([ids[start : place + 1]])).logits[0, -1]
            total -= logits.log_softmax(-1)[target].item()
            hits += int(logits.argmax()) == target
            count += 1
    found = evaluate_windows(model, TOKENIZER, TEXTS, window, stride, batch_size)
    assert found["loss"] == pytest.approx(total / count, abs=1e-5) and found["tokens"] == count
    assert found["accuracy"] == pytest.approx(hits / count)


def test_a_window_that_holds_each_text_is_one_pass():
    model = make("alibi", mem_len=0)
    assert evaluate_windows(model, TOKENIZER, TEXTS, 500, 1)["loss"] == pytest.approx(whole(model)[0], abs=1e-6)


def test_models_of_transformers_are_evaluated_too():
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), **sizes)).eval()
    loss = whole(model)[0]
    assert evaluate_stream(model, TOKENIZER, TEXTS, 9, 2)["loss"] == pytest.approx(loss, abs=1e-5)
    assert evaluate_windows(model, TOKENIZER, TEXTS, 128, 64)["loss"] == pytest.approx(loss, abs=1e-5)


def test_training_goes_on_as_it_was_and_nothing_is_dropped_out():
    model = make(hidden_dropout=0.5).train()
    first, second = (evaluate_stream(model, TOKENIZER, TEXTS) for _ in range(2))
    assert first == second and model.training
    evaluate_windows(model, TOKENIZER, TEXTS, 8, 4)
    perplexity(model, TOKENIZER, TEXTS)
    assert model.training


def test_bad_settings_are_refused():
    model = make()
    for arguments in ({"segment_len": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(arguments))}=0"):
            evaluate_stream(model, TOKENIZER, TEXTS, **arguments)
    for stride in (0, 9):
        with pytest.raises(ValueError, match=f"stride={stride} must be at least 1 and at most window=8"):
            evaluate_windows(model, TOKENIZER, TEXTS, 8, stride)
    with pytest.raises(ValueError, match="has no tokens"):
        evaluate_stream(model, TOKENIZER, ["a", ""])
