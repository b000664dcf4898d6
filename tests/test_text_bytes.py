"""Bits per byte: the bytes are those of the text that was predicted, or there is no such number."""

import math

import pytest
from datasets import Dataset
from runs import results
from runs import write_config
from segments import make_model
from tokenizers import Tokenizer
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_relpos.data.packing import pack
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.data.tokenizers import train_bpe_tokenizer
from hf_relpos.data.tokenizing import ends_tokens_at_lines
from hf_relpos.data.tokenizing import tokenize_documents
from hf_relpos.data.tokenizing import tokenizer_key
from hf_relpos.evaluation.language_model import evaluate_stream
from hf_relpos.evaluation.language_model import evaluate_windows
from hf_relpos.evaluation.text_bytes import count_bytes
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run

TEXTS = ["some text \xe9 \U0001f600", "More\n\nof it\n", "line 1\nline 2\nline 3\n"]
BYTES = build_byte_tokenizer()
BPE = train_bpe_tokenizer(TEXTS * 9, 280)
SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[BOS]"}


def wrap(vocabulary, split, normalizer=None):
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(["[UNK]", "[PAD]", "[BOS]", *vocabulary])}, "[UNK]")
    )
    backend.pre_tokenizer, backend.decoder = split, decoders.Fuse()
    if normalizer:
        backend.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


LETTERS = sorted(set("".join(TEXTS).lower()))
UNKNOWN = wrap(["some", "text"], pre_tokenizers.Whitespace())
LOWER = wrap(LETTERS, pre_tokenizers.Split("", "isolated"), normalizers.Lowercase())


def table(texts=TEXTS, **columns):
    return Dataset.from_dict({"text": texts, **columns})


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
def test_bytes_are_those_of_the_targets(tokenizer):
    """Of any number of targets, also of one that ends inside a character."""
    spelled = []
    for text in TEXTS:
        spelled += [*map(len, tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])), 0]
    for targets in range(len(spelled) + 2):
        assert count_bytes(table(), tokenizer, targets) == (sum(spelled[:targets]), None)
    assert count_bytes(table(), tokenizer).count == len("".join(TEXTS).encode())


@pytest.mark.parametrize("tokenizer", [UNKNOWN, LOWER], ids=["unknown", "lower"])
def test_a_tokenizer_that_loses_text_has_no_bytes(tokenizer):
    found = count_bytes(table(), tokenizer)
    assert found.count is None and "the tokenizer does not give the text back" in found.lost
    assert "(1 documents, first 'More\\n\\nof it\\n' as 'more\\n\\nof it\\n')" in count_bytes(table(), LOWER).lost
    model = make_model("transformer_xl", vocab_size=64)
    for metrics in (evaluate_stream(model, tokenizer, TEXTS), evaluate_windows(model, tokenizer, TEXTS, 8, 4)):
        assert "bits_per_byte" not in metrics and metrics["loss"] > 0


@pytest.mark.parametrize("samples", [None, 1, 2, 1000])
def test_a_run_counts_the_bytes_that_its_blocks_predict(tmp_path, samples):
    """With the byte tokenizer, a target is a byte or the end of a document."""
    given = {"max_eval_samples": samples} if samples else {}
    job = prepare([write_config(tmp_path, **given), "--do_eval"])
    blocks = job.texts["eval"].blocks
    targets = blocks["shift_labels"][:]
    assert job.texts["eval"].byte_count == ((targets >= 0) & (targets < 256)).sum()
    assert len(blocks) == samples or samples in (None, 1000)


def test_a_run_says_why_it_has_no_bits_per_byte(tmp_path, caplog):
    LOWER.save_pretrained(tmp_path / "lower")
    (tmp_path / "text.txt").write_text("aB\n" * 400)
    settings = {"tokenizer_name": str(tmp_path / "lower"), "max_steps": 1, "sample_tokens": 0}
    run(prepare([write_config(tmp_path, **settings)]))
    found = results(tmp_path / "out")
    assert "eval_bits_per_byte" not in found and "eval_gzip_bits_per_byte" not in found
    assert "does not give the text back" in found["eval_no_bits_per_byte"] and "no bits per byte" in caplog.text
    assert "does not give the text back" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ValueError, match="metric_for_best_model='bits_per_byte' is not reported: the tokenizer does not give"):
        prepare([write_config(tmp_path, **settings, metric_for_best_model="bits_per_byte", output_dir=str(tmp_path / "b"))])


# ---- rows of long documents

LONG = "".join(f"def line_{number}(x):\n    return x + {number}\n\n" for number in range(50))


def rows_of(text, tokenizer, cuts):
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    documents = table([*pieces, "next"], continues=[False] + [True] * len(cuts) + [False])
    return list(tokenize_documents(documents, tokenizer))


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, LOWER], ids=["byte", "bpe", "letters"])
def test_a_document_in_rows_has_the_tokens_of_the_whole(tokenizer):
    cuts = [
        i + 1 for i in range(1, len(LONG) - 1) if LONG[i] == "\n" and not LONG[i - 1].isspace() and not LONG[i + 1].isspace()
    ]
    whole, cut = rows_of(LONG, tokenizer, []), rows_of(LONG, tokenizer, cuts[::7])
    assert ends_tokens_at_lines(tokenizer)
    assert (whole[0].tokens == cut[0].tokens).all() and (whole[0].starts == cut[0].starts).all()
    assert cut[0].starts.sum() == 2


def test_a_tokenizer_that_marks_the_beginning_of_a_text_gets_whole_documents():
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(["[UNK]", "[PAD]", "[BOS]", "\u2581", *LETTERS])}, "[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Split("", "isolated")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
    assert not ends_tokens_at_lines(tokenizer)
    whole, cut = rows_of(LONG, tokenizer, []), rows_of(LONG, tokenizer, [LONG.index("    return")])
    assert (whole[0].tokens == cut[0].tokens).all()


def test_blocks_are_kept_under_the_text_and_all_settings(tmp_path):
    before = tokenizer_key(BPE)
    BPE("some text", padding="max_length", max_length=50, truncation=True)
    assert tokenizer_key(BPE) == before != tokenizer_key(BYTES)
    first = pack(table(), BPE, 8)
    assert pack(table(), BPE, 8).cache_files == first.cache_files
    for other in (
        pack(table(), BPE, 4),
        pack(table(), BPE, 8, keep_tail=True),
        pack(table(), BYTES, 8),
        pack(table(["abc" * 9]), BPE, 8),
    ):
        assert other.cache_files != first.cache_files
    assert math.prod(first["input_ids"][:].shape) <= sum(len(part.tokens) for part in tokenize_documents(table(), BPE))
