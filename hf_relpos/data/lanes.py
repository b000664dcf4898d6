"""Lanes: the order of blocks in which row b of one batch continues row b of the batch before.

Segment memory only means something when a row of a batch follows the same row of the last one. Here that order lives
in the data set, so that any sequential sampler, number of processes, workers or accumulated batches keeps it.

A block table is anything with a length whose rows are dicts with `input_ids` of one length: what
`hf_relpos.data.packing.pack` makes, or your own table, whose blocks then run on. Missing `labels`, `shift_labels` and
`reset_mask` are filled in.
"""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data import IterableDataset

from hf_relpos.data.packing import IGNORED

Columns = dict[str, torch.Tensor]

TARGETS = {"labels", "shift_labels", "reset_mask"}
NUMBERS = (list, tuple, np.ndarray, torch.Tensor)


class LaneView(Dataset):
    """A block table as `rows` equal lanes of consecutive blocks, exactly `steps * rows` items, time major.

    Item i is step `i // rows` of lane `i % rows`; blocks that do not fill a step of all lanes are left out. The first
    token of a lane carries `reset_mask` 1: a lane begins without memory, whatever its reader still holds.

    Args:
        blocks: the block table, in the order of the text.
        rows: lanes to read at the same time: rows of a batch, times processes, times accumulated batches.
    """

    def __init__(self, blocks: Any, rows: int) -> None:
        if isinstance(blocks, IterableDataset) or not (hasattr(blocks, "__getitem__") and hasattr(blocks, "__len__")):
            raise ValueError(f"the {type(blocks).__name__} has no lanes: its blocks cannot be addressed by number")
        if rows < 1 or len(blocks) < rows:
            raise ValueError(f"{len(blocks)} blocks cannot fill {rows} lanes: a lane needs a block at least")
        self.blocks, self.rows, self.steps = blocks, rows, len(blocks) // rows
        self.block_size = self._size(0)
        if not self.block_size:
            raise ValueError("block 0 has no tokens: lanes need blocks of one length, at least 1")
        # A list costs nothing to look through before anything is trained; of other tables, the last block is the likeliest.
        for index in range(len(self)) if isinstance(blocks, list | tuple) else [len(self) - 1]:
            self._size(index)

    def __len__(self) -> int:
        return self.steps * self.rows

    def __getitem__(self, item: int) -> Columns:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        step, lane = divmod(item, self.rows)
        block = self._complete(lane * self.steps + step)
        if step == 0:
            block["reset_mask"][0] = 1
        return block

    def _size(self, index: int, block: Any = None) -> int:
        """Return the tokens of a block; raise a ValueError if it has not as many as the first."""
        size = len(ids_of(self.blocks[index] if block is None else block, f"block {index}"))
        if size != (expected := getattr(self, "block_size", size)):
            raise ValueError(f"block {index} has {size} tokens and block 0 has {expected}: lanes need blocks of one length")
        return size

    def _complete(self, index: int) -> Columns:
        """Return a block with targets; where the table has none, the last target is the first token of the next block."""
        block = read_row(self.blocks, index)
        self._size(index, block)
        if not block.keys() >= TARGETS and index + 1 < len(self.blocks):
            following = read_row(self.blocks, index + 1)
            block = {name: torch.cat([values, following[name][:1]]) for name, values in block.items()}
        return {name: values[: self.block_size] for name, values in add_targets(block).items()}


def read_row(blocks: Any, index: int) -> Columns:
    """Return a row of a block table as new integer tensors `(block_size,)`, without entries that are no sequence of numbers."""
    return to_columns(blocks[index], f"block {index}")


def to_columns(given: Any, name: str) -> Columns:
    """Return what a row of data holds as new integer tensors of one length, without entries that are no sequence of numbers.

    Args:
        given: the row.
        name: its name in messages.
    """
    size = len(ids_of(given, name))
    row = {column: torch.as_tensor(values) for column, values in given.items() if isinstance(values, NUMBERS)}
    for column, values in row.items():
        if values.shape != (size,):
            raise ValueError(f"{name} has {size} input_ids but {column} of shape {tuple(values.shape)}")
    return {column: values.to(torch.long, copy=True) for column, values in row.items()}


def ids_of(row: Any, name: str) -> Any:
    """Return the `input_ids` of a row of data, or raise a ValueError that says what was found instead."""
    found = list(row) if isinstance(row, dict) else type(row).__name__
    ids = row.get("input_ids") if isinstance(row, dict) else None
    if isinstance(ids, NUMBERS):
        return ids
    if ids is not None:
        found = f"input_ids of type {type(ids).__name__}"
    raise ValueError(f"{name} must be a dict whose input_ids are a list or tensor of tokens, found {found}")


def add_targets(columns: Columns, end: int = IGNORED) -> Columns:
    """Fill in `labels`, `reset_mask` and `shift_labels`: the next label, or `end` where the next token begins a document."""
    labels = columns.get("labels", columns["input_ids"])
    if "labels" not in columns and "attention_mask" in columns:
        labels = labels.masked_fill(columns["attention_mask"] == 0, IGNORED)
    reset = columns.get("reset_mask", torch.zeros_like(labels))
    following = labels[1:].masked_fill(reset[1:] > 0, end)
    shifted = torch.cat([following, following.new_full((1,), end)])
    return {"labels": labels, "reset_mask": reset, "shift_labels": shifted} | columns
