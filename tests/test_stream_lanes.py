"""Lanes from a stream: those of a table of the same order, token for token, and a run goes on where it was stopped."""

import pytest
import torch
from datasets import Dataset
from segments import END
from segments import logged
from segments import make_documents
from segments import make_model
from segments import make_table
from segments import make_trainer
from torch.utils.data import IterableDataset

from hf_relpos.data.lanes import LaneView
from hf_relpos.data.packing import cut_blocks
from hf_relpos.data.stream_lanes import LANE_STATE
from hf_relpos.data.stream_lanes import StreamLanes
from hf_relpos.data.tokenizers import build_byte_tokenizer

TEXT = make_table(make_documents(9, 200, 70, 300))  # 72 blocks: 9 steps in 8 lanes
LANES = 8
FIELDS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 14}
SAVES = {"save_strategy": "steps", "save_steps": 1}


def stream_of(table, shards=LANES):
    return table.to_iterable_dataset(num_shards=shards)


def stream_of_documents(documents, shards):
    """Tokenized documents of any length."""
    return Dataset.from_dict({"input_ids": documents}).to_iterable_dataset(num_shards=shards)


def blocks_of(lanes, lane, count):
    """The first blocks of a lane, as lists."""
    blocks = (lanes[step * lanes.rows + lane] for step in range(count))
    return [{name: values.tolist() for name, values in block.items() if name != LANE_STATE} for block in blocks]


class Numbers(IterableDataset):
    """A stream that is not one of `datasets`: blocks of four tokens, in shards."""

    def __init__(self, *sizes):
        self.sizes, self.num_shards, self.at, self.begin = sizes, len(sizes), 0, 0

    def shard(self, count, index):
        return type(self)(*self.sizes[index * self.num_shards // count : (index + 1) * self.num_shards // count])

    def __iter__(self):
        self.at, self.begin = self.begin, 0
        while self.at < sum(self.sizes):
            self.at += 1
            yield {"input_ids": [self.at % END] * 4}


class Stateful(Numbers):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = self.at = state["at"]


# The blocks


@pytest.mark.parametrize("shards", [4, 8, 12])
def test_blocks_are_those_of_a_table(shards):
    view, lanes = LaneView(TEXT, 4), StreamLanes(stream_of(TEXT, shards), 4, items=4 * 40)
    for item in range(len(lanes)):  # twice around, and a little
        block, wanted = lanes[item], view[item % len(view)]
        assert block.keys() == wanted.keys() | {LANE_STATE}
        assert all(torch.equal(block[name], values) for name, values in wanted.items())


def test_targets_are_filled_in_as_in_a_table():
    ids = TEXT.select_columns("input_ids")
    view, lanes = LaneView(ids, 4), StreamLanes(stream_of(ids), 4, items=4 * 17)
    for item in range(len(lanes)):
        assert all(torch.equal(lanes[item][name], values) for name, values in view[item].items())


@pytest.mark.parametrize("block_size", [3, 8, 50])
def test_documents_are_cut_as_they_are_for_a_table(block_size):
    documents = make_documents(*[(7 * number) % 41 + 20 for number in range(24)])
    documents[4] = []
    lanes = StreamLanes(stream_of_documents(documents, 6), 3, 3 * 400, block_size, END)
    for lane in range(3):
        columns = cut_blocks(list(filter(len, documents[8 * lane : 8 * lane + 8])), block_size, END)
        count = len(columns["input_ids"])
        table = [{name: values[row].tolist() for name, values in columns.items()} for row in range(count)]
        assert blocks_of(lanes, lane, count + 2) == table + table[:2]  # it begins again behind its last whole block


def test_a_lane_that_ends_early_begins_again_while_the_others_go_on():
    lanes = StreamLanes(Numbers(2, 5), 2, items=2 * 6)
    seen = [[block["input_ids"][0] for block in blocks_of(lanes, lane, 6)] for lane in (0, 1)]
    assert seen == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 1]]
    assert [block["reset_mask"][0] for block in blocks_of(lanes, 0, 6)] == [1, 0, 1, 0, 1, 0]


def test_what_is_in_between_is_skipped():
    lanes = StreamLanes(stream_of(TEXT, 4), 4, items=4 * 18)
    view = LaneView(TEXT, 4)
    for item in (5, 13, 61, 1):
        assert torch.equal(lanes[item]["input_ids"], view[item]["input_ids"])


@pytest.mark.parametrize("stream", [stream_of(TEXT, 4), Stateful(20, 20, 20, 20)], ids=["datasets", "own"])
def test_a_state_leads_to_the_next_block(stream):
    lanes = StreamLanes(stream, 4, items=4 * 40)
    for step in (0, 7, 17, 18, 25):
        state = lanes[4 * step + 2][LANE_STATE]
        resumed = StreamLanes(stream, 4, 4 * 40, states={2: state})
        for later in (step + 1, step + 4):
            assert torch.equal(resumed[4 * later + 2]["input_ids"], lanes[4 * later + 2]["input_ids"])


# Training


def trainer_of(folder, stream, **fields):
    model = make_model(vocab_size=259, hidden_dropout=0.1, attention_dropout=0.1)
    return make_trainer(folder, stream, model=model, **FIELDS | fields)


def test_a_stream_trains_as_a_table_does(tmp_path):
    table = trainer_of(tmp_path, TEXT)
    table.train()
    stream = trainer_of(tmp_path, stream_of(TEXT))
    stream.train()
    assert stream.ids == table.ids and len(stream.ids) == 28
    assert stream.costs == table.costs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dataloader_num_workers": 2, "remove_unused_columns": False},
        {"options": {"lane_groups": 2}, "per_device_train_batch_size": 2},
        {"options": {"block_size": 8, "processing_class": build_byte_tokenizer()}},
    ],
    ids=["blocks", "workers", "groups", "documents"],
)
def test_a_resumed_run_computes_the_same_bits(tmp_path, options):
    documents = make_documents(*[(7 * number) % 41 + 20 for number in range(24)])
    stream = stream_of_documents(documents, LANES) if "block_size" in options.get("options", {}) else stream_of(TEXT)
    whole = trainer_of(tmp_path, stream, **SAVES | options)
    whole.train()
    for step in (1, 10):
        resumed = trainer_of(tmp_path, stream, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.ids == whole.ids[2 * step :] and len(resumed.ids) == 2 * (14 - step)
        assert resumed.costs == whole.costs[2 * step :]


@pytest.mark.parametrize(("batch_size", "batches"), [(8, 1), (2, 4)])
def test_other_divisions_of_the_lanes_go_on(tmp_path, batch_size, batches):
    whole = make_trainer(tmp_path, stream_of(TEXT), **FIELDS | SAVES)
    whole.train()
    fields = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": batches, "max_steps": 14}
    resumed = make_trainer(tmp_path, stream_of(TEXT), **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert sum(resumed.ids, []) == sum(whole.ids[12:], [])
    assert logged(resumed) == pytest.approx(logged(whole), abs=1e-6)


def test_a_text_that_begins_anew(tmp_path):
    trainer_of(tmp_path, Numbers(*[4] * LANES), **SAVES | {"max_steps": 2}).train()
    anew = trainer_of(tmp_path, Numbers(*[4] * LANES), ignore_data_skip=True, max_steps=4)
    anew.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(anew.ids) == 4 and anew.ids[0][0] == [1] * 4


# Refusals


@pytest.mark.parametrize(
    ("stream", "fields", "reason"),
    [
        (stream_of(TEXT, 3), {}, "the IterableDataset of 3 shards cannot fill 8 lanes: each reads shards of its own"),
        (iter(TEXT), {}, "the generator has no lanes"),
        (Numbers(*[4] * LANES), {"max_steps": -1}, "max_steps has to be specified"),
        (stream_of_documents([[]] * LANES, LANES), {}, "first row of the stream has no tokens"),
    ],
)
def test_what_cannot_be_lanes_is_refused_before_training(tmp_path, stream, fields, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path, stream, **FIELDS | fields)


@pytest.mark.parametrize(
    ("stream", "options", "reason"),
    [
        (Numbers(4, 4, 4, 0, 4, 4, 4, 4), {}, "lane 3 has no block: its shards hold 0 tokens and block_size is 4"),
        (
            stream_of_documents(make_documents(*[9] * 8), LANES),
            {"block_size": 10},
            "lane 0 has no block: its shards hold 9 tokens and block_size is 10",
        ),
        (
            stream_of_documents(make_documents(*range(9, 17)), LANES),
            {},
            "a row of lane 1 has 10 tokens and the stream's first has 9: .* block_size makes blocks",
        ),
        (
            Dataset.from_dict({"text": ["a"] * LANES}).to_iterable_dataset(LANES),
            {"block_size": 10},
            "a row of lane 0 must be a dict whose input_ids are a list or tensor of tokens, found",
        ),
    ],
)
def test_a_share_without_a_block_and_rows_that_are_none_are_named(tmp_path, stream, options, reason):
    trainer = make_trainer(tmp_path, stream, options=options, **FIELDS)
    with pytest.raises(ValueError, match=reason):
        trainer.train()
    assert trainer.costs == []


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (Numbers(*[4] * LANES), None, "the Numbers cannot go on from .*checkpoint-2: it has no state_dict"),
        (stream_of(TEXT).map(dict).shuffle(seed=0, buffer_size=3), None, "its state_dict leads to another row than before"),
        (stream_of(TEXT), stream_of(TEXT.shuffle(seed=3)), "its state_dict leads to another row than before"),
        (stream_of(TEXT), stream_of(TEXT, 16), "was reading a text with shards 8 instead of 16"),
        (stream_of(TEXT), TEXT, "with steps None instead of 9"),
    ],
    ids=["no state", "shuffle buffer", "other text", "other shards", "a table"],
)
def test_what_cannot_be_resumed_is_refused_before_a_step(tmp_path, before, after, reason):
    make_trainer(tmp_path, before, **FIELDS | SAVES | {"max_steps": 2}).train()
    resumed = make_trainer(tmp_path, before if after is None else after, **FIELDS)
    with pytest.raises(ValueError, match=reason):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.costs == []
