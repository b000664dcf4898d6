"""Segment memory of Transformer-XL: the hidden states that entered each layer for the last tokens of the previous segments.

A memory is an argument and a result, never a state of the module; it is read-only, and every operation returns a new one.
"""

from typing import Any
from typing import NamedTuple

import torch
from torch.utils._pytree import GetAttrKey
from torch.utils._pytree import register_pytree_node

from .positions import reads_freely


class SegmentMemory(NamedTuple):
    """Hold what a forward pass remembers (arXiv 1901.02860, section 3.2).

    Attributes:
        hidden: `(batch, layers, mem_len, hidden_size)` inputs of each layer, right aligned: the newest token is in the last slot.
        length: `(batch,)` number of valid slots a row; the slots before them are never attended to.
    """

    hidden: torch.Tensor
    length: torch.Tensor

    @property
    def slots(self) -> int:
        """Number of slots, valid or not."""
        return self.hidden.shape[2]

    def detach(self) -> "SegmentMemory":
        """Return the same memory cut off from the graph."""
        return SegmentMemory(self.hidden.detach() if self.hidden.requires_grad else self.hidden, self.length)

    def to(self, *args: Any, **kwargs: Any) -> "SegmentMemory":
        """Return the same memory on another device or with hidden states of another floating dtype."""
        hidden = self.hidden.to(*args, **kwargs)
        return SegmentMemory(hidden, self.length.to(hidden.device))

    def select(self, rows: torch.Tensor) -> "SegmentMemory":
        """Return the given rows, `(new batch,)` indices: reorders beams, repeats or drops rows."""
        return SegmentMemory(self.hidden[rows], self.length[rows])

    def reset(self, rows: torch.Tensor) -> "SegmentMemory":
        """Forget everything in the rows where `rows`, `(batch,)` booleans, is true."""
        return SegmentMemory(self.hidden, self.length.masked_fill(rows, 0))

    def resize(self, slots: int) -> "SegmentMemory":
        """Return the newest tokens in a memory of another number of slots; a ValueError if it is negative."""
        if slots < 0:
            raise ValueError(f"a memory cannot have {slots} slots")
        if slots <= self.slots:
            return SegmentMemory(self.hidden[:, :, self.slots - slots :], self.length.clamp(max=slots))
        batch, layers, _, size = self.hidden.shape
        empty = self.hidden.new_zeros(batch, layers, slots - self.slots, size)
        return SegmentMemory(torch.cat([empty, self.hidden], 2), self.length)


def _parts_by_name(memory: Any) -> tuple[Any, None]:
    return [(GetAttrKey(name), getattr(memory, name)) for name in memory._fields], None


# Named tuples can be traced without this, but not be saved with an exported program.
register_pytree_node(
    SegmentMemory,
    lambda memory: (list(memory), None),
    lambda parts, _: SegmentMemory(*parts),
    serialized_type_name=f"{SegmentMemory.__module__}.{SegmentMemory.__qualname__}",
    flatten_with_keys_fn=_parts_by_name,
)

torch.serialization.add_safe_globals([SegmentMemory])  # `torch.load` reads a saved memory with its defaults


def rows_of(memory: SegmentMemory) -> int:
    """Return how many rows a memory has; a ValueError for what is none."""
    if not isinstance(memory, tuple | list) or len(memory) != 2 or not all(isinstance(part, torch.Tensor) for part in memory):
        parts = f" of {', '.join(type(part).__name__ for part in memory)}" if isinstance(memory, tuple | list) else ""
        raise ValueError(f"memory must be a SegmentMemory(hidden, length) of two tensors, got {type(memory).__name__}{parts}")
    return len(memory[0])


def check_memory(memory: SegmentMemory, batch: int, layers: int, slots: int, like: torch.Tensor) -> SegmentMemory:
    """Refuse a memory that another model, another batch or another setting made.

    Args:
        memory: the memory, or a tuple of its two tensors.
        batch, layers, slots: what the model and the input expect.
        like: embeddings of the input, `(batch, sequence, hidden_size)`, for size and dtype.

    Raises:
        ValueError: names what does not fit and what is expected.
    """
    rows_of(memory)
    memory = SegmentMemory(*memory)
    expected = (batch, layers, slots, like.shape[-1])
    if tuple(memory.hidden.shape) != expected:
        raise ValueError(
            f"memory.hidden has the shape {tuple(memory.hidden.shape)}, expected {expected}: (batch, layers, mem_len, hidden_size)"
        )
    if tuple(memory.length.shape) != (batch,) or memory.length.is_floating_point():
        raise ValueError(
            f"memory.length has the shape {tuple(memory.length.shape)} and dtype {memory.length.dtype}, expected ({batch},) integers"
        )
    if memory.hidden.dtype != like.dtype:
        raise ValueError(
            f"memory.hidden has the dtype {memory.hidden.dtype}, the model computes in {like.dtype}: use memory.to(dtype)"
        )
    if reads_freely(memory.length) and not ((memory.length >= 0) & (memory.length <= slots)).all():
        raise ValueError(f"memory.length must lie between 0 and mem_len={slots}, got {memory.length.tolist()}")
    return memory


def next_memory(
    memory: SegmentMemory | None,
    layer_inputs: list[torch.Tensor],
    slots: int,
    valid: torch.Tensor | None,
    document: torch.Tensor | None,
    reuse: int | None = None,
) -> SegmentMemory:
    """Return the memory after a segment: the last `slots` valid tokens of memory and segment, of the last document only.

    Args:
        memory: the memory before the segment; None for an empty one.
        layer_inputs: what entered each layer, `(batch, sequence, hidden_size)` each.
        slots: number of slots of the new memory.
        valid: `(batch, sequence)` False for padding; None when all tokens count.
        document: `(batch, sequence)` number of the document of each token, 0 for the one that the memory belongs to.
        reuse: how many of the segment's first tokens are remembered, padding not counted; None for all.
    """
    segment = torch.stack(layer_inputs, 1)
    if reuse is not None and valid is None:
        segment = segment[:, :, :reuse]
        document = None if document is None else document[:, :reuse]
    elif reuse is not None and valid is not None:
        valid = valid & (valid.cumsum(1) <= reuse)
    batch, layers, sequence, size = segment.shape
    if memory is None:
        memory = SegmentMemory(
            segment.new_zeros(batch, layers, slots, size), torch.zeros(batch, dtype=torch.long, device=segment.device)
        )
    stream = torch.cat([memory.hidden, segment], 2)
    if valid is None:
        hidden = stream[:, :, sequence:]
        last = None if document is None else document[:, -1:]
        counted = torch.ones_like(document, dtype=torch.bool) if document is not None else None
    else:
        # Padding may stand anywhere: valid tokens are moved to the right, in order, and the newest slots are kept.
        counts = torch.cat([torch.ones_like(valid[:, :1]).expand(-1, memory.slots), valid], 1).long()
        number = torch.arange(counts.shape[1], device=counts.device)
        order = (counts * counts.shape[1] + number).argsort(dim=1)  # no two are equal: exporters know no stable sort
        kept = order[:, -slots:, None].expand(-1, -1, size)[:, None].expand(-1, layers, -1, -1)
        hidden, counted = stream.gather(2, kept), valid
        last = None if document is None else torch.where(valid, document, 0).amax(1, keepdim=True)
    fresh = sequence if counted is None else counted.sum(1) if last is None else (counted & (document == last)).sum(1)
    carried = memory.length if last is None else torch.where(last[:, 0] == 0, memory.length, 0)
    return SegmentMemory(hidden, (carried + fresh).clamp(max=slots))
