"""Matrices as views of numbers per distance, against plain loops over rows, columns and distances."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from hf_relpos.model import blockwise_key_terms
from hf_relpos.model import toeplitz
from hf_relpos.model.blockwise_buffers import BufferPool

EXACT = {"rtol": 1e-12, "atol": 1e-12}
HEADS, BATCH, SIZE = 2, 3, 4
steady = settings(max_examples=60, deadline=None, derandomize=True)
counts = st.integers(1, 9)
places = st.integers(-12, 12)
"""Of distance number 0 in a table: before it, within and beyond."""
sharing = st.sampled_from([1, HEADS])
"""Heads of a table: one for all, or one each."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def entry_of(distance: int, first: int, entries: int) -> int:
    """The entry of a distance; those before and after the table share its first and last."""
    return min(max(first + distance, 0), entries - 1)


def loop(shape: tuple[int, ...], entry: Callable[..., Any]) -> torch.Tensor:
    """A tensor whose entry at each place is what a function of the indices gives; gradients pass through."""
    places = torch.cartesian_prod(*map(torch.arange, shape)).view(-1, len(shape)).tolist()
    return torch.stack([torch.as_tensor(entry(*place), dtype=torch.float64) for place in places]).view(shape)


def looped_products(states: torch.Tensor, vectors: torch.Tensor, first: int, distances: int) -> torch.Tensor:
    """State of each row with the vector of each distance."""
    table = vectors.expand(HEADS, -1, -1)
    return loop(
        (*states.shape[:3], distances), lambda h, b, r, d: states[h, b, r] @ table[h, entry_of(d, first, vectors.shape[1])]
    )


def looped_key_products(keys: torch.Tensor, vectors: torch.Tensor, first: int, rows: int) -> torch.Tensor:
    """Key of each column with the vector of its distance to each row."""
    table = vectors.expand(HEADS, -1, -1)
    return loop(
        (*keys.shape[:2], rows, keys.shape[2]),
        lambda h, b, r, c: keys[h, b, c] @ table[h, entry_of(r + c, first, vectors.shape[1])],
    )


@steady
@given(rows=counts, columns=counts, one=st.booleans())
def test_spread_out(rows: int, columns: int, one: bool) -> None:
    """Of numbers that begin anywhere in a larger tensor, for each row or for all."""
    whole = numbers(HEADS, 1 if one else rows, rows + columns + 4)
    part = whole[..., 2 : rows + columns + 1]
    found = toeplitz.to_matrix(part, rows, columns)
    assert found.data_ptr() == part.data_ptr(), "a copy"
    wanted = loop((HEADS, rows, columns), lambda h, r, c: part[h, 0 if one else r, r + c])
    assert torch.equal(found, wanted)


@steady
@given(rows=counts, columns=counts, heads=st.integers(1, HEADS), threads=st.integers(1, 2))
def test_collect(rows: int, columns: int, heads: int, threads: int) -> None:
    matrix = numbers(heads, rows, columns)
    wanted = loop((heads, rows, rows + columns - 1), lambda h, r, d: matrix[h, r, d - r] if 0 <= d - r < columns else 0.0)
    assert torch.equal(toeplitz.to_diagonals(matrix), wanted)
    buffers = BufferPool(matrix)
    buffers.empty("matrix", 500).fill_(7.0)  # what was there before must not be seen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        found = buffers.matrix("matrix", heads, rows, columns).copy_(matrix)
    assert torch.equal(toeplitz.padded_to_diagonals(found), wanted)
    view = toeplitz.padded_to_diagonals(found).data_ptr() == found.data_ptr()
    assert view == (heads == 1 or threads == 1), "a view where it is free"


@steady
@given(first=places, distances=counts, entries=counts)
def test_reach(first: int, distances: int, entries: int) -> None:
    """Together, what shares the first entry, what has its own, and what shares the last are all distances, in order."""
    met, before, after = toeplitz.reach(first, distances, entries)
    own = list(range(entries))[met]
    assert own and before >= 0 and after >= 0
    found = [own[0]] * before + own + [own[-1]] * after
    assert found == [entry_of(distance, first, entries) for distance in range(distances)]


@steady
@given(rows=counts, distances=counts, entries=counts, first=places, shared=sharing)
def test_products(rows: int, distances: int, entries: int, first: int, shared: int) -> None:
    states = numbers(HEADS, BATCH, rows, SIZE).requires_grad_()
    vectors = numbers(shared, entries, SIZE, seed=1).requires_grad_()
    wanted = looped_products(states, vectors, first, distances)
    for heads in {1, shared}:
        added = numbers(heads, 1, 1, distances, seed=3)
        found = toeplitz.products(states, vectors, first, added, torch.empty_like(wanted))
        torch.testing.assert_close(found, wanted + added, **EXACT)

    score_grad = numbers(*wanted.shape, seed=2)
    of_states, of_vectors = torch.autograd.grad(wanted, [states, vectors], score_grad)
    with torch.no_grad():
        total = torch.ones_like(vectors)
        found = toeplitz.product_gradients(score_grad, states, vectors, first, total)
        torch.testing.assert_close(found, of_states, **EXACT)
        torch.testing.assert_close(total, 1 + of_vectors, **EXACT)
        torch.testing.assert_close(toeplitz.product_gradients(score_grad, states, vectors, first, None), of_states, **EXACT)


@steady
@given(rows=counts, distances=counts, entries=counts, first=places, shared=sharing)
def test_weighted(rows: int, distances: int, entries: int, first: int, shared: int) -> None:
    weights, vectors = numbers(HEADS, BATCH, rows, distances), numbers(shared, entries, SIZE, seed=1)
    entry = [entry_of(distance, first, entries) for distance in range(distances)]
    wanted = weights @ vectors.expand(HEADS, -1, -1)[:, None, entry]
    torch.testing.assert_close(toeplitz.weighted(weights, vectors, first), wanted, **EXACT)


@settings(steady, max_examples=40)
@given(rows=counts, columns=counts, entries=counts, first=places, shared=sharing, tile=st.integers(1, 5))
def test_key_products(rows: int, columns: int, entries: int, first: int, shared: int, tile: int) -> None:
    """Whatever the size of a tile: a part of the keys, all of them, or more."""
    keys = numbers(HEADS, BATCH, columns, SIZE).requires_grad_()
    vectors = numbers(shared, entries, SIZE, seed=1).requires_grad_()
    wanted = looped_key_products(keys, vectors, first, rows)
    scores = numbers(1, BATCH, rows, columns, seed=3)
    score_grad = numbers(*wanted.shape, seed=2)
    of_keys, of_vectors = torch.autograd.grad(wanted, [keys, vectors], score_grad)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(blockwise_key_terms, "TILE", tile)
        found = scores.expand_as(wanted).clone()
        blockwise_key_terms.add_key_products(found, keys, vectors, first, BufferPool(keys))
        torch.testing.assert_close(found, scores + wanted, **EXACT)
        total = torch.ones_like(vectors)
        found = blockwise_key_terms.key_product_gradients(score_grad, keys, vectors, first, total, BufferPool(keys))
        torch.testing.assert_close(found, of_keys, **EXACT)
        torch.testing.assert_close(total, 1 + of_vectors, **EXACT)
        found = blockwise_key_terms.key_product_gradients(score_grad, keys, vectors, first, None, BufferPool(keys))
        torch.testing.assert_close(found, of_keys, **EXACT)


@pytest.mark.parametrize("shared", [1, HEADS])
@pytest.mark.parametrize("rows, columns, first", [(128, 256, -100), (5, 33, 3), (40, 70, 500)])
def test_key_products_at_full_size(rows: int, columns: int, first: int, shared: int) -> None:
    """Tiles as they are, many and partly filled, against one gather."""
    keys = numbers(HEADS, BATCH, columns, SIZE).requires_grad_()
    vectors = numbers(shared, 150, SIZE, seed=1).requires_grad_()
    entry = (first + torch.arange(rows)[:, None] + torch.arange(columns)).clamp(0, 149)
    wanted = torch.einsum("hbcd,hrcd->hbrc", keys, vectors.expand(HEADS, -1, -1)[:, entry])
    scores = numbers(1, BATCH, rows, columns, seed=3)
    score_grad = numbers(*wanted.shape, seed=2)
    gradients = torch.autograd.grad(wanted, [keys, vectors], score_grad)
    with torch.no_grad():
        found = scores.expand_as(wanted).clone()
        blockwise_key_terms.add_key_products(found, keys, vectors, first, BufferPool(keys))
        torch.testing.assert_close(found, scores + wanted, **EXACT)
        total = torch.zeros_like(vectors)
        found = blockwise_key_terms.key_product_gradients(score_grad, keys, vectors, first, total, BufferPool(keys))
    torch.testing.assert_close([found, total], list(gradients), rtol=1e-10, atol=1e-10)


def test_sums_are_kept_in_the_precision_of_the_total() -> None:
    """Half-precision states add to a float32 total without becoming one in half precision first."""
    keys, vectors = numbers(HEADS, BATCH, 9, SIZE), numbers(HEADS, 5, SIZE, seed=1)
    score_grad, total = numbers(HEADS, BATCH, 6, 9, seed=2), torch.full((HEADS, 5, SIZE), 4096.0)
    half = keys.bfloat16()
    blockwise_key_terms.key_product_gradients(score_grad.bfloat16(), half, vectors.bfloat16(), -2, total, BufferPool(half))
    exact = torch.full_like(vectors, 4096.0)
    blockwise_key_terms.key_product_gradients(score_grad, keys, vectors, -2, exact, BufferPool(keys))
    assert (total - exact).abs().max() < 1, "steps of bfloat16 at 4096 are 32"
    torch.testing.assert_close(total.double() - 4096, exact - 4096, rtol=0.1, atol=0.2)
    assert toeplitz.to_diagonals(torch.ones(1, 1)).tolist() == [[1.0]]
