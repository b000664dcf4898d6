"""Tokenizers: any text comes back unchanged, and the saved folder is an ordinary one."""

import subprocess
import sys

import pytest
from datasets import Dataset
from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_relpos.data import tables
from hf_relpos.data import tokenizers as data_tokenizers
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.data.tokenizers import end_token_id
from hf_relpos.data.tokenizers import load_tokenizer
from hf_relpos.data.tokenizers import pad_token_id
from hf_relpos.data.tokenizers import start_token_id
from hf_relpos.data.tokenizers import train_bpe_tokenizer

TEXTS = ["the cat sat on the mat\n" * 20, "def cat(mat):\n    return the_cat\n" * 20, "émigré \u2028 😀"]
BYTES, BPE = build_byte_tokenizer(), train_bpe_tokenizer(TEXTS, 280)


@settings(max_examples=50, deadline=None)
@given(st.text())
@example("\r\n\u2028\x85\x0c\x00 \t  x <|endoftext|>")
def test_any_text_comes_back(text):
    for tokenizer in (BYTES, BPE):
        for split_special_tokens in (False, True):
            tokens = tokenizer(text, split_special_tokens=split_special_tokens)["input_ids"]
            assert tokenizer.decode(tokens) == text


def test_byte_ids_are_the_bytes():
    text = "a é 😀\n"
    assert BYTES(text)["input_ids"] == list(text.encode())
    assert len(BYTES) == 259


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
def test_pieces_are_encoded_as_in_the_whole(tokenizer):
    for first, second in (("ab", " c"), ("ab", "\n"), ("", "a")):
        whole = tokenizer(first + second)["input_ids"]
        assert whole[: len(tokenizer(first)["input_ids"])] == tokenizer(first)["input_ids"]


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
def test_saved_folder_loads_with_autotokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert loaded.eos_token == loaded.bos_token == "<|endoftext|>"
    assert (loaded.pad_token, loaded.mask_token) == ("<pad>", "<mask>")
    assert set(loaded(TEXTS[0])) == {"input_ids", "attention_mask"}


def test_bpe_has_the_size_asked_for_and_is_deterministic():
    again = train_bpe_tokenizer(iter(TEXTS), 280)
    assert len(BPE) == 280
    assert again.backend_tokenizer.to_str() == BPE.backend_tokenizer.to_str()
    assert len(BPE(TEXTS[0])["input_ids"]) < len(TEXTS[0])


def test_a_bpe_is_learned_from_a_table_once(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "_cache_folder", lambda: tmp_path)
    table = Dataset.from_dict({"text": list(TEXTS)})
    for _ in range(2):
        learned = train_bpe_tokenizer(table, 280)
        assert learned.backend_tokenizer.to_str() == BPE.backend_tokenizer.to_str()
        monkeypatch.setattr(data_tokenizers, "_learn_bpe", None)


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size=100 .* need 259"):
        train_bpe_tokenizer(TEXTS, 100)


def test_unknown_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer_name='.*none' is neither 'byte', 'bpe' nor"):
        load_tokenizer(str(tmp_path / "none"))


def test_tokens_around_a_document_fall_back():
    tokenizer = build_byte_tokenizer()
    tokenizer.bos_token = tokenizer.pad_token = None
    assert start_token_id(tokenizer) == end_token_id(tokenizer) == pad_token_id(tokenizer) == 256
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="none of bos_token_id, eos_token_id, cls_token_id"):
        start_token_id(tokenizer)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
def test_a_pair_of_texts_has_a_separator(tokenizer, tmp_path):
    first, second = "the cat", "sat"
    for one in (tokenizer, saved(tokenizer, tmp_path)):
        found = one(first, second, return_token_type_ids=True)
        ids = [*one(first)["input_ids"], one.sep_token_id, *one(second)["input_ids"]]
        assert found["input_ids"] == ids and one.sep_token_id == one.eos_token_id
        assert found["token_type_ids"] == [int(side == 1) for side in found.sequence_ids()]
        assert one.decode(one(first)["input_ids"]) == first


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
def test_words_given_apart_keep_their_spaces(tokenizer, tmp_path):
    words = ["the", "", "cat", " sat", "\n", "\xe9migr\xe9"]
    text = "the cat sat\n \xe9migr\xe9"
    for one in (tokenizer, saved(tokenizer, tmp_path)):
        found = one(words, is_split_into_words=True, return_offsets_mapping=True)
        assert one.decode(found["input_ids"]) == text and found["input_ids"] == one(text)["input_ids"]
        assert {word for word in found.word_ids() if word is not None} == {0, 2, 3, 4, 5}
        for word, (start, end) in zip(found.word_ids(), found["offset_mapping"], strict=True):
            assert 0 <= start <= end <= len(words[word])
        last = [offset for word, offset in zip(found.word_ids(), found["offset_mapping"], strict=True) if word == 5]
        assert last[0][0] == 0 and last[-1][1] == len(words[5])
        both = one([words, ["a", "b"]], [["the"], ["cat", "sat"]], is_split_into_words=True, return_offsets_mapping=True)
        assert one.batch_decode(both["input_ids"], skip_special_tokens=True) == [f"{text}the", "a bcat sat"]
        cut = one(words, is_split_into_words=True, max_length=4, truncation=True, return_overflowing_tokens=True)
        assert one.decode(sum(cut["input_ids"], [])) == text
        assert one(words)["input_ids"] == [one(word)["input_ids"] for word in words]


def saved(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_saved_tokenizer_loads_without_this_package(tmp_path):
    BYTES.save_pretrained(tmp_path)
    script = "import sys; from transformers import AutoTokenizer; found = AutoTokenizer.from_pretrained(sys.argv[1]); "
    script += "print(found('a', 'b')['input_ids'], 'hf_relpos' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[97, 256, 98] False"
