"""Text sources and blocks: nothing is lost, nothing is read twice, and bad input is named."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from hf_relpos.data import packing
from hf_relpos.data import tokenizing
from hf_relpos.data.packing import IGNORED
from hf_relpos.data.packing import MaskingCollator
from hf_relpos.data.packing import cut_blocks
from hf_relpos.data.packing import mask_once
from hf_relpos.data.packing import pack
from hf_relpos.data.packing import pack_stream
from hf_relpos.data.sources import describe_documents
from hf_relpos.data.sources import load_documents
from hf_relpos.data.sources import load_files
from hf_relpos.data.sources import load_text
from hf_relpos.data.sources import stdlib_files
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.training.arguments import DataArguments

TOKENIZER = build_byte_tokenizer()
END = TOKENIZER.eos_token_id


def write(path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def blocks_of(texts, block_size, **options):
    rows = pack(Dataset.from_dict({"text": texts}), TOKENIZER, block_size, **options)
    return {name: rows[name][:].tolist() for name in rows.column_names}


# ---- files


def test_only_line_feeds_end_a_line(tmp_path):
    file = write(tmp_path / "u.txt", "one\u2029same\ntwo\x85same\nthree\x0csame\n".encode())
    assert load_text(file) == ["one\u2029same\n", "two\x85same\n", "three\x0csame\n"]


def test_carriage_returns_make_no_difference_and_line_breaks_stay(tmp_path):
    unix = write(tmp_path / "a.txt", b"red\nblue\n\ngreen\n")
    windows = write(tmp_path / "b.txt", b"red\r\nblue\r\n\r\ngreen\r\n")
    assert load_text(unix) == load_text(windows) == ["red\n", "blue\n", "\n", "green\n"]


def test_files_folders_patterns_and_tables(tmp_path):
    write(tmp_path / "in/b[1].txt", b"second")
    write(tmp_path / "in/a.py", b"first")
    write(tmp_path / "in/empty.txt", b"")
    write(tmp_path / "in/.hidden/c.txt", b"hidden")
    assert load_files([str(tmp_path / "in")])["text"][:] == ["first", "second"]
    assert load_files([str(tmp_path / "in" / "*.txt"), str(tmp_path / "in" / "a.py")])["text"][:] == [
        "second",
        "first",
    ]

    rows = [{"body": "one\ntwo", "n": 1}, {"body": "three", "n": 2}]
    table = Dataset.from_list(rows)
    table.to_parquet(tmp_path / "t.parquet")
    table.to_csv(tmp_path / "t.csv")
    write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, rows)).encode())
    for name in ("t.parquet", "t.csv", "t.jsonl"):
        documents = load_files([str(tmp_path / name)], text_column="body")
        assert documents["text"][:] == ["one\ntwo", "three"], name
        assert documents.column_names == ["text"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", r"empty\.txt: no text found"),
        ("nul.txt", b"text\0text", r"nul\.txt is a binary file"),
        ("latin.txt", "caf\xe9".encode("latin-1"), r"latin\.txt is not in UTF-8 \(byte 0xe9\)"),
        ("cut.txt", "é".encode()[:1], r"cut\.txt is not in UTF-8"),
        ("t.jsonl", b'{"body": "x"}', r"t\.jsonl has no column 'text'; text_column may be one of \['body'\]"),
        ("n.jsonl", b'{"text": 1}', r"n\.jsonl: column 'text' holds int64, not text"),
        ("bad.jsonl", b'{"text": ', r"bad\.jsonl cannot be read as json"),
        ("missing.txt", None, r"missing\.txt' is no file, no folder .* and no pattern"),
        ("*.none", None, r"\*\.none' is no file, no folder .* and no pattern"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        load_files([str(tmp_path / name)])


# ---- splits


def test_stdlib_is_split_by_file_without_tests():
    files = stdlib_files()
    everything = [path for paths in files.values() for path in paths]
    assert len(everything) == len(set(everything)) > 400
    assert not any(f"/{part}/" in path for path in everything for part in ("test", "tests", "idlelib", "site-packages"))
    assert files == stdlib_files()
    if sys.version_info[:3] == (3, 11, 7):
        assert {split: len(paths) for split, paths in files.items()} == {"train": 513, "validation": 29, "test": 38}
        assert describe_documents(load_files(files["validation"]))["bytes"] == 588_868


def test_single_file_gives_its_end_for_validation(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1001))
    file = write(tmp_path / "t.txt", text.encode())
    documents = load_documents(DataArguments(train_file=[file], validation_split_percentage=10))
    assert documents.train["text"][0] == text[:900]
    assert documents.validation["text"][0] == text[900:]


def test_several_documents_are_split_whole_and_always_alike(tmp_path):
    rows = [f"document {i}" for i in range(40)]
    file = write(tmp_path / "t.jsonl", "\n".join(json.dumps({"text": row}) for row in rows).encode())
    first, second = (load_documents(DataArguments(train_file=[file])) for _ in range(2))
    assert first.validation["text"][:] == second.validation["text"][:]
    assert len(first.validation) == 2
    assert sorted([*first.train["text"], *first.validation["text"]]) == sorted(rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_name_goes_to_load_dataset(tmp_path, streaming):
    for split in ("train", "validation"):
        write(tmp_path / f"{split}.jsonl", "\n".join(json.dumps({"body": f"{split} {i}"}) for i in range(5)).encode())
    arguments = DataArguments(dataset_name=str(tmp_path), text_column="body", streaming=streaming)
    documents = load_documents(arguments)
    assert [row["text"] for row in documents.train] == [f"train {i}" for i in range(5)]
    assert documents.validation["text"][:] == [f"validation {i}" for i in range(5)]
    with pytest.raises(ValueError, match="has no column 'text'"):
        load_documents(DataArguments(dataset_name=str(tmp_path), streaming=streaming))


def test_sources_that_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="dataset_name='stdlib' and train_file exclude each other"):
        load_documents(DataArguments(dataset_name="stdlib", train_file=["x.txt"]))
    with pytest.raises(ValueError, match="dataset_name='.*' cannot be loaded"):
        load_documents(DataArguments(dataset_name=str(tmp_path / "none")))
    file = write(tmp_path / "t.txt", b"text")
    for source in ({"dataset_name": "stdlib"}, {}):
        with pytest.raises(ValueError, match="streaming=True reads train_file or a dataset of the Hub"):
            load_documents(DataArguments(streaming=True, **source))
    with pytest.raises(ValueError, match="validation_split_percentage=0 is not between"):
        load_documents(DataArguments(train_file=[file], validation_split_percentage=0))


# ---- blocks


def test_blocks_of_three_documents():
    assert blocks_of(["abc", "def", "g"], 4) == {
        "input_ids": [[END, 97, 98, 99], [END, 100, 101, 102]],
        "labels": [[END, 97, 98, 99], [END, 100, 101, 102]],
        "shift_labels": [[97, 98, 99, END], [100, 101, 102, END]],
        "reset_mask": [[1, 0, 0, 0], [1, 0, 0, 0]],
    }
    padded = blocks_of(["abc", "de"], 4, keep_tail=True)
    assert padded["input_ids"][1] == [END, 100, 101, TOKENIZER.pad_token_id]
    assert padded["labels"][1] == [END, 100, 101, IGNORED]
    assert padded["shift_labels"][1] == [100, 101, END, IGNORED]
    assert padded["attention_mask"] == [[1, 1, 1, 1], [1, 1, 1, 0]]


lists = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(lists, st.integers(1, 9), st.booleans())
def test_every_token_stands_once_with_its_target(documents, block_size, keep_tail):
    columns = cut_blocks(documents, block_size, end=99, padding=7 if keep_tail else None)
    total = sum(map(len, documents))
    kept = total if keep_tail else total - total % block_size
    flat = {name: values.reshape(-1)[:kept].tolist() for name, values in columns.items()}
    assert flat["input_ids"] == flat["labels"] == [token for tokens in documents for token in tokens][:kept]
    assert flat["shift_labels"] == [token for tokens in documents for token in [*tokens[1:], 99]][:kept]
    assert flat["reset_mask"] == [int(i == 0) for tokens in documents for i in range(len(tokens))][:kept]
    assert {values.shape for values in columns.values()} == {(-(-kept // block_size), block_size)}
    assert ("attention_mask" in columns) == (keep_tail and total % block_size > 0)
    for name in ("labels", "shift_labels"):
        assert (columns[name].reshape(-1)[kept:] == IGNORED).all()


def test_special_tokens_in_a_text_are_text():
    rows = blocks_of(["<|endoftext|>"], 14)
    assert rows["reset_mask"][0] == [1] + [0] * 13
    assert rows["input_ids"][0][1:] == list(b"<|endoftext|>")


def test_text_shorter_than_a_block_is_refused_for_training_only():
    documents = Dataset.from_dict({"text": ["hello"]})
    with pytest.raises(ValueError, match=r"6 tokens found, fewer than one block \(block_size=64\)"):
        pack(documents, TOKENIZER, 64)
    assert len(pack(documents, TOKENIZER, 64, keep_tail=True)) == 1


def test_processes_and_streams_give_the_same_blocks():
    documents = Dataset.from_dict({"text": [f"text number {i}" for i in range(50)]})
    once = pack(documents, TOKENIZER, 16)["input_ids"][:].tolist()
    assert pack(documents, TOKENIZER, 16, num_proc=2)["input_ids"][:].tolist() == once
    stream = pack_stream(documents.to_iterable_dataset(), TOKENIZER, 16)
    assert [row["input_ids"].tolist() for row in stream] == once


# ---- masking


def test_masking_keeps_the_other_columns_and_spares_special_tokens():
    blocks = pack(Dataset.from_dict({"text": ["abcdefg" * 30]}), TOKENIZER, 32, keep_tail=True)
    rows = list(blocks.remove_columns(["labels", "shift_labels"]))
    batch = MaskingCollator(TOKENIZER, seed=0)(rows)
    assert set(batch) == {"input_ids", "labels", "reset_mask", "attention_mask"}
    chosen = batch["labels"] != IGNORED
    original = blocks["input_ids"][:]
    assert chosen.any() and (batch["labels"][chosen] == original[chosen]).all()
    assert (batch["input_ids"][~chosen] == original[~chosen]).all()
    assert not chosen[original >= 256].any()


def test_evaluation_asks_for_the_same_tokens_every_time(monkeypatch):
    blocks = pack(Dataset.from_dict({"text": ["abcdefg" * 30]}), TOKENIZER, 32, keep_tail=True)
    collator = MaskingCollator(TOKENIZER, seed=3)
    first, second = mask_once(blocks, collator), mask_once(blocks, MaskingCollator(TOKENIZER, seed=3))
    assert np.array_equal(first["input_ids"][:], second["input_ids"][:])
    again = collator(list(first))
    assert np.array_equal(again["input_ids"], first["input_ids"][:])
    assert np.array_equal(again["labels"], first["labels"][:])
    monkeypatch.setattr(packing, "MASKED", 64)  # two blocks at a time
    parts = mask_once(blocks, MaskingCollator(TOKENIZER, seed=4))
    assert len(parts) == len(blocks) and parts.cache_files
    asked = parts["labels"][:] != IGNORED
    assert asked.any() and (parts["labels"][:][asked] == blocks["labels"][:][asked]).all()
    with pytest.raises(ValueError, match="too short: none of its tokens was masked"):
        mask_once(blocks, MaskingCollator(TOKENIZER, mlm_probability=0.0, seed=0))


def test_a_tokenizing_process_that_dies_is_told(monkeypatch):
    monkeypatch.setattr(tokenizing, "_work", die)
    documents = Dataset.from_dict({"text": [f"a text whose blocks are in no cache {time.time_ns()}"] * 3})
    with pytest.raises(ChildProcessError, match="a process that tokenizes died.*fewer than preprocessing_num_workers=2"):
        pack(documents, TOKENIZER, 16, num_proc=2)
    monkeypatch.undo()
    assert len(pack(documents, TOKENIZER, 16, num_proc=2)) > 6


def die(batch):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(tokenizing.START != "fork", reason="only forked processes take over what this test puts in place")
def test_processes_that_tokenize_end_with_the_one_that_asks_them(monkeypatch):
    monkeypatch.setattr(tokenizing, "_work", sleep)
    if (asking := os.fork()) == 0:
        pack(Dataset.from_dict({"text": ["a text that nobody tokenizes to its end"] * 3}), TOKENIZER, 16, num_proc=2)
        os._exit(0)
    workers, end = [], time.monotonic() + 60
    while not workers and time.monotonic() < end:
        time.sleep(0.05)
        workers = psutil.Process(asking).children()
    assert workers
    os.kill(asking, signal.SIGKILL)
    os.waitpid(asking, 0)
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive


def sleep(batch):
    time.sleep(60)


@pytest.mark.parametrize("how", ["cut", "one bit", "one bit of the facts", "no facts"])
def test_a_table_that_was_changed_in_the_cache_is_written_anew(how):
    documents = Dataset.from_dict({"text": [f"a text, {how}"] * 9})
    before = pack(documents, TOKENIZER, 16)
    wanted, table = before["input_ids"][:].tolist(), Path(before.cache_files[0]["filename"])
    path = table if how in ("cut", "one bit") else table.with_suffix(".json")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # tables that are mapped stay as they are
    path.write_bytes({"cut": content[:-300], "no facts": b""}.get(how, content))
    assert pack(documents, TOKENIZER, 16)["input_ids"][:].tolist() == wanted
