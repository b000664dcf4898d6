"""KeyRanges of keys that belong together: a document, without padding, or all that is no padding.

Queries of one run see its keys and no others, so a block of such queries needs no mask, only fewer keys.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

import torch

from .positions import Positions
from .positions import reads_freely

ROW_PAIRS = 2**16
"""Query-key pairs from which a row of the batch has a pass of its own."""


def labels_of(key_valid: torch.Tensor | None, key_document: torch.Tensor | None) -> torch.Tensor | None:
    """Return the range of each key, `(batch, key)`: its document, or -1 - document for padding; None for one range."""
    if key_document is None or key_valid is None:
        return key_document if key_valid is None else key_valid.long() - 1
    return torch.where(key_valid, key_document, -1 - key_document)


class KeyRanges:
    """The runs of keys that one row sees: where they begin and end.

    Args:
        labels: `(key,)`, as of `labels_of`.
    """

    def __init__(self, labels: torch.Tensor) -> None:
        found, counts = torch.unique_consecutive(labels, return_counts=True)
        self.labels: list[int] = found.tolist()
        self.ends = list(accumulate(counts.tolist()))

    def around(self, first: int, last: int) -> tuple[slice, bool]:
        """Return the keys that a range of queries can see, by padding and documents.

        Returns:
            As few keys as there are all of them in, and whether each of the queries sees all of these.
        """
        begin, end = bisect_right(self.ends, first), bisect_right(self.ends, last - 1)
        met = self.labels[begin : end + 1]
        if any(label < 0 or self.labels.count(label) > 1 for label in met):  # padding sees itself and its document
            return slice(0, self.ends[-1]), False
        return slice(self.ends[begin - 1] if begin else 0, self.ends[end]), begin == end


def key_ranges_of(positions: Positions) -> KeyRanges | None:
    """Return the key ranges that padding and documents leave visible, where the whole batch shares them; else None."""
    labels = labels_of(positions.key_valid, positions.key_document)
    return KeyRanges(labels[0]) if labels is not None and labels.shape[0] == 1 and positions.given_mask is None else None


def keys_seen_by(positions: Positions, rows: slice) -> tuple[slice, Positions]:
    """Return the smallest range of keys that holds all that some queries see, and the positions of these queries and keys."""
    begin, end = int(positions.start) + rows.start, int(positions.start) + rows.stop
    left, right, alike = 0, positions.key.shape[1], False
    if positions.ordered:
        right = min(right, end)
    if positions.window is not None and positions.given_mask is None:
        left, right = max(0, begin + 1 - positions.window), min(right, end - 1 + positions.window)
    runs = positions.once(key_ranges_of)
    if runs is not None:
        run, alike = runs.around(begin, end)
        left, right = max(left, run.start), min(right, run.stop)
    block = positions.block(rows, slice(left, right))
    return slice(left, right), block.without_limits if alike else block


def groups_of_rows(positions: Positions) -> list[tuple[torch.Tensor | None, Positions]]:
    """Group the rows of the batch that see alike, so that they share one bias and need few masks; none where all do.

    Each group is the indices of its rows, None for the whole batch, and its positions. Rows too small to be worth a pass of their
    own make one group with a mask for each: those with padding, a document's end or a short memory. There are no groups on an
    accelerator, where many rows cost as little as one.
    """
    labels = labels_of(positions.key_valid, positions.key_document)
    if labels is None or positions.given_mask is not None or positions.token_types is not None or not reads_freely(labels):
        return []
    whole = (labels == labels[:, :1]).all(1) & (labels[:, 0] >= 0)
    alone = positions.query.shape[1] * labels.shape[1] >= ROW_PAIRS
    group = torch.unique(labels, dim=0, return_inverse=True)[1].masked_fill(whole, -1) if alone else (~whole).long()
    limits = {name: getattr(positions, name) for name in ("key_valid", "query_document", "key_document")}
    found = []
    for number in group.unique().tolist():
        rows = (group == number).nonzero()[:, 0]
        chosen = rows[:1] if alone else rows
        limited = {name: None if part is None else part.expand(len(group), -1)[chosen] for name, part in limits.items()}
        found.append((rows, positions.without_limits if bool(whole[rows[0]]) else replace(positions, **limited)))
    return found if len(found) > 1 else [(None, found[0][1])]
