"""Local files as a stream: each is a shard, read when training asks for it, with its beginning set apart for validation."""

import logging
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets import Features
from datasets import IterableDataset
from datasets import Value
from tqdm.auto import tqdm

from hf_relpos.data.readers import read_file
from hf_relpos.data.text_size import count_characters

FEATURES = Features({"text": Value("string"), "continues": Value("bool")})
# Characters that are set apart at most.
HELD_OUT = 16 << 20
# Files that one message names.
NAMED = 5

logger = logging.getLogger(__name__)
# A file is read again and again.
warn_once = cache(logger.warning)


def stream_files(
    paths: Sequence[Path], column: str, percentage: float | None = None
) -> tuple[IterableDataset, Dataset | None]:
    """Stream the documents of local files; a file that cannot be read is named when it is reached.

    Args:
        paths: the files.
        column: the column of tables that holds the documents.
        percentage: the share of each file's text, from its beginning, that is set apart, but not more than 16 Mi characters in
            all; None sets nothing apart. How much text a long file holds is told from a sample of it.

    Returns:
        Rows `text` and `continues`, as `Documents` has them, and those that were set apart.

    Raises:
        ValueError: a file cannot be read, as far as that is needed here, or there is no text in what is set apart.
    """
    if percentage is not None and not 0 < percentage < 100:
        raise ValueError(f"validation_split_percentage={percentage} is not between 0 and 100")
    if percentage is None:
        return _stream([(str(path), 0) for path in paths], column), None
    sizes = [count_characters(path, column) for path in tqdm(paths, desc="Sampling", unit=" files", disable=None)]
    share = min(percentage / 100, HELD_OUT / max(1, sum(sizes)))
    files = [(str(path), max(1, round(size * share))) for path, size in zip(paths, sizes, strict=True)]
    held = list(_read(files, column, held=True))
    if not held:
        raise ValueError(
            f"{', '.join(map(str, paths[:NAMED]))}: no text found to set apart for validation, give validation_file"
        )
    return _stream(files, column), Dataset.from_list(held, FEATURES)


def _stream(files: list[tuple[str, int]], column: str) -> IterableDataset:
    return IterableDataset.from_generator(_read, FEATURES, {"files": files, "column": column})


def _read(files: list[tuple[str, int]], column: str, held: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of files behind the characters that are set apart, or those that are (`held`)."""
    for name, left in files:
        begun, left_out = False, Counter()
        for text, continues in read_file(Path(name), column):
            if not text:
                left_out["missing values" if text is None else "empty documents"] += 1
            head = (text or "")[: len(text or "") if len(text or "") <= 2 * left else left]
            tail = (text or "")[len(head) :]
            left -= min(left, len(head))
            if held and head:
                yield {"text": head, "continues": continues}
            elif not held and tail:
                yield {"text": tail, "continues": continues and begun}
                begun = True
            if held and not left:
                break
        if left_out and not held:
            warn_once("left out of %s: %s", name, ", ".join(f"{count} {reason}" for reason, count in left_out.items()))
