"""Streams: the texts of a block table, laid out in lanes for evaluation, read from the table when they are asked for."""

import heapq
from array import array
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset

from hf_relpos.data.lanes import Columns
from hf_relpos.data.lanes import LaneView
from hf_relpos.data.lanes import add_targets
from hf_relpos.data.lanes import read_row
from hf_relpos.data.packing import IGNORED
from hf_relpos.data.tables import release_pages

# Rows of a table on disk that are looked through at a time.
SCANNED = 1000


class Streams:
    """The texts of a block table, each to be read from its beginning without memory: what is evaluated.

    Tokens are laid out anew, without padding between texts, so that no number depends on how the table was cut. They stay in
    the table; kept are only the offsets at which blocks and texts begin.

    Args:
        blocks: the block table, in the order of the text; padding is left out.
        count: cut the text into this many equal streams; by default each document is one (`reset_mask` marks their
            first tokens), and a table without `reset_mask` is one text.

    Attributes:
        bounds: the offsets of the streams' first tokens in the text, and its length `(streams + 1,)`.
    """

    def __init__(self, blocks: Any, count: int | None = None) -> None:
        if not len(blocks):
            raise ValueError("there is nothing to evaluate: the block table is empty")
        self.blocks = blocks
        self.block_size = len(read_row(blocks, 0)["input_ids"])
        sizes, starts, tokens = array("q"), array("q"), 0
        for kept, reset in _scan(blocks):
            starts.extend((np.flatnonzero(reset[kept]) + tokens).tolist())
            sizes.append(int(kept.sum()))
            tokens += sizes[-1]
        self._block_bounds = np.append(0, np.cumsum(sizes))
        if count is None:
            found = np.array(starts, dtype=np.int64)
            found = found if len(found) and found[0] == 0 else np.append(0, found)
        elif 1 <= count <= tokens:
            found = np.array([tokens * stream // count for stream in range(count)])
        else:
            raise ValueError(f"{count} streams cannot be cut from {tokens} tokens")
        self.bounds = np.append(found, tokens)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def lanes(self, rows: int) -> LaneView:
        """Lay the streams out, the longest first to the least loaded lane; the ends of short lanes are padded."""
        lanes = [array("q") for _ in range(rows)]
        loads = [(0, row) for row in range(rows)]
        sizes = np.diff(self.bounds)
        for stream in np.argsort(-sizes, kind="stable").tolist():
            load, row = heapq.heappop(loads)
            lanes[row].append(stream)
            heapq.heappush(loads, (load + int(sizes[stream]), row))
        return LaneView(_Lanes(self, [np.array(lane, dtype=np.int64) for lane in lanes]), rows)

    def read(self, start: int, end: int) -> Columns:
        """Read tokens of one stream by their offsets in the text, with their targets."""
        bounds = self._block_bounds
        stop = min(end + 1, int(bounds[-1]))  # the last target is the token after them
        first, last = int(np.searchsorted(bounds, start, "right")) - 1, int(np.searchsorted(bounds, stop, "left"))
        rows = [read_row(self.blocks, index) for index in range(first, last)]
        columns = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        kept = columns.pop("attention_mask", torch.ones_like(columns["input_ids"])) > 0
        part = slice(start - int(bounds[first]), stop - int(bounds[first]))
        columns = add_targets({name: values[kept][part] for name, values in columns.items()})
        return {name: values[: end - start] for name, values in columns.items()}


class _Lanes(Dataset):
    """The block table of streams in lanes: the blocks of the first lane, then those of the second, ..."""

    def __init__(self, streams: Streams, lanes: list[np.ndarray]) -> None:
        self.streams, self.lanes = streams, lanes
        sizes = np.diff(streams.bounds)
        self.ends = [np.cumsum(sizes[lane]) for lane in lanes]
        loads = [int(ends[-1]) if len(ends) else 0 for ends in self.ends]
        self.steps = -(-max(loads) // streams.block_size)
        self.padded = min(loads) < self.steps * streams.block_size

    def __len__(self) -> int:
        return len(self.lanes) * self.steps

    def __getitem__(self, index: int) -> Columns:
        lane, step = divmod(index, self.steps)
        size = self.streams.block_size
        parts = list(self._read(lane, step * size, (step + 1) * size))
        names = parts[0] if parts else self.streams.read(0, 1)
        empty = torch.zeros(0, dtype=torch.long)
        block = {name: torch.cat([empty, *(part[name] for part in parts)]) for name in names}
        if self.padded:
            block["attention_mask"] = torch.ones_like(block["input_ids"])
        missing = (0, size - len(block["input_ids"]))
        return {
            name: torch.nn.functional.pad(values, missing, value=IGNORED if "labels" in name else 0)
            for name, values in block.items()
        }

    def _read(self, lane: int, start: int, end: int) -> Iterator[Columns]:
        """Read what stands between two offsets of a lane, stream by stream; the first token of each is marked."""
        ends = self.ends[lane]
        number = int(np.searchsorted(ends, start, "right"))
        while start < end and number < len(ends):
            stream, stop = self.lanes[lane][number], min(end, int(ends[number]))
            shift = int(self.streams.bounds[stream + 1] - ends[number])  # from offsets of the lane to those of the text
            columns = self.streams.read(start + shift, stop + shift)
            if start + shift == self.streams.bounds[stream]:
                columns["reset_mask"][0] = 1
            yield columns
            start, number = stop, number + 1


def _scan(blocks: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each block which of its tokens are no padding, and which begin a document."""
    mapped = isinstance(blocks, datasets.Dataset) and blocks.format["type"] != "custom"
    if mapped:
        names = [name for name in ("input_ids", "attention_mask", "reset_mask") if name in blocks.column_names]
        chunks: Any = blocks.select_columns(names).with_format("numpy").iter(SCANNED)
        rows = ({name: chunk[name][row] for name in names} for chunk in chunks for row in range(len(chunk["input_ids"])))
    else:
        rows = ({name: value.numpy() for name, value in read_row(blocks, index).items()} for index in range(len(blocks)))
    for row in rows:
        size = len(row["input_ids"])
        yield row.get("attention_mask", np.ones(size)) > 0, row.get("reset_mask", np.zeros(size)) > 0
    if mapped:
        release_pages(blocks)
