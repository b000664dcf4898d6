"""Numbers per distance as matrices of rows and columns, and back, without index tensors.

The rows of a block run backwards, from its last query to its first. Then entry [r, c] of a block has distance number r + c, every
row is the one before shifted by one, and a matrix is a view of what it is made of.

Tables of vectors hold entries for a range of distances, `(heads|1, entries, head_dim)`; distances before and after share the
first and the last. `first` is the entry that distance number 0 of a block would have, which may lie outside of the table.
States are heads first, `(heads, batch, length, head_dim)`, so that one product serves the whole batch.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

TILE = 32
"""Columns a tile of products of keys and distances: fewer waste less, more are faster."""


def spread_out(numbers: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A view in which entry [r, c] is numbers[r, r + c].

    Args:
        numbers: `(..., rows, rows + columns - 1)`, or `(..., 1, rows + columns - 1)` where all rows are one.
        rows, columns: the size of the matrix.

    Returns:
        `(..., rows, columns)`.
    """
    row = numbers.stride(-2) if numbers.shape[-2] > 1 else 0
    strides = (*numbers.stride()[:-2], row + 1, 1)
    return numbers.as_strided((*numbers.shape[:-2], rows, columns), strides, numbers.storage_offset())


def collect(matrix: torch.Tensor) -> torch.Tensor:
    """The reverse of `spread_out`: `(..., rows, columns)` to `(..., rows, rows + columns - 1)`, 0 where a row has no such distance."""
    rows, width = matrix.shape[-2], sum(matrix.shape[-2:])
    # Rows of `width`, read as rows of one less, stand one further to the right each; what comes in from the left is 0.
    return pad(matrix, (0, rows)).flatten(-2)[..., : rows * (width - 1)].unflatten(-1, (rows, width - 1))


class Reach(NamedTuple):
    """The entries of a table that a block meets, and how many distances before and after share the first and last of them."""

    entries: slice
    before: int
    after: int


def reach(first: int, distances: int, entries: int) -> Reach:
    """What a block of so many distances meets of a table with so many entries."""
    low, high = (min(max(place, 0), entries - 1) for place in (first, first + distances - 1))
    count = high - low + 1
    before = min(max(low - first, 0), distances - count)
    return Reach(slice(low, high + 1), before, distances - count - before)


def add_products(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add to `total (heads, batch, rows, columns)`, in place, the products of `left` and `right (heads, batch, length, head_dim)`.

    Where nothing has to be widened, one pass less than a product and a sum.
    """
    right = right.transpose(-1, -2)
    if total.dtype != left.dtype:
        return total.add_(left @ right)
    total.view(-1, *total.shape[2:]).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return total


def products(states: torch.Tensor, vectors: torch.Tensor, first: int, added: torch.Tensor) -> torch.Tensor:
    """Products of states with the vectors of all distances, and what is added to them.

    Args:
        states: `(heads, batch, rows, head_dim)`.
        vectors: `(heads|1, entries, head_dim)`.
        first: entry of distance number 0.
        added: `(heads|1, 1, 1, distances)`.

    Returns:
        `(heads, batch, rows, distances)`.
    """
    distances = added.shape[-1]
    near = reach(first, distances, vectors.shape[1])
    flat, met = _by_head(states, vectors), vectors[:, near.entries].transpose(-1, -2)
    if not near.before and not near.after and added.shape[0] in (1, flat.shape[0]) and added.dtype == flat.dtype:
        return torch.baddbmm(added.flatten(1, 2), flat, met).view(*states.shape[:-1], -1)
    result = (flat @ met).view(*states.shape[:-1], -1)
    ends = result[..., :1].expand(-1, -1, -1, near.before), result, result[..., -1:].expand(-1, -1, -1, near.after)
    return torch.cat(ends, -1).add_(added)


def product_gradients(
    slope: torch.Tensor, states: torch.Tensor, vectors: torch.Tensor, first: int, total: torch.Tensor | None
) -> torch.Tensor:
    """Gradients of `products`.

    Args:
        slope: the gradient of the result; it is used up.
        states, vectors, first: as there.
        total: where the gradient of the vectors is added, if at all.

    Returns:
        The gradient of the states.
    """
    folded, entries = _folded(slope, vectors, first)
    flat = _by_head(folded, vectors)
    if total is not None:
        total[:, entries] += flat.transpose(-1, -2) @ _by_head(states, vectors)
    return (flat @ vectors[:, entries]).view_as(states)


def weighted(weights: torch.Tensor, vectors: torch.Tensor, first: int) -> torch.Tensor:
    """Sums of vectors, `(heads, batch, rows, head_dim)`, by weights `(heads, batch, rows, distances)`, which are used up."""
    folded, entries = _folded(weights, vectors, first)
    return (_by_head(folded, vectors) @ vectors[:, entries]).view(*weights.shape[:-1], -1)


def _folded(numbers: torch.Tensor, vectors: torch.Tensor, first: int) -> tuple[torch.Tensor, slice]:
    """Numbers per entry of a table from numbers per distance, and which entries these are."""
    near = reach(first, numbers.shape[-1], vectors.shape[1])
    last = numbers.shape[-1] - near.after
    kept = numbers[..., near.before : last]
    if near.before:
        kept[..., 0] += numbers[..., : near.before].sum(-1)
    if near.after:
        kept[..., -1] += numbers[..., last:].sum(-1)
    return kept, near.entries


def _by_head(states: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """`(heads, batch, rows, size)` as `(heads|1, rows of all that share vectors, size)`."""
    return states.reshape(vectors.shape[0], -1, states.shape[-1])


class _Tiles:
    """Keys in tiles of a few columns, each beside the window of vectors that its columns meet.

    A key meets one distance a row, so a product of all keys with all distances would be wasted for the most part.

    Args:
        keys: `(heads, batch, columns, head_dim)`.
        vectors: `(heads|1, entries, head_dim)`.
        first: entry of distance number 0.
        rows: number of queries.
    """

    def __init__(self, keys: torch.Tensor, vectors: torch.Tensor, first: int, rows: int) -> None:
        heads, batch, self.columns, size = keys.shape
        self.rows, self.shared = rows, vectors.shape[0]
        self.count = -(-self.columns // TILE)
        missing = self.count * TILE - self.columns
        # (heads of the table, tiles, heads that share them, batch, columns of a tile, head_dim)
        tiled = pad(keys, (0, 0, 0, missing)).view(self.shared, -1, batch, self.count, TILE, size)
        self.keys = tiled.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)
        self.outer = (heads, batch)
        self.entry = torch.arange(first, first + self.count * TILE + rows - 1, device=keys.device).clamp(
            0, vectors.shape[1] - 1
        )
        self.windows = vectors.index_select(1, self.entry).unfold(1, rows + TILE - 1, TILE)

    def view(self, met: torch.Tensor) -> torch.Tensor:
        """Products `(heads|1, tiles, others, distances)` as `(heads|1, sharing, batch, rows, tiles, columns of a tile)`."""
        batch, width = self.outer[1], met.shape[-1]
        per_head = batch * TILE * width
        strides = (met.stride(0), per_head, TILE * width, 1, met.stride(1), width + 1)
        sharing = self.outer[0] // self.shared
        return met.as_strided((self.shared, sharing, batch, self.rows, self.count, TILE), strides, met.storage_offset())

    def untile(self, states: torch.Tensor) -> torch.Tensor:
        """`(heads|1, tiles, others, head_dim)` to `(heads, batch, columns, head_dim)`."""
        parts = states.view(self.shared, self.count, -1, self.outer[1], TILE, states.shape[-1])
        return parts.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(0, 1)[:, :, : self.columns]


def _each_head(left: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """`left @ windows`, a head at a time: windows overlap, and the product of all heads would begin by copying them."""
    result = left.new_empty(*left.shape[:-1], windows.shape[-1])
    for head, window, product in zip(left, windows, result, strict=True):
        torch.bmm(head, window, out=product)
    return result


def with_key_products(scores: torch.Tensor, keys: torch.Tensor, vectors: torch.Tensor, first: int) -> torch.Tensor:
    """Scores, and added to them the product of each key with the vector of its distance.

    Args:
        scores: `(heads|1, batch|1, rows, columns)`, left as they are.
        keys: `(heads, batch, columns, head_dim)`.
        vectors: `(heads|1, entries, head_dim)`.
        first: entry of distance number 0.

    Returns:
        `(heads, batch, rows, columns)`.
    """
    rows, columns = scores.shape[-2:]
    tiles = _Tiles(keys, vectors, first, rows)
    total = scores.new_empty(*keys.shape[:2], rows, tiles.count * TILE)
    total[..., :columns] = scores
    total.view(tiles.shared, -1, *total.shape[1:3], tiles.count, TILE).add_(tiles.view(_each_head(tiles.keys, tiles.windows)))
    return total[..., :columns]


def key_product_gradients(
    slope: torch.Tensor, keys: torch.Tensor, vectors: torch.Tensor, first: int, total: torch.Tensor | None
) -> torch.Tensor:
    """Gradients of `with_key_products`: that of the keys is returned, that of the vectors added to `total`.

    Args:
        slope: `(heads, batch, rows, columns)` the gradient of the result.
        keys, vectors, first: as there.
        total: `(heads|1, entries, head_dim)` or None.
    """
    rows, columns = slope.shape[-2:]
    tiles = _Tiles(keys, vectors, first, rows)
    met = slope.new_zeros(*tiles.keys.shape[:-1], rows + TILE - 1)
    tiled = pad(slope, (0, tiles.count * TILE - columns)).unflatten(-1, (tiles.count, TILE))
    tiles.view(met).copy_(tiled.unflatten(0, (tiles.shared, -1)))
    if total is not None:
        by_window = met.transpose(-1, -2) @ tiles.keys  # (heads|1, tiles, distances of a tile, head_dim)
        for start in range(0, by_window.shape[2], TILE):
            part = pad(by_window[:, :, start : start + TILE], (0, 0, 0, max(0, start + TILE - by_window.shape[2])))
            entries = tiles.entry[start : start + tiles.count * TILE]
            total.index_add_(1, entries, part.flatten(1, 2)[:, : len(entries)].to(total.dtype))
    return tiles.untile(_each_head(met, tiles.windows.transpose(-1, -2)))
