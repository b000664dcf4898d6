"""Metrics: token weighted and exact, whatever the batches were."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers import EvalPrediction

from hf_relpos import RelPosDecoderConfig
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.evaluation.language_model import RunningMetrics
from hf_relpos.evaluation.language_model import language_model_metrics
from hf_relpos.evaluation.language_model import perplexity
from hf_relpos.evaluation.language_model import position_bound
from hf_relpos.evaluation.language_model import score_rows
from hf_relpos.metrics import compute_metric
from hf_relpos.metrics import load_metric

TOKENIZER = build_byte_tokenizer()


def model(scheme: str, bound: int = 16):
    config = RelPosDecoderConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        position_scheme=scheme,
        max_position_embeddings=bound,
        initializer_range=0.5,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_modules_take_sums_in_any_portions():
    nll, tokens = [3.0, 1.0, 2.5], [2, 1, 4]
    expected = math.exp(6.5 / 7)
    metric = load_metric("perplexity")
    metric.add(nll=3.0, tokens=2)
    metric.add_batch(nll=nll[1:], tokens=tokens[1:])
    assert metric.compute()["perplexity"] == pytest.approx(expected, rel=1e-12)
    assert compute_metric("perplexity", nll=nll, tokens=tokens)["perplexity"] == pytest.approx(expected, rel=1e-12)
    assert compute_metric("bits_per_byte", nll=nll, bytes=[5, 5, 3])["bits_per_byte"] == pytest.approx(6.5 / math.log(2) / 13)
    assert compute_metric("token_accuracy", correct=[1, 0, 3], tokens=tokens)["accuracy"] == pytest.approx(4 / 7)
    assert compute_metric("perplexity", nll=[1e6], tokens=[1])["perplexity"] == math.inf
    with pytest.raises(ValueError, match="unknown metric 'bleu'; one of"):
        load_metric("bleu")


def test_rows_of_any_batches_give_the_metrics_of_all_tokens():
    logits, targets = torch.randn(5, 7, 11), torch.randint(0, 11, (5, 7))
    targets[2, 3:] = -100
    targets[4] = -100
    kept = targets != -100
    nll = F.cross_entropy(logits[kept], targets[kept], reduction="sum").item()
    hits = (logits.argmax(-1) == targets)[kept].sum().item()
    for cuts in ([5], [1, 4], [2, 2, 1]):
        parts = zip(logits.split(cuts), targets.split(cuts), strict=True)
        rows = np.concatenate([score_rows((part, None), labels) for part, labels in parts])
        found = language_model_metrics(EvalPrediction(rows, None), byte_count=50)
        running = RunningMetrics(byte_count=50)
        for _ in range(2):
            assert running(EvalPrediction(torch.tensor(rows[:1]), ()), compute_result=False) == {}
            assert running(EvalPrediction(rows[1:], ()), compute_result=True) == pytest.approx(found)
        assert found["loss"] == pytest.approx(nll / 24, rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(nll / 24), rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(nll / math.log(2) / 50, rel=1e-6)
        assert (found["accuracy"], found["tokens"]) == (pytest.approx(hits / 24), 24)
    assert "bits_per_byte" not in language_model_metrics(EvalPrediction(rows, None))


@torch.no_grad()
def test_perplexity_counts_every_token_once():
    decoder = model("alibi")
    texts = ["abcdefghij" * 5, "x"]
    for text, found in zip(texts, perplexity(decoder, TOKENIZER, texts), strict=True):
        ids = torch.tensor([[TOKENIZER.bos_token_id, *text.encode()]])
        expected = F.cross_entropy(decoder(input_ids=ids).logits[0, :-1], ids[0, 1:]).exp().item()
        assert found == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 15, 16, 17, 40])
def test_a_model_with_a_bound_reads_long_text_in_windows(length):
    decoder, window = model("learned_absolute"), 16
    text = ("abcdefgh" * 5)[:length]
    ids = torch.tensor([[TOKENIZER.bos_token_id, *text.encode()]])
    total = 0.0
    for target in range(1, length + 1):
        start = next(start for start in range(0, length, window // 2) if target <= start + window)
        logits = decoder(input_ids=ids[:, start:target]).logits[0, -1]
        total -= logits.log_softmax(-1)[ids[0, target]].item()
    assert position_bound(decoder.config) == window
    assert perplexity(decoder, TOKENIZER, [text])[0] == pytest.approx(math.exp(total / length), rel=1e-5)


def test_perplexity_needs_no_padding_token_but_a_text():
    tokenizer = build_byte_tokenizer()
    tokenizer.pad_token = None
    decoder = model("rope").train()
    assert len(perplexity(decoder, tokenizer, ["abc", "abcd"])) == 2
    assert decoder.training
    with pytest.raises(ValueError, match="the text '' has no tokens"):
        perplexity(decoder, tokenizer, [""])
