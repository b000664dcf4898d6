"""Reading files: what is trained on is what the files say, and the record says what was left out."""

import bz2
import gzip
import json
import lzma
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from hf_relpos.data import readers
from hf_relpos.data.hold_out import hold_out
from hf_relpos.data.sources import describe_documents
from hf_relpos.data.sources import describe_text
from hf_relpos.data.sources import load_documents
from hf_relpos.data.sources import load_files
from hf_relpos.data.tables import shuffle_documents
from hf_relpos.training.arguments import DataArguments

TEXTS = ["first text", "second: é, \u2028 and \U0001f600", 'a "quoted" word']
ROWS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = 'text,id\nfirst text,0\n"second: é, \u2028 and \U0001f600",1\n"a ""quoted"" word",2\n'.encode()


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def read(path, content, column="text"):
    path.write_bytes(content)
    return list(load_files([str(path)], column)["text"])


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.jsonlines", "a.JSONL", "a.json", "a::b.jsonl", "a[1]*.jsonl", "a b#c?.jsonl"]
)
def test_lines_of_json_under_all_their_names(tmp_path, name):
    assert read(tmp_path / name, LINES) == TEXTS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.bz2", bz2.compress(LINES)),
        ("a.jsonl.xz", lzma.compress(LINES)),
        ("a.jsonl.zst", zstd(LINES)),
        ("named_wrongly.jsonl", gzip.compress(LINES, mtime=0)),
        ("unpacked.jsonl.gz", LINES),
        ("mark.jsonl", b"\xef\xbb\xbf" + LINES),
        ("utf16.jsonl", LINES.decode().encode("utf-16")),
        ("returns.jsonl", LINES.replace(b"\n", b"\r\n")),
        ("blank.jsonl", LINES + b"\n\n"),
        ("list.json", json.dumps(ROWS, indent=1).encode()),
        ("line.json", json.dumps(ROWS).encode()),
        ("inside.json", json.dumps({"version": 1, "data": ROWS}, indent=1).encode()),
        ("a.csv", CSV),
        ("mark.csv", b"\xef\xbb\xbf" + CSV),
        ("a.csv.gz", gzip.compress(CSV, mtime=0)),
        ("a.tsv", CSV.replace(b",0", b"\t0").replace(b",1", b"\t1").replace(b",2", b"\t2").replace(b"text,id", b"text\tid")),
    ],
)
def test_every_format_gives_the_same_documents(tmp_path, name, content):
    assert read(tmp_path / name, content) == TEXTS


def test_compressed_text_and_its_byte_order_mark(tmp_path):
    assert read(tmp_path / "a.txt.gz", gzip.compress(b"one\r\ntwo", mtime=0)) == ["one\ntwo"]
    assert read(tmp_path / "b.txt", "\ufeffé".encode()) == read(tmp_path / "c.txt", "é".encode("utf-16")) == ["é"]


def test_cells_are_text_whatever_they_say(tmp_path):
    rows = ["null", "NA", "None", "nan", "N/A", "-", "1e5", "007", "True", "x" * 200_000, "two\nlines"]
    table = "text\n" + "".join(f'"{row}"\n' for row in rows)
    assert read(tmp_path / "a.csv", table.encode()) == rows
    assert read(tmp_path / "b.csv", b"text\n007\n1.50\nNA\n") == ["007", "1.50", "NA"]


def test_kinds_of_files_and_of_other_columns_may_be_mixed(tmp_path):
    (tmp_path / "a.csv").write_text("text,id\nfrom csv,1\n")
    (tmp_path / "b.jsonl").write_text('{"text": "from jsonl", "id": "one"}\n{"text": "and more", "id": {"x": []}}\n')
    (tmp_path / "c.jsonl").write_text('{"id": 1.5, "text": "another"}\n')
    for name, kind in (("d", pa.large_string()), ("e", pa.dictionary(pa.int8(), pa.string())), ("f", pa.string_view())):
        pq.write_table(
            pa.table({"id": [[1]], "text": pa.array([f"from {name}"], pa.string()).cast(kind)}), tmp_path / f"{name}.parquet"
        )
    (tmp_path / "g.txt").write_text("from text")
    assert list(load_files([str(tmp_path)])["text"]) == [
        "from csv", "from jsonl", "and more", "another", "from d", "from e", "from f", "from text",
    ]  # fmt: skip


def test_a_changed_file_is_read_anew_whatever_its_time_says(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    assert read(path, b"old") == ["old"]
    link.symlink_to(path)
    assert list(load_files([str(link)])["text"]) == ["old"]
    before = path.stat()
    path.write_bytes(b"new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list(load_files([str(path)])["text"]) == list(load_files([str(link)])["text"]) == ["new"]


def test_each_file_is_read_once_through_all_its_names(tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "a.txt").write_text("text")
    (inside / "link.txt").symlink_to(inside / "a.txt")
    os.link(inside / "a.txt", inside / "hard.txt")
    (inside / "loop").symlink_to(inside)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "b.txt").write_text("linked folder")
    (inside / "to_far").symlink_to(tmp_path / "far")
    (inside / "nothing").symlink_to(tmp_path / "none")
    (inside / ".hidden").write_text("hidden")
    documents = load_documents(DataArguments(train_file=[str(inside), str(inside / "a.txt")], validation_split_percentage=30))
    assert documents.left_out["train"] == {"files given twice": 3, "links to nothing": 1, "hidden files and folders": 1}
    assert sorted(load_files([str(inside)])["text"]) == ["linked folder", "text"]
    with pytest.raises(ValueError, match=r"nothing' is a link to nothing: .*none is not there"):
        load_files([str(inside / "nothing")])


def test_the_record_says_what_was_left_out_and_what_stands_in_both_texts(tmp_path, caplog):
    pq.write_table(pa.table({"text": ["a", None, "", "b", None]}), tmp_path / "a.parquet")
    (tmp_path / "v.txt").write_text("b")
    given = {"train_file": [str(tmp_path / "a.parquet")], "validation_file": [str(tmp_path / "v.txt")]}
    found = describe_text(load_documents(DataArguments(**given)))
    assert found["train"]["documents"] == 2
    assert found["train"]["left_out"] == {"missing values": 2, "empty documents": 1}
    assert found["validation"]["also_in_training"] == {"documents": 1, "bytes": 1}
    assert "left out of the train text: 2 missing values, 1 empty documents" in caplog.text
    (tmp_path / "v.txt").write_text("c")
    assert set(describe_text(load_documents(DataArguments(**given)))["validation"]) == {"documents", "bytes", "sha256"}


@pytest.mark.parametrize("split", ["validation_file", "test_file"])
def test_a_file_is_not_trained_and_evaluated_on(tmp_path, split):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=rf"a\.txt would be both trained and evaluated on \(train_file and {split}\)"):
        load_documents(DataArguments(train_file=[str(tmp_path / "a.txt")], **{split: [str(tmp_path / "link.txt")]}))


def test_all_bad_files_are_named_at_once(tmp_path):
    for number in range(7):
        (tmp_path / f"{number}.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"0\.txt is not in UTF-8 .*; .*4\.txt is not in UTF-8 .*; and 2 more"):
        load_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", b"PK\x03\x04rest", r"a\.zip is a binary file: an archive of type zip; unpack it first"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-12], r"a\.jsonl\.gz cannot be read as json"),
        ("a.jsonl", LINES[:-8], r"a\.jsonl cannot be read as json: line 3"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', r"a\.jsonl cannot be read as json: line 2 holds '\[1\]'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"holds half of a surrogate pair"),
        ("a.json", b'{"x": 1,\n "y": 2}', r"neither lines of objects nor one list"),
        ("a.csv", b"text;id\na;1\n", r"has no column 'text'; text_column may be one of \['text;id'\]"),
        ("a.csv", b"text,id\na,1,2\n", r"line 2 has 3 cells, not 2"),
        ("a.csv", b'text,id\n"a,1\n', r"a\.csv cannot be read as csv"),
        ("a.csv", b"text\na\0b\n", r"a\.csv is a binary file: it has NUL bytes"),
        ("a.parquet", b"PAR1 no", r"a\.parquet cannot be read as parquet"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name, content)


# ---- long documents


def test_a_long_document_is_cut_into_rows_that_make_it_up(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE", 50)
    text = "".join(f"line {number} é\n" for number in range(40)) + "x" * 120
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + '\n{"text": "short"}\n')
    alone, both = load_files([str(path)]), load_files([str(path), str(tmp_path / "b.jsonl")])
    assert max(map(len, alone["text"])) <= 50 and "".join(alone["text"]) == text
    assert list(alone["continues"]) == [False] + [True] * (len(alone) - 1)
    described = describe_documents(both)
    assert (described["documents"], described["bytes"]) == (3, 2 * len(text.encode()) + 5)
    assert load_files([str(tmp_path / "b.jsonl")]).column_names == ["text", "continues"]


def test_the_rows_of_a_long_document_stay_together_when_documents_are_shuffled():
    rows = [(f"{document} {row}", row > 0) for document in range(20) for row in range(1 + document % 3)]
    table = Dataset.from_dict({"text": [text for text, _ in rows], "continues": [more for _, more in rows]})
    shuffled = list(zip(*(shuffle_documents(table, seed=1)[name] for name in table.column_names), strict=True))
    assert sorted(shuffled) == sorted(rows) and shuffled != rows
    assert all(rows[rows.index(row) - 1] == shuffled[place - 1] for place, row in enumerate(shuffled) if row[1])
    whole = table.filter(lambda more: not more, input_columns="continues").remove_columns("continues")
    assert shuffle_documents(whole, seed=1)["text"][:] == whole.shuffle(seed=1)["text"][:]


# ---- the share for validation

documents = st.lists(st.lists(st.text(max_size=30).filter(bool), min_size=1, max_size=3), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(1, 99))
def test_the_share_is_one_of_bytes_and_nothing_is_lost(rows, percentage):
    texts = [text for document in rows for text in document]
    continues = [number > 0 for document in rows for number in range(len(document))]
    table = Dataset.from_dict({"text": texts, "continues": continues})
    total = len("".join(texts).encode(errors="surrogatepass"))
    wanted = total - int(total * (100 - percentage) / 100)
    try:
        train, held = hold_out(table, percentage)
    except ValueError as error:
        assert "too short" in str(error)
        return
    sizes = [len("".join(part["text"]).encode()) for part in (train, held)]
    assert sum(sizes) == total
    assert abs(sizes[1] - wanted) <= max(wanted / 10, 3)  # a character is not cut
    assert not held["continues"][0] and not train["continues"][0]
    assert sorted("".join([*train["text"], *held["text"]])) == sorted("".join(texts))
    assert hold_out(table, percentage)[1]["text"][:] == held["text"][:]


def test_documents_of_unequal_length_give_their_share():
    sizes = np.random.default_rng(1).lognormal(5, 2, 400).astype(int) + 1
    table = Dataset.from_dict({"text": ["x" * size for size in sizes]})
    train, held = hold_out(table, 5)
    assert sum(map(len, held["text"])) == pytest.approx(sizes.sum() * 0.05, rel=0.1)
    assert len(held) < len(table) / 2 and len(train) + len(held) <= len(table) + 1
