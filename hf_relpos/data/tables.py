"""Arrow tables on disk: written a batch at a time, mapped into memory, kept under all that they depend on."""

import ctypes
import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.config import HF_DATASETS_CACHE
from filelock import FileLock

# Part of every key: a table that another version of this code wrote is not taken for one of this version.
VERSION = 2
# Rows that are read at a time, and bytes after which mapped pages are given back. Rows of a shuffled table map their neighbours'
# pages, too: several times as much as is read.
READ, RELEASED = 64, 8 << 20
_temporary: list[TemporaryDirectory[str]] = []


def cached_table(
    kind: str, key: Any, schema: pa.Schema, batches: Callable[[dict[str, Any]], Iterable[pa.RecordBatch]]
) -> tuple[Dataset, dict[str, Any]]:
    """Return a table from the cache of `datasets`, or write it there first.

    Processes that ask for the same table at the same time wait for the first of them. A table whose writing was interrupted, or
    that was changed since, is written anew.

    Args:
        kind: what the table holds, in one word; the name of its folder.
        key: everything that its content depends on, as JSON.
        schema: its columns.
        batches: gives its rows, and fills the dict that it is handed with facts about them, as JSON.

    Returns:
        The table, mapped into memory, and the facts.
    """
    with _entry(kind, key) as (table, record):
        facts = _read_facts(record, table)
        if facts is None:
            facts = {}
            with _written(table) as part, pa.OSFile(str(part), "wb") as file, pa.ipc.new_stream(file, schema) as sink:
                for batch in batches(facts):
                    sink.write_batch(batch)
            _write_facts(record, facts, table)
        return Dataset.from_file(str(table)), facts


def cached_facts(kind: str, key: Any, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return facts, as JSON, from the cache, or find them first; arguments as those of `cached_table`."""
    with _entry(kind, key) as (table, record):
        facts = _read_facts(record, table)
        if facts is None:
            _write_facts(record, facts := find(), table)
        return facts


@contextmanager
def _entry(kind: str, key: Any) -> Iterator[tuple[Path, Path]]:
    """Return the files of a key's table and facts, for one process at a time."""
    digest = _digest([VERSION, kind, key])
    folder = _cache_folder() / kind
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{digest}.lock"):
        yield folder / f"{digest}.arrow", folder / f"{digest}.json"


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Return a file to write to that takes the path's place when it is whole."""
    part = path.with_suffix(".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_facts(record: Path, facts: dict[str, Any], table: Path) -> None:
    content = [facts, _stamp(table)]
    with _written(record) as part:
        part.write_text(json.dumps([*content, _digest(content)]), encoding="utf-8")


def _read_facts(record: Path, table: Path) -> dict[str, Any] | None:
    """Return the facts of a table, None if they or the table are not as they were written."""
    try:
        *content, digest = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not written yet, or damaged
        return None
    return content[0] if digest == _digest(content) and content[1] == _stamp(table) else None


def _stamp(table: Path) -> list[int] | None:
    """Return the size and the time of a table, which tell that it was changed without reading all of it; None for no table."""
    return [(found := table.stat()).st_size, found.st_mtime_ns] if table.is_file() else None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def read_rows(table: Dataset) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table in order as Python values, in memory that does not grow with the table."""
    seen = 0
    batches: Any = table.with_format("arrow").iter(READ)
    for batch in batches:
        yield from batch.to_pylist()
        seen += batch.nbytes
        if seen > RELEASED:
            release_pages(table)
            seen = 0
    release_pages(table)


def shuffle_documents(table: Dataset, seed: int) -> Dataset:
    """Shuffle documents; the rows of a long one (`continues`) stay together and in order."""
    if "continues" not in table.column_names:
        return table.shuffle(seed=seed)
    begins = ~np.fromiter((row["continues"] for row in read_rows(table.select_columns("continues"))), bool, len(table))
    document = np.cumsum(begins) - 1
    place = np.random.default_rng(seed).permutation(document[-1] + 1)
    return table.select(np.argsort(place[document], kind="stable"))


def release_pages(table: Dataset) -> None:
    """Give the pages of a mapped table that were read back to the system: else they count as memory of this process.

    They stay in the system's file cache, and are read from there when they are asked for again.
    """
    files = {os.path.realpath(file["filename"]) for file in table.cache_files}
    if not files or not sys.platform.startswith("linux"):
        return
    with open("/proc/self/maps", encoding="utf-8") as maps:
        spans = [line.split(maxsplit=5) for line in maps]
    for span in spans:
        # Only mapped files that nobody writes to: their pages can be read again.
        if len(span) == 6 and span[5].rstrip("\n") in files and "w" not in span[1]:
            start, end = (int(address, 16) for address in span[0].split("-"))
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _cache_folder() -> Path:
    if datasets.is_caching_enabled():
        return Path(HF_DATASETS_CACHE, "hf_relpos")
    if not _temporary:
        _temporary.append(TemporaryDirectory(prefix="hf_relpos_"))
    return Path(_temporary[0].name)
