"""Products of keys with the vectors of their distances, for blocks whose rows run backwards (`toeplitz.py`).

A key meets one distance a row, so a product of all keys with all distances would be wasted for the most part. Keys are taken in
tiles of a few columns, each beside the window of vectors that its columns meet; keys so far away that all rows share one vector
need no window.
"""

from collections.abc import Iterator

import torch

from .blockwise_buffers import BufferPool

TILE = 32
"""Columns a tile: fewer waste less, more are faster."""


def _near(columns: int, vectors: torch.Tensor, first: int, rows: int) -> slice:
    """Return the columns before which all rows share the first vector, and after which the last."""
    left = min(max(2 - first - rows, 0), columns)
    return slice(left, max(left, min(vectors.shape[1] - 1 - first, columns)))


def _far(columns: int, near: slice) -> list[tuple[slice, int]]:
    """Return the other columns, and the entry of the vector that all rows share."""
    sides = ((slice(0, near.start), 0), (slice(near.stop, columns), -1))
    return [(side, entry) for side, entry in sides if side.start < side.stop]


class _Tiles:
    """Some tiles of one size, side by side.

    Args:
        keys: `(heads, batch, columns, head_dim)`.
        vectors: `(heads|1, entries, head_dim)`.
        first: entry of distance number 0 of these columns.
        rows: number of queries.
        size: columns a tile.
    """

    def __init__(self, keys: torch.Tensor, vectors: torch.Tensor, first: int, rows: int, size: int) -> None:
        heads, batch, columns, head_dim = keys.shape
        self.rows, self.size, self.count = rows, size, columns // size
        self.outer, self.shared = (heads, batch), vectors.shape[0]
        # (heads of the table, tiles, heads that share them, batch, columns of a tile, head_dim)
        tiled = keys.unflatten(2, (self.count, size)).unflatten(0, (self.shared, -1))
        self.keys = tiled.permute(0, 3, 1, 2, 4, 5).reshape(self.shared, self.count, -1, head_dim)
        self.entry = torch.arange(first, first + columns + rows - 1, device=keys.device).clamp(0, vectors.shape[1] - 1)
        self.windows = vectors.index_select(1, self.entry).unfold(1, rows + size - 1, size)

    def empty(self, buffers: BufferPool) -> torch.Tensor:
        """Return room for products `(heads|1, tiles, others, distances of a tile)`."""
        return buffers.empty("tiles", *self.keys.shape[:-1], self.rows + self.size - 1, dtype=self.keys.dtype)

    def view(self, met: torch.Tensor) -> torch.Tensor:
        """View products as `(heads|1, sharing, batch, rows, tiles, columns of a tile)`."""
        batch, width = self.outer[1], met.shape[-1]
        strides = (met.stride(0), batch * self.size * width, self.size * width, 1, met.stride(1), width + 1)
        shape = (self.shared, self.outer[0] // self.shared, batch, self.rows, self.count, self.size)
        return met.as_strided(shape, strides, met.storage_offset())

    def tiled(self, matrix: torch.Tensor) -> torch.Tensor:
        """View a matrix `(heads, batch, rows, columns)` in the same shape."""
        return matrix.unflatten(-1, (self.count, self.size)).unflatten(0, (self.shared, -1))

    def untiled(self, states: torch.Tensor) -> torch.Tensor:
        """Turn `(heads|1, tiles, others, head_dim)` into `(heads, batch, columns, head_dim)`."""
        parts = states.unflatten(2, (-1, self.outer[1], self.size))
        return parts.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(0, 1)


def _tiles(near: slice, keys: torch.Tensor, vectors: torch.Tensor, first: int, rows: int) -> Iterator[tuple[slice, _Tiles]]:
    """Return the columns that are not far in tiles: whole ones, and one of what is left."""
    whole = near.start + (near.stop - near.start) // TILE * TILE
    for start, stop, size in ((near.start, whole, TILE), (whole, near.stop, near.stop - whole)):
        if start < stop:
            yield slice(start, stop), _Tiles(keys[:, :, start:stop], vectors, first + start, rows, size)


def _by_head(left: torch.Tensor, windows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Multiply `left @ windows` a head at a time: windows overlap, and the product of all heads would begin by copying them."""
    for head, window, product in zip(left, windows, out, strict=True):
        torch.bmm(head, window, out=product)
    return out


def add_key_products(scores: torch.Tensor, keys: torch.Tensor, vectors: torch.Tensor, first: int, buffers: BufferPool) -> None:
    """Add to scores, in place, the product of each key with the vector of its distance.

    Args:
        scores: `(heads, batch, rows, columns)`.
        keys: `(heads, batch, columns, head_dim)`.
        vectors: `(heads|1, entries, head_dim)`.
        first: entry of distance number 0.
        buffers: for the products.
    """
    rows, columns = scores.shape[-2:]
    near = _near(columns, vectors, first, rows)
    for side, entry in _far(columns, near):
        scores[..., side] += vectors[:, None, entry, None] @ keys[:, :, side].transpose(-1, -2)
    for columns, tiles in _tiles(near, keys, vectors, first, rows):
        tiles.tiled(scores[..., columns]).add_(tiles.view(_by_head(tiles.keys, tiles.windows, tiles.empty(buffers))))


def key_product_gradients(
    score_grad: torch.Tensor,
    keys: torch.Tensor,
    vectors: torch.Tensor,
    first: int,
    total: torch.Tensor | None,
    buffers: BufferPool,
) -> torch.Tensor:
    """Return the gradient of the keys in `add_key_products`; add that of the vectors to `total`.

    Args:
        score_grad: `(heads, batch, rows, columns)` the gradient of the scores.
        keys, vectors, first, buffers: as there.
        total: `(heads|1, entries, head_dim)` or None.
    """
    rows, columns = score_grad.shape[-2:]
    near, result = _near(columns, vectors, first, rows), torch.empty_like(keys)
    for side, entry in _far(columns, near):
        along = score_grad[..., side].sum(-2)[..., None]
        result[:, :, side] = along * vectors[:, None, entry, None]
        if total is not None:
            found = (along * keys[:, :, side]).sum((1, 2), dtype=total.dtype)
            total[:, entry] += found.sum_to_size(total.shape[0], found.shape[1])
    for columns, tiles in _tiles(near, keys, vectors, first, rows):
        met = tiles.empty(buffers).zero_()
        tiles.view(met).copy_(tiles.tiled(score_grad[..., columns]))
        if total is not None:
            _add_windows(total, tiles, met, buffers)
        inward = buffers.empty("of keys", *tiles.keys.shape, dtype=keys.dtype)
        result[:, :, columns] = tiles.untiled(_by_head(met, tiles.windows.transpose(-1, -2), inward))
    return result


def _add_windows(total: torch.Tensor, tiles: _Tiles, met: torch.Tensor, buffers: BufferPool) -> None:
    """Add the gradients of the windows of vectors, which overlap, to that of the table."""
    shape = (*met.shape[:2], met.shape[-1], tiles.keys.shape[-1])
    by_window = buffers.empty("windows", *shape, dtype=met.dtype)  # (heads|1, tiles, distances of a tile, head_dim)
    torch.bmm(met.flatten(0, 1).transpose(-1, -2), tiles.keys.flatten(0, 1), out=by_window.flatten(0, 1))
    span = tiles.count * tiles.size
    sums = buffers.empty("span", total.shape[0], span + tiles.rows - 1, total.shape[-1], dtype=total.dtype).zero_()
    for start in range(0, by_window.shape[2], tiles.size):
        part = by_window[:, :, start : start + tiles.size]
        apart = sums[:, start : start + span - tiles.size + part.shape[2]].unfold(1, part.shape[2], tiles.size)
        apart.transpose(-1, -2).add_(part)
    total.index_add_(1, tiles.entry, sums)
