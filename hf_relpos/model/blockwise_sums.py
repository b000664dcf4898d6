"""Running sums in blocks: a query's scores with what has grown from each key to it, as part of their product.

Queries get channels of zeros and a one, keys get channels that say how much the sum has grown from the key to the middle of some
rows of the block: one channel for each group of rows, so that numbers stay small where they matter and lose nothing. What grows from
there to a row is the same for all its keys, and a softmax does not see it. A last channel, of ones in the keys and zeros in the queries,
brings the sum of a row's gradients: nothing but what rounding left, which has to be taken from a sum over keys.
"""

import torch
from torch.nn.functional import pad

from .running_sums import parts_in
from .running_sums import to_parts

GROUP = 44
"""Rows that share a channel: fewer lose less, more are faster. Three channels and a last one for the 128 rows of a block keep the width
of keys a multiple of four, without which the fused kernel takes an eighth longer."""


def channels(rows: int, dtype: torch.dtype) -> int:
    """Return how many channels keys have more, for blocks of so many rows."""
    return -(-rows // GROUP) * parts_in(dtype) + 1


def with_channels(key: torch.Tensor, rows: int) -> torch.Tensor:
    """Return all keys with room for the channels that blocks of so many rows write their growth to, the last of ones."""
    more = channels(rows, key.dtype)
    wide = key.new_zeros(*key.shape[:-1], key.shape[-1] + more)
    wide[..., :-more] = key
    wide[..., -1] = 1.0
    return wide


def write_growth(key: torch.Tensor, sums: torch.Tensor, start: int, rows: int, size: int) -> None:
    """Write to a block's keys what has grown from each of them to the groups of rows.

    Args:
        key: `(heads, batch, columns, head_dim + channels)`.
        sums: `(heads, batch, columns)`.
        start: the column of the block's first query, which is its last row.
        rows: number of rows.
        size: rows of the largest block, which says how many channels there are.
    """
    middles = torch.arange(GROUP // 2, size + GROUP // 2, GROUP, device=key.device).clamp(max=rows - 1)
    grown = sums.index_select(-1, start + rows - 1 - middles)[..., None, :] - sums[..., None]
    key[..., -channels(size, key.dtype) : -1] = to_parts(grown, key.dtype).flatten(-2)


def with_groups(query: torch.Tensor, more: int) -> torch.Tensor:
    """Return a block's queries `(heads, batch, rows, head_dim)` with so many channels more: ones in those of their group."""
    rows, parts = query.shape[-2], parts_in(query.dtype)
    row, group = torch.arange(rows, device=query.device) // GROUP, torch.arange(more - 1, device=query.device) // parts
    ones = pad((row[:, None] == group).to(query.dtype), (0, 1))
    return torch.cat([query, ones.expand(*query.shape[:2], -1, -1)], -1)


def add_growth(scores: torch.Tensor, key: torch.Tensor) -> None:
    """Add what the channels of a block's keys say to its scores `(heads, batch, rows, columns)`, in their precision.

    Products in half precision would round it to 8 or 11 bits.
    """
    grown = key[..., :-1].unflatten(-1, (-1, parts_in(key.dtype))).to(scores.dtype).sum(-1)  # (heads, batch, columns, groups)
    for group, rows in zip(grown.unbind(-1), scores.split(GROUP, -2), strict=False):
        rows.add_(group[..., None, :])


def with_room(value: torch.Tensor, rows: int) -> torch.Tensor:
    """Return values as wide as the keys, as the fused kernel wants them."""
    return pad(value, (0, channels(rows, value.dtype)))


def add_growth_gradient(sums: torch.Tensor, of_keys: torch.Tensor, of_rows: torch.Tensor, start: int) -> None:
    """Add to the gradient of a block's sums `(heads, batch, columns)` the gradient of its scores, summed.

    Args:
        sums: what is added to.
        of_keys: `(heads, batch, columns)` summed over rows.
        of_rows: `(heads, batch, rows)` summed over columns; the rows run backwards.
        start: the column of the last row.
    """
    sums.sub_(of_keys)
    sums[..., start : start + of_rows.shape[-1]] += of_rows.flip(-1)


def from_channels(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of a block's score gradients, over rows and over columns, from the gradients of the channels."""
    parts = parts_in(key.dtype)
    return key[..., :-1].unflatten(-1, (-1, parts))[..., 0].sum(-1), query[..., -1]
