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


def with_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with neighbours of the last dimension side by side in memory, as views by stride and kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def to_matrix(numbers: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a view in which entry [r, c] is numbers[r, r + c].

    Args:
        numbers: `(..., rows, rows + columns - 1)`, or `(..., 1, rows + columns - 1)` where all rows are one.
        rows, columns: the size of the matrix.

    Returns:
        `(..., rows, columns)`.
    """
    numbers = with_unit_stride(numbers)
    row = numbers.stride(-2) if numbers.shape[-2] > 1 else 0
    strides = (*numbers.stride()[:-2], row + 1, 1)
    return numbers.as_strided((*numbers.shape[:-2], rows, columns), strides, numbers.storage_offset())


def to_diagonals(matrix: torch.Tensor) -> torch.Tensor:
    """Undo `to_matrix`: `(..., rows, columns)` to `(..., rows, rows + columns - 1)`, 0 where a row has no such distance."""
    rows, width = matrix.shape[-2], sum(matrix.shape[-2:])
    # Rows of `width`, read as rows of one less, stand one further to the right each; what comes in from the left is 0.
    return pad(matrix, (0, rows)).flatten(-2)[..., : rows * (width - 1)].unflatten(-1, (rows, width - 1))


def padded_to_diagonals(matrix: torch.Tensor) -> torch.Tensor:
    """Return `collect` of a matrix with zeros behind its rows: a view where there are such zeros."""
    rows, width = matrix.shape[-2], sum(matrix.shape[-2:])
    if matrix.stride(-2) != width or matrix.stride(-1) != 1:
        return to_diagonals(matrix)
    strides = (*matrix.stride()[:-2], width - 1, 1)
    return matrix.as_strided((*matrix.shape[:-2], rows, width - 1), strides, matrix.storage_offset())


def relative_shift(scores: torch.Tensor) -> torch.Tensor:
    """Slide row i of `scores` left by (rows - 1 - i): the relative shift of Transformer-XL (arXiv 1901.02860, appendix B).

    Args:
        scores: `(..., query, distances)`, the distances ascending.

    Returns:
        `(..., query, distances)` whose entry [i, j] is scores[i, j + rows - 1 - i] wherever that column exists. The other
        entries hold finite values of neighbouring rows: they belong to keys that no query may see.
    """
    *outer, rows, columns = scores.shape
    return pad(scores, (1, 0)).reshape(*outer, columns + 1, rows)[..., 1:, :].reshape(*outer, rows, columns)


class Reach(NamedTuple):
    """The entries of a table that a block meets, and how many distances before and after share the first and last of them."""

    entries: slice
    before: int
    after: int


def reach(first: int, distances: int, entries: int) -> Reach:
    """Return the overlap of a block's distances with a table of so many entries."""
    low, high = (min(max(place, 0), entries - 1) for place in (first, first + distances - 1))
    count = high - low + 1
    before = min(max(low - first, 0), distances - count)
    return Reach(slice(low, high + 1), before, distances - count - before)


def add_matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add `left @ right` to `total (..., rows, columns)`, in place; in one pass where nothing has to be widened or set apart."""
    apart = not total.is_contiguous() and torch.get_num_threads() > 1  # then each matrix waits for the one before
    if total.dtype != left.dtype or apart:
        return total.add_(left @ right)
    flat = (states.reshape(-1, *states.shape[-2:]) for states in (left, right))
    total.view(-1, *total.shape[-2:]).baddbmm_(*flat)
    return total


def products(states: torch.Tensor, vectors: torch.Tensor, first: int, added: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute products of states with the vectors of all distances, plus a given addend.

    Args:
        states: `(heads, batch, rows, head_dim)`.
        vectors: `(heads|1, entries, head_dim)`.
        first: entry of distance number 0.
        added: `(heads|1, 1, 1, distances)`.
        out: where they are put, `(heads, batch, rows, distances)`.

    Returns:
        `out`.
    """
    near = reach(first, added.shape[-1], vectors.shape[1])
    flat, met = _by_head(states, vectors), vectors[:, near.entries].transpose(-1, -2)
    last = out.shape[-1] - near.after
    out.copy_(added)
    add_matmul(out.view(*flat.shape[:2], -1)[..., near.before : last], flat, met)
    for part, entry in ((out[..., : near.before], 0), (out[..., last:], -1)):
        if part.shape[-1]:
            part += states @ vectors[:, None, entry, :, None]
    return out


def product_gradients(
    score_grad: torch.Tensor, states: torch.Tensor, vectors: torch.Tensor, first: int, total: torch.Tensor | None
) -> torch.Tensor:
    """Compute the gradients of `products`.

    Args:
        score_grad: the gradient of the result.
        states, vectors, first: as there.
        total: where the gradient of the vectors is added, if at all.

    Returns:
        The gradient of the states.
    """
    folded, entries = fold_to_entries(score_grad, vectors, first)
    flat = _by_head(folded, vectors)
    if total is not None:
        add_matmul(total[:, entries], flat.transpose(-1, -2), _by_head(states, vectors))
    return (flat @ vectors[:, entries]).view_as(states)


def weighted(weights: torch.Tensor, vectors: torch.Tensor, first: int) -> torch.Tensor:
    """Sum vectors to `(heads, batch, rows, head_dim)`, by weights `(heads, batch, rows, distances)`."""
    folded, entries = fold_to_entries(weights, vectors, first)
    return (_by_head(folded, vectors) @ vectors[:, entries]).view(*weights.shape[:-1], -1)


def fold_to_entries(numbers: torch.Tensor, vectors: torch.Tensor, first: int) -> tuple[torch.Tensor, slice]:
    """Sum numbers per distance to numbers per entry of a table, and return which entries these are."""
    near = reach(first, numbers.shape[-1], vectors.shape[1])
    last = numbers.shape[-1] - near.after
    kept = numbers[..., near.before : last]
    if near.before or near.after:
        kept = kept.clone()
    if near.before:
        kept[..., 0] += numbers[..., : near.before].sum(-1)
    if near.after:
        kept[..., -1] += numbers[..., last:].sum(-1)
    return kept, near.entries


def _by_head(states: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """View `(heads, batch, rows, size)` as `(heads|1, rows of all that share vectors, size)`."""
    return states.reshape(vectors.shape[0], -1, states.shape[-1])
