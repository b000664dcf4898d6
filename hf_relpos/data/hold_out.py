"""Text for validation, set apart from the training text by its share of the bytes."""

from array import array
from typing import Any

import numpy as np
from datasets import Dataset
from datasets import concatenate_datasets

from hf_relpos.data.tables import read_rows


def hold_out(documents: Dataset, percentage: float) -> tuple[Dataset, Dataset]:
    """Set a share of the bytes apart: documents drawn at random, always the same ones, in the order of the text.

    Where whole documents miss the share by more than a tenth of it, as one long document does, the end of a document is set
    apart with them.

    Args:
        documents: as `Documents` has them.
        percentage: the share, in percent.

    Returns:
        The documents to train on, and those set apart.

    Raises:
        ValueError: the share is not between 0 and 100, or one of the parts would be empty.
    """
    if not 0 < percentage < 100:
        raise ValueError(f"validation_split_percentage={percentage} is not between 0 and 100")
    sizes, starts = _measure(documents)
    ends = np.append(starts[1:], len(sizes))
    before = np.append(0, np.cumsum(sizes))
    total = int(before[-1])
    wanted = total - int(total * (100 - percentage) / 100)
    order = np.random.default_rng(0).permutation(len(starts))
    reached = np.append(0, np.cumsum((before[ends] - before[starts])[order]))

    nearest = int(np.abs(reached[:-1] - wanted).argmin())
    held = np.zeros(len(sizes), dtype=bool)
    split: dict[str, Any] = {}
    if abs(reached[nearest] - wanted) > wanted / 10:
        nearest = int(np.searchsorted(reached[:-1], wanted, "right")) - 1
        document = order[nearest]
        cut = int(before[ends[document]] - (wanted - reached[nearest]))
        row = int(np.searchsorted(before, cut, "right")) - 1
        split = _split_row(documents, row, cut - int(before[row]))
        held[row + 1 : ends[document]] = True
    for document in order[:nearest]:
        held[starts[document] : ends[document]] = True
    parts = _take(documents, ~held, split, "head"), _take(documents, held, split, "tail")
    if not all(map(len, parts)):
        raise ValueError(f"a text of {total} bytes is too short to split {percentage} % off for validation")
    return parts


def _measure(documents: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of each row, and the rows in which documents begin."""
    sizes, starts = array("q"), array("q")
    for number, row in enumerate(read_rows(documents)):
        sizes.append(len(row["text"].encode()))
        if not row.get("continues"):
            starts.append(number)
    return np.array(sizes), np.array(starts)


def _split_row(documents: Dataset, number: int, size: int) -> dict[str, Any]:
    """Split a row behind its first bytes, but not inside a character; a part without text is None."""
    row: Any = documents[number]
    head = row["text"].encode()[:size].decode(errors="ignore")
    tail = row["text"][len(head) :]
    return {
        "row": number,
        "head": row | {"text": head} if head else None,
        "tail": {name: tail if name == "text" else False for name in row} if tail else None,  # it begins a document
    }


def _take(documents: Dataset, wanted: np.ndarray, split: dict[str, Any], side: str) -> Dataset:
    """Select rows, with one side of the split row in its place."""
    if not split:
        return documents.select(np.flatnonzero(wanted))
    rows = np.flatnonzero(wanted)
    rows = rows[rows != split["row"]]
    at = np.searchsorted(rows, split["row"])
    parts = [documents.select(rows[:at]), documents.select(rows[at:])]
    if split[side]:
        parts.insert(1, Dataset.from_list([split[side]], features=documents.features))
    return concatenate_datasets([part for part in parts if len(part)] or parts[:1])
