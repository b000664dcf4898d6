"""Lanes from a stream: what `LaneView` makes of a table, made of rows that can only be read one after another.

A stream is an `IterableDataset` of `datasets`, or any other that can be divided (`num_shards`, and `shard(count, index)` with the
meaning that `datasets` gives them) and, for resuming, can tell where it stands (`state_dict`, `load_state_dict`). Its rows are dicts
with `input_ids`: blocks, as those of a table, or documents of any length, which are cut into blocks here.
"""

import copy
import logging
import zlib
from collections import deque
from collections.abc import Callable
from collections.abc import Iterator
from functools import cache
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset

from hf_relpos.data.lanes import Columns
from hf_relpos.data.lanes import add_targets
from hf_relpos.data.lanes import to_columns
from hf_relpos.data.packing import IGNORED

logger = logging.getLogger(__name__)
warn_once = cache(logger.warning)

# Column in which a block carries the state of its lane; it rides with the data, which are read ahead of the training.
LANE_STATE = "lane_state"
LaneState = dict[str, Any]


class StreamLanes(Dataset):
    """A stream as `rows` lanes of blocks; item i is block `i // rows` of lane `i % rows`, as in `LaneView`.

    Each lane reads its own share of the stream's shards, which stand next to each other, row after row. At the end of its share it
    begins it again, without memory; what does not fill a block there is left out. Items are to be asked for in order, at least
    within a lane: what is in between is read, too.

    Args:
        stream: the stream.
        rows: lanes to read at the same time.
        items: blocks of all lanes together that will be asked for; of a stream, this cannot be known.
        block_size: the stream's rows are documents, to be cut into blocks of so many tokens; without it they are blocks that run
            on, all as long as the first.
        end: the token to be predicted after the last one of a document, with `block_size`.
        states: by lane, the state that a block carried: the lane goes on behind that block.

    Attributes:
        shards: the shards of the stream.
    """

    steps = None

    def __init__(
        self,
        stream: Any,
        rows: int,
        items: int,
        block_size: int | None = None,
        end: int = IGNORED,
        states: dict[int, LaneState] | None = None,
    ) -> None:
        self.stream, self.rows, self.items, self.states = stream, rows, items, states or {}
        self.shards = int(getattr(stream, "num_shards", 1)) if hasattr(stream, "shard") else 1
        if items < 1:
            raise ValueError("the length of a stream is not known: set max_steps to the number of steps to train")
        if self.shards < rows:
            raise ValueError(
                f"the {type(stream).__name__} of {self.shards} shards cannot fill {rows} lanes: each reads shards of its own. Divide the "
                f"data into {rows} files or more (`reshard()` divides parquet), or take fewer lanes: a smaller batch, fewer "
                "accumulated batches, processes or lane_groups"
            )
        self._cut = None if block_size is None else end
        self.block_size = block_size or self._first_size()
        self._lanes: dict[int, _Lane] = {}

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        step, number = divmod(item, self.rows)
        lane = self._lanes.get(number)
        if lane is None or lane.blocks > step:
            lane = self._lanes[number] = _Lane(self._share(number), f"lane {number}", self.block_size, self._cut)
            if (state := self.states.get(number)) and state["blocks"] <= step:
                lane.go_on(state)
        while lane.blocks < step:
            lane.read()
        return lane.read() | {LANE_STATE: lane.state()}

    def _share(self, number: int) -> Any:
        return self.stream.shard(self.rows, number) if hasattr(self.stream, "shard") else copy.deepcopy(self.stream)

    def _first_size(self) -> int:
        row = next(_rows_of(self._share(0)), None)
        if row is None or not (size := len(to_columns(row, "row 0 of the stream")["input_ids"])):
            raise ValueError("the first row of the stream has no tokens: lanes need blocks of one length, at least 1")
        return size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lanes": {}}  # iterators stay in their process


class _Lane:
    """Blocks of one lane.

    Args:
        share: its part of the stream.
        name: its name in messages.
        block_size: tokens of a block.
        end: the target after a document's last token; None if rows are blocks.

    Attributes:
        blocks: the number of blocks that were read.
    """

    def __init__(self, share: Any, name: str, block_size: int, end: int | None) -> None:
        self.share, self.name, self.block_size, self.end = share, name, block_size, end
        self.blocks = 0
        self._beginning = tell(share)
        self._begin(self._beginning)

    def _begin(self, state: Any) -> None:
        if state is not None:
            self.share.load_state_dict(state)
        self._stream, self._before = _rows_of(self.share), state
        # Rows from the one on in which the next block begins, each with the state of the stream before it.
        self._rows: deque[tuple[Any, Columns]] = deque()
        self._offset, self._waiting, self._passed = 0, 0, 0

    def read(self) -> Columns:
        """Read the next block; a ValueError says what is wrong with a row, or that the share holds no block."""
        size = self.block_size
        while self._waiting <= size and self._take_row():  # one token more than a block: its last target
            pass
        if self._waiting < size:
            if not self._passed:
                raise ValueError(
                    f"{self.name} has no block: its shards hold {self._waiting} tokens and block_size is {size}. Take fewer lanes, "
                    "or divide the text into shards of about the same size"
                )
            logger.info("%s has read its share (%d blocks) and begins it again", self.name, self._passed)
            warn_once(
                "a lane has read its share of the stream and begins it again, maybe while others still read theirs: what stands in "
                "short shares is then trained on more often. Shards of about the same size avoid that"
            )
            self._begin(self._beginning)
            return self.read()
        block = add_targets(self._next_tokens(size + 1), IGNORED if self.end is None else self.end)
        block = {name: values[:size] for name, values in block.items()}
        if not self._passed:
            block["reset_mask"][0] = 1
        self.blocks, self._passed = self.blocks + 1, self._passed + 1
        self._offset, self._waiting = self._offset + size, self._waiting - size
        while len(self._rows) > 1 and self._offset >= len(self._rows[0][1]["input_ids"]):
            self._offset -= len(self._rows.popleft()[1]["input_ids"])
        return block

    def state(self) -> LaneState | None:
        """Return where the next block begins: a row and an offset in it; None if the stream cannot tell."""
        if self._beginning is None:
            return None
        row, columns = self._rows[0]
        return {
            "blocks": self.blocks, "passed": self._passed, "row": row, "offset": self._offset, "digest": _digest(columns),
        }  # fmt: skip

    def go_on(self, state: LaneState) -> None:
        """Go on where a state says.

        Raises:
            ValueError: there, the stream has another row than before.
        """
        self._begin(copy.deepcopy(state["row"]))
        if not self._take_row() or _digest(self._rows[0][1]) != state["digest"]:
            raise ValueError(
                f"the {type(self.share).__name__} does not go on where it was: in {self.name}, its state_dict leads to another row "
                "than before. Its text has changed, or it draws rows from a shuffle buffer, which no state keeps (shuffle the "
                "files instead). ignore_data_skip=True begins the text anew"
            )
        self.blocks, self._passed, self._offset = state["blocks"], state["passed"], state["offset"]
        self._waiting -= self._offset

    def _take_row(self) -> bool:
        """Take one more row that is not empty; return whether there was one."""
        while True:
            before, row = self._before, next(self._stream, None)
            if row is None:
                return False
            self._before = tell(self.share)
            columns = to_columns(row, f"a row of {self.name}")
            size = len(columns["input_ids"])
            if self.end is None and size != self.block_size:
                raise ValueError(
                    f"a row of {self.name} has {size} tokens and the stream's first has {self.block_size}: lanes need blocks of one "
                    "length. Of documents, SegmentTrainer's block_size makes blocks"
                )
            if not size:
                continue
            if self.end is not None and "reset_mask" not in columns:
                columns["reset_mask"] = torch.zeros_like(columns["input_ids"])
                columns["reset_mask"][0] = 1
            if self._rows and columns.keys() != self._rows[0][1].keys():
                raise ValueError(
                    f"a row of {self.name} has the columns {list(columns)}, the one before {list(self._rows[0][1])}"
                )
            self._rows.append((before, columns))
            self._waiting += size
            return True

    def _next_tokens(self, count: int) -> Columns:
        parts: list[Columns] = []
        start = self._offset
        for _, columns in self._rows:
            parts.append({name: values[start : start + count] for name, values in columns.items()})
            count -= len(parts[-1]["input_ids"])
            start = max(0, start - len(columns["input_ids"]))
            if not count:
                break
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class LaneCollator:
    """A collator that hands the states of lanes on with the batch, as a list.

    Args:
        collate: makes the rest of the batch.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], Any]) -> None:
        self.collate = collate

    def __call__(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        states = [block[LANE_STATE] for block in blocks]
        rest = [{name: values for name, values in block.items() if name != LANE_STATE} for block in blocks]
        return self.collate(rest) | {LANE_STATE: states}


def tell(stream: Any) -> Any:
    """Return a stream's state, None if it cannot tell or cannot go on from it."""
    if not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")):
        return None
    return copy.deepcopy(stream.state_dict())


def _rows_of(stream: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(stream, datasets.IterableDataset):
        yield from stream
        return
    # Its own iterator divides the shards among worker processes once more.
    for batch in stream.iter(1):
        yield {name: values[0] for name, values in batch.items()}  # pyright: ignore[reportAttributeAccessIssue]


def _digest(columns: Columns) -> int:
    return zlib.crc32(columns["input_ids"].numpy().tobytes())
