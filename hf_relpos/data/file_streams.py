"""Local files as a stream: each is a shard, read when training asks for it, with its beginning set apart for validation."""

from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets import Features
from datasets import IterableDataset
from datasets import Value

from hf_relpos.data.files import find_files
from hf_relpos.data.readers import read_file

FEATURES = Features({"text": Value("string"), "continues": Value("bool")})
# Bytes of files whose share is set apart in memory at most.
HELD_OUT = 16 << 20


def stream_files(names: Sequence[str], column: str, percentage: float | None = None) -> tuple[IterableDataset, Dataset | None]:
    """Stream the documents of local files; a file that cannot be read is named when it is reached.

    Args:
        names: files, folders and glob patterns, as `load_files` takes them.
        column: the column of tables that holds the documents.
        percentage: the share of each file's bytes, from its beginning, that is set apart, but not more than 16 MiB in all; None
            sets nothing apart.

    Returns:
        Rows `text` and `continues`, as `Documents` has them, and those that were set apart.

    Raises:
        ValueError: there is no such file, or no text in what is set apart.
    """
    if percentage is not None and not 0 < percentage < 100:
        raise ValueError(f"validation_split_percentage={percentage} is not between 0 and 100")
    paths = find_files(names)[0]
    sizes = [path.stat().st_size for path in paths]
    share = min((percentage or 0) / 100, HELD_OUT / max(1, sum(sizes)))
    files = [(str(path), max(1, int(size * share)) if percentage else 0) for path, size in zip(paths, sizes, strict=True)]
    stream = IterableDataset.from_generator(_read, FEATURES, {"files": files, "column": column})
    if percentage is None:
        return stream, None
    held = list(_read(files, column, held=True))
    if not held:
        raise ValueError(f"{', '.join(names)}: no text found to set apart for validation, give validation_file")
    return stream, Dataset.from_list(held, FEATURES)


def _read(files: list[tuple[str, int]], column: str, held: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of files behind the characters that are set apart, or those that are (`held`)."""
    for name, left in files:
        begun = False
        for text, continues in read_file(Path(name), column):
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
