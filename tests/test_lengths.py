"""The same tokens at several lengths: what is scored, by position and by context, and what a model cannot read."""

import json
import math

import pytest
import torch
from datasets import Dataset
from segments import make_model
from tokenizers.normalizers import Lowercase
from torch.nn.functional import cross_entropy
from transformers import BertConfig
from transformers import BertLMHeadModel
from transformers import GPT2Config
from transformers import GPT2LMHeadModel
from transformers import LlamaConfig
from transformers import LlamaForCausalLM

from hf_relpos.__main__ import main
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.evaluation.lengths import by_position
from hf_relpos.evaluation.lengths import effective_context
from hf_relpos.evaluation.lengths import format_lengths
from hf_relpos.evaluation.lengths import length_report
from hf_relpos.evaluation.windows import take_windows

TOKENIZER = build_byte_tokenizer()
DOCUMENTS = Dataset.from_dict({"text": ["abcdé" * 40, "short", "0123456789" * 30]})
SIZES = {"vocab_size": len(TOKENIZER), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def make(scheme="rope", **fields):
    return make_model(scheme, vocab_size=len(TOKENIZER), **fields)


def test_windows_lie_within_documents_and_know_their_bytes():
    windows = take_windows(DOCUMENTS, TOKENIZER, 64, 10_000)
    assert windows.inputs.shape == (7, 64) and windows.byte_count == 7 * 64 and not windows.notes
    assert (
        windows.inputs[0, 0] == TOKENIZER.bos_token_id and windows.inputs[0, 1:].tolist() == windows.targets[0, :-1].tolist()
    )
    assert bytes(windows.targets[0].tolist()).decode(errors="replace").startswith("abcdéabc")
    assert len(take_windows(DOCUMENTS, TOKENIZER, 64, 128).inputs) == 2


def test_short_documents_are_joined_and_a_note_says_so():
    windows = take_windows(DOCUMENTS, TOKENIZER, 400, 400)
    assert windows.inputs.shape == (1, 400) and "joined" in windows.notes[0]
    with pytest.raises(ValueError, match="545 tokens, fewer than the length 600"):
        take_windows(DOCUMENTS, TOKENIZER, 600, 600)


def test_a_length_is_one_pass_over_each_piece():
    model = make()
    report = length_report(model, TOKENIZER, DOCUMENTS, [16, 64])
    windows = take_windows(DOCUMENTS, TOKENIZER, 64, 2**16)
    for row in report["lengths"]:
        ids, wanted = (table.reshape(-1, row["length"]) for table in (windows.inputs, windows.targets))
        with torch.no_grad():
            loss = cross_entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), wanted.flatten()).item()
        assert row["loss"] == pytest.approx(loss, rel=1e-5) and row["tokens"] == 7 * 64
        assert row["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)
        shares = [(span["to"] - span["from"] + 1) * span["loss"] for span in row["by_position"]]
        assert sum(shares) / row["length"] == pytest.approx(loss, rel=1e-5)
    assert [row["context"] for row in report["context"]] == [1, 2, 4, 8, 16, 32]


def test_bins_of_positions_double():
    spans = by_position(torch.arange(6.0)[None])
    assert [(span["from"], span["to"], span["loss"]) for span in spans] == [(0, 0, 0), (1, 1, 1), (2, 3, 2.5), (4, 5, 4.5)]


@pytest.mark.parametrize("window", [None, 9])
def test_memory_reaches_beyond_the_trained_length(window):
    """Read in segments of the trained length, a memory of the whole past gives the loss of one pass without memory."""
    fields = {"max_position_embeddings": 8, "sliding_window": window}
    remembers = make("alibi", mem_len=64 if window is None else 8, **fields)
    plain = make("alibi", mem_len=0, **fields)
    plain.load_state_dict(remembers.state_dict())
    first, second = (length_report(model, TOKENIZER, DOCUMENTS, [8, 64])["lengths"] for model in (remembers, plain))
    for one, other in zip(first, second, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_effective_context_is_where_the_loss_stops_falling():
    rows = [{"context": 2**power, "loss": loss} for power, loss in enumerate([4.0, 3.0, 2.02, 2.015, 2.0])]
    assert effective_context(rows) == 4 and effective_context([]) is None


def test_a_table_of_positions_is_a_bound_and_a_rotary_model_has_none():
    peers = [
        make("learned_absolute", mem_len=0, max_position_embeddings=32),
        GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), n_positions=32, n_embd=16, n_layer=1, n_head=2)),
    ]
    for model in peers:
        report = length_report(model, TOKENIZER, DOCUMENTS, [16, 64])
        assert "loss" in report["lengths"][0]
        assert report["lengths"][1]["not_applicable"] == "64 positions are needed, and the model has learned 32"
        assert report["context"][-1]["context"] == 16
    rotary = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=16, max_position_embeddings=32))
    assert "loss" in length_report(rotary, TOKENIZER, DOCUMENTS, [16, 64])["lengths"][1]


def test_a_model_that_sees_the_future_is_refused():
    with pytest.raises(ValueError, match="BertLMHeadModel is no causal language model"):
        length_report(BertLMHeadModel(BertConfig(**SIZES, intermediate_size=16)), TOKENIZER, DOCUMENTS, [16])


def test_a_tokenizer_that_loses_text_has_no_bits_per_byte():
    tokenizer = build_byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    report = length_report(make(), tokenizer, Dataset.from_dict({"text": ["Abc " * 40]}), [16])
    assert "loss" in report["lengths"][0] and "bits_per_byte" not in report["lengths"][0]
    assert "Note: no bits per byte: the tokenizer does not give the text back" in format_lengths(report)


def test_the_command_prints_tables_and_writes_json(tmp_path, capsys):
    folder, text = tmp_path / "gpt2", tmp_path / "text.txt"
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), n_positions=32, n_embd=16, n_layer=1, n_head=2))
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    command = ["evaluate", str(folder), str(text), "--lengths", "16", "64"]
    main([*command, "--output", str(tmp_path / "lengths.json")])
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "lengths.json").read_text())
    assert (tmp_path / "lengths.svg").read_text().startswith("<svg")
    assert f"| 16 | {report['lengths'][0]['loss']:.4f} |" in printed
    assert "| 64 | not applicable: 64 positions are needed, and the model has learned 32 |" in printed
    assert f"Effective context: {report['effective_context']} tokens" in printed
    for wrong, message in [(["--block_size", "8"], "exclude each other"), (["--tokens", "0"], "at least 1")]:
        with pytest.raises(SystemExit, match=message):
            main([*command, *wrong])
    with pytest.raises(SystemExit, match="lengths=.*at least 1"):
        main(["evaluate", str(folder), str(text), "--lengths", "0"])
    with pytest.raises(SystemExit, match="--output .* is for --lengths"):
        main(["evaluate", str(folder), str(text), "--output", "x.json"])
