"""Local files as a stream: whatever their format and compression, each share is a share of the text, and nothing is lost."""

import bz2
import gzip
import io
import json
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset

from hf_relpos.data import sources
from hf_relpos.data import text_size
from hf_relpos.data import tokenizers
from hf_relpos.data.file_streams import stream_files
from hf_relpos.data.sources import load_documents
from hf_relpos.data.stdlib import stdlib_files
from hf_relpos.data.text_size import count_characters
from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run


def test_files_are_streamed_and_their_beginnings_set_apart(tmp_path):
    rows = [f"document {number}: é\n" * 9 for number in range(40)]
    (tmp_path / "a.txt").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps({"text": row}) + "\n" for row in rows).encode()))
    Dataset.from_dict({"text": rows}).to_parquet(str(tmp_path / "c.parquet"))
    data = {"train_file": [str(tmp_path)], "streaming": True, "validation_split_percentage": 20}
    found = load_documents(DataArguments(**data))
    assert found.train.num_shards == 3
    held, train = [row["text"] for row in found.validation], [row["text"] for row in found.train]
    assert len(held) >= 3 and sum(map(len, held)) < sum(map(len, train))
    for shard, text in enumerate(["".join(rows)] * 3):  # nothing is lost, nothing stands in both
        inside = "".join(row["text"] for row in found.train.shard(3, shard))
        assert text.endswith(inside) and text[: len(text) - len(inside)] in "".join(held)
    assert sum(map(len, held + train)) == 3 * len("".join(rows))
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b not whole")
    with pytest.raises(ValueError, match="b.jsonl.gz cannot be read as json"):
        load_documents(DataArguments(**data))
    names = {"train_file": [str(tmp_path / "b.jsonl.gz")], "validation_file": [str(tmp_path / "a.txt")]}
    broken = load_documents(DataArguments(**names, streaming=True))
    with pytest.raises(ValueError, match="b.jsonl.gz cannot be read as json"):
        list(broken.train)


PACKED = [None, gzip.compress, lzma.compress, bz2.compress, "zstd"]


def write_rows(path, texts, packed=None):
    """Write documents as the name of a file says, compressed or not."""
    rows, plain, kind = Dataset.from_dict({"text": texts}), io.BytesIO(), path.suffix[1:]
    if kind == "txt":
        plain.write("".join(texts).encode())
    else:
        {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[kind](plain)
    if packed == "zstd":
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(plain.getvalue())
    else:
        path.write_bytes(packed(plain.getvalue()) if callable(packed) else plain.getvalue())


@pytest.mark.parametrize("packed", PACKED, ids=["plain", "gz", "xz", "bz2", "zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_every_kind_of_file_is_streamed_compressed_or_not(tmp_path, kind, packed):
    texts, path = [f"document {number}, é\n" for number in range(30)], tmp_path / f"a.{kind}"
    write_rows(path, texts, packed)
    stream, held = stream_files([path], "text")
    assert held is None and stream.num_shards == 1
    assert "".join(row["text"] for row in stream) == "".join(texts)


@pytest.mark.parametrize("packed", PACKED, ids=["plain", "gz", "xz", "bz2", "zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_the_share_set_apart_is_one_of_the_text_not_of_the_bytes_on_the_disk(tmp_path, monkeypatch, kind, packed):
    monkeypatch.setattr(text_size, "SAMPLE", 1 << 18)
    source = "".join(Path(name).read_text("utf-8") for name in stdlib_files()["train"][:200])[: 3 << 20]
    texts, path = [source[start : start + 3000] for start in range(0, len(source), 3000)], tmp_path / f"a.{kind}"
    write_rows(path, texts, packed)
    stream, held = stream_files([path], "text", 10)
    share = sum(len(row["text"]) for row in held) / len(source)
    assert 0.07 < share < 0.13
    assert "".join(row["text"] for row in held) + "".join(row["text"] for row in stream) == source


def test_a_sample_stands_for_the_rest_and_a_short_file_is_counted(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "é" * 50, "other": 7}) + "\n" for _ in range(9000)), "utf-8")
    assert count_characters(path, "text") == 450_000
    monkeypatch.setattr(text_size, "SAMPLE", 1 << 14)
    assert count_characters(path, "text") == pytest.approx(450_000, rel=0.02)
    assert os.path.getsize(path) > 3 * 450_000


def test_what_is_left_out_of_a_stream_is_said_once(tmp_path, caplog):
    rows = [{"text": "a"}, {"other": 1}, {"text": ""}, {"text": None}, {"text": "b"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream, _ = stream_files([tmp_path / "a.jsonl"], "text")
    assert ["".join(row["text"] for row in stream) for _ in range(2)] == ["ab"] * 2
    found = [record.message for record in caplog.records if "left out" in record.message]
    assert found == [f"left out of {tmp_path / 'a.jsonl'}: 2 missing values, 1 empty documents"]


def test_what_is_set_apart_of_a_stream_is_left_out_of_every_share_of_its_shards(monkeypatch):
    monkeypatch.setattr(sources, "STREAMED_EVALUATION", 5)
    texts = [f"text {number}" for number in range(20)]
    train, held = sources._hold_out(Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=4), 5)
    assert held["text"][:] == texts[:5]
    assert [row["text"] for lane in range(4) for row in train.shard(4, lane)] == texts[5:]


def arguments_of(folder, **options):
    """The command line of a small run that streams the files of a folder."""
    options = {
        "train_file": f"{folder}/*.txt", "streaming": "true", "block_size": 16, "mem_len": 8, "max_steps": 3,
        "config_overrides": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2", "per_device_train_batch_size": 4,
        "output_dir": folder / "run", "report_to": "none", "use_cpu": "true", "save_steps": 2, "sample_tokens": 0,
    } | options  # fmt: skip
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def write_texts(folder):
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"text {number} of several\n" * 40)


def test_streamed_files_train_with_memory(tmp_path, caplog):
    write_texts(tmp_path)
    job = prepare(arguments_of(tmp_path, max_steps=70))
    lanes = job.trainer._train_lanes()
    assert (lanes.shards, lanes.rows, lanes.block_size) == (4, 4, 16)
    assert bytes(lanes[6]["input_ids"].tolist()).decode() in "text 2 of several\n" * 40
    assert job.trainer.train().global_step == 70 and job.trainer.evaluate()["eval_tokens"] > 100
    assert len([record for record in caplog.records if "begins it again" in record.message]) == 1


def test_a_streamed_run_goes_on_only_with_the_same_files(tmp_path):
    write_texts(tmp_path)
    options = {"tokenizer_name": "bpe", "vocab_size": 270}
    run(prepare(arguments_of(tmp_path, **options)))
    text = json.loads((tmp_path / "run" / "run_arguments.json").read_text())["text"]
    assert text["train"]["files"] == 4 and text["train"]["bytes"] == 4 * 40 * len("text 0 of several\n")
    assert "| train | in 4 files, streamed | 2,880 |" in (tmp_path / "run" / "README.md").read_text()
    more = arguments_of(tmp_path, **options, max_steps=5, resume_from_checkpoint="auto")
    run(prepare(more))
    (tmp_path / "2.txt").write_text("text 7 of several\n" * 40)
    with pytest.raises(ValueError, match="already holds another run .*train: .*'files': 4"):
        prepare([*more, "--max_steps", "6"])


def test_a_run_that_goes_on_reads_the_bpe_that_it_learned(tmp_path, monkeypatch):
    write_texts(tmp_path)
    options = {"tokenizer_name": "bpe", "vocab_size": 270, "resume_from_checkpoint": "auto"}
    first = prepare(arguments_of(tmp_path, **options))
    run(first)
    monkeypatch.setattr(tokenizers, "train_bpe_tokenizer", None)
    job = prepare(arguments_of(tmp_path, **options, max_steps=5))
    assert job.tokenizer.get_vocab() == first.tokenizer.get_vocab() and run(job)["eval_loss"] > 0
