"""How much text a file holds, told from a sample of it: the bytes on the disk say little of tables and of compressed files."""

from io import BufferedReader
from pathlib import Path
from typing import Any

from hf_relpos.data.readers import file_kind
from hf_relpos.data.readers import parquet_rows
from hf_relpos.data.readers import read_file

# Characters that are read of a file before the rest of it is estimated.
SAMPLE = 1 << 20


def count_characters(path: Path, column: str) -> int:
    """Count the characters of a file's documents: exactly if it is short, else as its first million suggests.

    Args:
        path: the file.
        column: the column of tables that holds the documents.

    Raises:
        BadFile: the file is no text, not whole, or a table without that column, as far as it is read.
    """
    if file_kind(path) == "parquet":
        return _by_rows(path, column)
    watched, size = _WatchedPath(path), path.stat().st_size
    found, first, last = 0, None, None
    for text, _ in read_file(watched, column):
        place = watched.file.tell()
        first = place if first is None else first
        # Readers read ahead. What they gave between two reads of the disk is what the bytes between these hold.
        if found >= SAMPLE and first < place < size and place != last:
            return found * size // (place - first)
        found, last = found + len(text or ""), place
    return found


def _by_rows(path: Path, column: str) -> int:
    documents = found = 0
    for text, continues in read_file(path, column):
        if found >= SAMPLE and not continues:
            return found * parquet_rows(path) // documents
        documents += not continues
        found += len(text or "")
    return found


class _WatchedPath(type(Path())):
    """A path that keeps the file opened last, whose place in the bytes on the disk can be asked for while it is read."""

    file: BufferedReader

    def open(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.file = super().open(*args, **kwargs)
        return self.file
