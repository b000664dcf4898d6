"""Padding and documents leave fewer keys to a block of queries, and rarely a mask."""

from typing import Any

import pytest
import torch
from plain_attention import positions_of

from hf_relpos.model import blockwise_masking
from hf_relpos.model.blockwise_masking import groups_of_rows
from hf_relpos.model.blockwise_masking import keys_seen_by


def seen(positions: Any, first: int, last: int) -> tuple[int, int, bool]:
    """The first and the last but one key of some queries, and whether they need a mask."""
    columns, block = keys_seen_by(positions, slice(first, last))
    assert block.key.shape[1] == columns.stop - columns.start
    return columns.start, columns.stop, block.hides_more


def mask(*lengths: int, of: int) -> torch.Tensor:
    """Rows with so many tokens each, then padding."""
    return (torch.arange(of) < torch.tensor(lengths)[:, None]).long()


def test_padding() -> None:
    """Tokens see tokens, without a mask; padding sees itself too, by a mask."""
    after = positions_of(1, 9, causal=False, attention_mask=mask(6, of=9))
    assert [seen(after, *rows) for rows in ((0, 3), (3, 6), (5, 7), (6, 9))] == [
        (0, 6, False),
        (0, 6, False),
        (0, 9, True),
        (0, 9, True),
    ]
    before = positions_of(1, 9, causal=True, attention_mask=mask(6, of=9).flip(1))
    assert [seen(before, *rows) for rows in ((3, 6), (6, 9), (0, 4))] == [(3, 6, False), (3, 9, False), (0, 4, True)]


@pytest.mark.parametrize("causal", [True, False])
def test_documents(causal: bool) -> None:
    """Queries of one document see it alone; those of several need a mask over just these."""
    reset = torch.zeros(1, 12).index_fill(1, torch.tensor([0, 4, 9]), 1)
    positions = positions_of(1, 12, causal=causal, reset_mask=reset)
    assert seen(positions, 4, 7) == (4, 7 if causal else 9, False)
    assert seen(positions, 2, 6) == (0, 6 if causal else 9, True)
    assert seen(positions, 9, 12) == (9, 12, False)


def test_window_and_memory() -> None:
    """Slots that are not in use yet are left out, and so is what a window hides on either side."""
    positions = positions_of(1, 6, 5, causal=True, memory_length=torch.tensor([2]))
    assert seen(positions, 0, 3) == (3, 8, False)
    positions = positions_of(1, 20, causal=False, window=4)
    assert seen(positions, 8, 10) == (5, 13, False)


def test_rows_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that look alike go together; small ones that are cut short share one group, with a mask for each."""
    positions = positions_of(5, 9, causal=False, attention_mask=mask(9, 4, 6, 4, 9, of=9))

    def rows() -> list[list[int]]:
        return [group.tolist() for group, _ in groups_of_rows(positions) if group is not None]

    assert rows() == [[0, 4], [1, 2, 3]]
    monkeypatch.setattr(blockwise_masking, "ROW_PAIRS", 81)
    assert sorted(rows()) == [[0, 4], [1, 3], [2]]
    assert all(group.key_valid is None or group.key_valid.shape == (1, 9) for _, group in groups_of_rows(positions))
    assert groups_of_rows(positions_of(5, 9, causal=False)) == []
