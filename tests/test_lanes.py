"""The layout of blocks in lanes: nothing lost, nothing twice, everything in order."""

import pickle

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from hf_relpos.data import tables
from hf_relpos.data.lanes import LaneView
from hf_relpos.data.packing import IGNORED
from hf_relpos.data.packing import cut_blocks
from hf_relpos.data.packing import pack
from hf_relpos.data.streams import Streams
from hf_relpos.data.tokenizers import build_byte_tokenizer


def documents(*lengths):
    """Documents whose tokens are all different: 0, 1, 2, ..."""
    tokens = iter(range(sum(lengths)))
    return [[next(tokens) for _ in range(length)] for length in lengths]


def table(*lengths, block_size=4, padding=None, end=999):
    return Dataset.from_dict(cut_blocks(documents(*lengths), block_size, end, padding)).with_format("torch")


def read(view, batch_size):
    """The tokens of each row of the batches, one stream a row, padding left out."""
    batches = list(DataLoader(view, batch_size=batch_size))
    rows = {}
    for number, batch in enumerate(batches):
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        for row, (ids, kept) in enumerate(zip(batch["input_ids"], mask, strict=True)):
            lane = row + batch_size * (number % (view.rows // batch_size))
            rows.setdefault(lane, []).extend(ids[kept].tolist())
    return [rows[lane] for lane in sorted(rows)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 6])
def test_each_row_reads_on_where_it_stopped(batch_size):
    view = LaneView(table(100), rows=6)
    assert (len(view), view.steps) == (24, 4)
    assert read(view, batch_size) == [list(range(16 * lane, 16 * lane + 16)) for lane in range(6)]


def test_targets_cross_the_ends_of_blocks_and_lanes():
    view = LaneView(table(40), rows=2)
    for block in (view[item] for item in range(len(view))):
        assert block["shift_labels"].tolist() == [token + 1 if token < 39 else 999 for token in block["input_ids"].tolist()]


def test_a_lane_begins_without_memory_and_documents_keep_their_marks():
    marks = {item: block["reset_mask"].tolist() for item, block in enumerate(LaneView(table(6, 26), rows=2))}
    assert marks[0] == [1, 0, 0, 0] and marks[1] == [1, 0, 0, 0] and marks[2] == [0, 0, 1, 0]
    assert all(not any(marks[item]) for item in range(3, 8))


def test_no_target_crosses_the_end_of_a_document():
    rows = [{"input_ids": [0, 1, 2, 3], "reset_mask": [1, 0, 0, 1]}, {"input_ids": [4, 5, 6, 7], "reset_mask": [0, 0, 1, 0]}]
    view = LaneView(rows, rows=1)
    assert [view[item]["shift_labels"].tolist() for item in range(2)] == [[1, 2, IGNORED, 4], [5, IGNORED, 7, IGNORED]]


@pytest.mark.parametrize("as_tensors", [True, False])
def test_a_table_of_input_ids_is_completed_and_not_changed(as_tensors):
    rows = [{"input_ids": [4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3], "text": "x"} for row in range(6)]
    if as_tensors:
        rows = [{"input_ids": torch.tensor(row["input_ids"])} for row in rows]
    view = LaneView(rows, rows=2)
    assert view[3]["shift_labels"].tolist() == [17, 18, 19, 20]
    assert view[5]["shift_labels"].tolist() == [21, 22, 23, IGNORED]
    assert view[1]["reset_mask"].tolist() == [1, 0, 0, 0] and view[3]["reset_mask"].tolist() == [0, 0, 0, 0]
    assert view[0]["labels"].tolist() == [0, 1, 2, 3]
    assert "reset_mask" not in rows[0]


def test_a_given_reset_mask_is_not_written_to():
    rows = [{"input_ids": torch.arange(4), "reset_mask": torch.zeros(4, dtype=torch.long)} for _ in range(2)]
    assert LaneView(rows, rows=2)[1]["reset_mask"][0] == 1
    assert not rows[1]["reset_mask"].any()


def test_own_labels_and_padding_make_the_targets():
    rows = [
        {"input_ids": [1, 2, 3, 0], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [4, 5, 6, 7], "attention_mask": [1] * 4},
    ]
    assert LaneView(rows, rows=1)[0]["shift_labels"].tolist() == [2, 3, IGNORED, 4]
    rows = [
        {"input_ids": [1, 2, 3, 4], "labels": [1, IGNORED, 3, 4]},
        {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]},
    ]
    assert LaneView(rows, rows=1)[0]["shift_labels"].tolist() == [IGNORED, 3, 4, 5]


def test_impossible_tables_are_refused():
    with pytest.raises(ValueError, match="10 blocks cannot fill 11 lanes"):
        LaneView(table(40), rows=11)
    with pytest.raises(ValueError, match="cannot fill 0 lanes"):
        LaneView(table(40), rows=0)
    with pytest.raises(ValueError, match="IterableDataset has no lanes"):
        LaneView(table(40).to_iterable_dataset(), rows=1)
    with pytest.raises(ValueError, match="block 1 has 2 tokens and block 0 has 3"):
        LaneView([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], rows=1)
    with pytest.raises(ValueError, match="block 2 has 1 tokens and block 0 has 3"):
        LaneView(Dataset.from_list([{"input_ids": ids} for ids in ([1, 2, 3], [4, 5, 6], [7])]), rows=1)
    with pytest.raises(ValueError, match="block 0 has no tokens"):
        LaneView([{"input_ids": []}], rows=1)
    for block in ([1, 2], "text", {"text": "a"}, {"input_ids": "text"}):
        with pytest.raises(ValueError, match="block 0 must be a dict whose input_ids are a list or tensor of tokens, found"):
            LaneView([block], rows=1)
    with pytest.raises(ValueError, match="4 input_ids but labels of shape"):
        LaneView([{"input_ids": [1, 2, 3, 4], "labels": [1]}], rows=1)[0]
    with pytest.raises(IndexError):
        LaneView(table(40), rows=1)[10]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("block_size", [3, 4, 64])
def test_streams_are_documents_whatever_the_blocks_and_rows(rows, block_size):
    lengths = (5, 1, 13, 8, 2, 7)
    streams = Streams(table(*lengths, block_size=block_size, padding=0))
    assert len(streams) == len(lengths)
    view = streams.lanes(rows)
    lanes = read(view, rows)
    texts = documents(*lengths)
    assert sorted(token for lane in lanes for token in lane) == list(range(36))
    targets = {}
    for block in (view[item] for item in range(len(view))):
        kept = block["shift_labels"] != IGNORED
        targets |= dict(zip(block["input_ids"][kept].tolist(), block["shift_labels"][kept].tolist(), strict=True))
        starts = block["input_ids"][block["reset_mask"] > 0].tolist()
        assert set(starts) <= {text[0] for text in texts} | {0}
    assert targets == {token: after for text in texts for token, after in zip(text, [*text[1:], 999], strict=True)}
    for text in texts:  # whole and in order in one lane
        lane = next(lane for lane in lanes if text[0] in lane)
        place = lane.index(text[0])
        assert lane[place : place + len(text)] == text


def test_short_lanes_are_padded_with_nothing_to_learn():
    view = Streams(table(9, 3, block_size=4)).lanes(2)
    padded = [view[item] for item in (3, 5)]
    assert len(view) == 6
    for block in padded:
        assert not block["attention_mask"].any() and (block["shift_labels"] == IGNORED).all()
        assert not block["reset_mask"].any()
    assert "attention_mask" not in Streams(table(8, 8)).lanes(2)[0]


def test_a_fixed_number_of_streams_cuts_tokens_not_blocks():
    for block_size in (3, 5, 16):
        streams = Streams(table(30, block_size=block_size, padding=0), count=4)
        assert streams.bounds.tolist() == [0, 7, 15, 22, 30]
        view = streams.lanes(4)
        assert sum(int((view[item]["shift_labels"] != IGNORED).sum()) for item in range(len(view))) == 30
        assert all(view[row]["reset_mask"][0] == 1 for row in range(4))
    with pytest.raises(ValueError, match="31 streams cannot be cut from 30 tokens"):
        Streams(table(30, padding=0), count=31)
    with pytest.raises(ValueError, match="0 streams"):
        Streams(table(30, padding=0), count=0)
    with pytest.raises(ValueError, match="empty"):
        Streams([])


def test_a_table_without_marks_is_one_text():
    streams = Streams([{"input_ids": [4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3]} for row in range(3)])
    assert len(streams) == 1
    assert read(streams.lanes(1), 1) == [list(range(12))]


def test_streams_of_a_table_on_disk_hold_none_of_its_tokens(tmp_path, monkeypatch):
    """What a worker process is handed is as long for ten times the text."""
    monkeypatch.setattr(tables, "_cache_folder", lambda: tmp_path)
    sizes = []
    for repeats in (1_000, 10_000):
        blocks = pack(Dataset.from_dict({"text": ["0123456789" * repeats]}), build_byte_tokenizer(), 256, keep_tail=True)
        sizes.append(len(pickle.dumps(Streams(blocks).lanes(4))))
    assert sizes[1] < sizes[0] + 8 * len(blocks) + 500
