"""Readers: the documents of one file, whatever its format and compression, a bounded part of it at a time.

What a file holds is told by its name (`.jsonl`, `.csv`, ...; any other is text), how it is compressed and which Unicode
encoding it has by its first bytes. A cell of a table is the text that stands there: nothing is taken for a missing value or
for a number.
"""

import csv
import json
import lzma
import sys
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from typing import NamedTuple
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from hf_relpos.data.opening import BadFile
from hf_relpos.data.opening import open_bytes
from hf_relpos.data.opening import open_text
from hf_relpos.data.opening import seekable

# Characters of a longer document that are handled at a time.
PIECE = 1 << 20
TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
COMPRESSED_NAMES = {".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4"}


class Piece(NamedTuple):
    """A document, or a part of a long one; None stands for a missing value."""

    text: str | None
    continues: bool = False


def read_file(path: Path, column: str, whole_numbers: bool = False) -> Iterator[Piece]:
    """Read the documents of a file.

    Args:
        path: the file.
        column: the column of a table that holds the documents.
        whole_numbers: take these for text, too, where a table has types (JSON, Parquet), as it is right for labels.

    Raises:
        BadFile: it is no text, not whole, or a table without that column.
    """
    kind = file_kind(path)
    try:
        if kind == "parquet":
            documents = _read_parquet(path, column, whole_numbers)
        elif kind == "text":
            documents = _read_text(path)
        else:
            documents = (piece for text in TABLES[kind](path, column, whole_numbers) for piece in _pieces(text))
        yield from documents
    except BadFile:
        raise
    except UnicodeDecodeError as error:
        raise BadFile(_not_unicode(path, error)) from error
    except UnicodeEncodeError as error:
        raise BadFile(f"{path} holds half of a surrogate pair, {error.object[error.start]!r}, which is no text") from error
    except (OSError, EOFError, ValueError, csv.Error, lzma.LZMAError, pa.ArrowException) as error:
        raise BadFile(f"{path} cannot be read as {kind}: {error}") from error


def file_kind(path: Path) -> str:
    """Return the format that a file's name tells: text, json, csv, tsv or parquet."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSED_NAMES:
        suffixes.pop()
    return SUFFIXES.get(suffixes[-1], "text") if suffixes else "text"


def _not_unicode(path: Path, error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return (
        f"{path} is not in UTF-8 (byte 0x{byte:02x}): if it is text in another encoding, convert it, for example with "
        "'iconv -f latin1 -t utf-8'; if not, leave it out"
    )


def _read_text(path: Path) -> Iterator[Piece]:
    """Read a text file as one document, in pieces if it is long; a carriage return ends a line as a line feed does."""
    with open_text(path) as file:
        rest, continues = "", False
        while part := file.read(PIECE):
            if "\0" in part:
                raise BadFile(f"{path} is a binary file: it has NUL bytes")
            *pieces, rest = _cut(rest + part)
            for piece in pieces:
                yield Piece(piece, continues)
                continues = True
        yield Piece(rest, continues)


def _pieces(text: str | None) -> Iterator[Piece]:
    if text is None:
        yield Piece(None)
        return
    for number, piece in enumerate(_cut(text)):
        yield Piece(piece, number > 0)


def _cut(text: str) -> list[str]:
    """Cut a text into pieces of at most `PIECE` characters, where tokens surely end if there is such a place."""
    pieces, start = [], 0
    while len(text) - start > PIECE:
        end = _last_line_break(text, start, start + PIECE)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _last_line_break(text: str, start: int, limit: int) -> int:
    """Return the end of the last line before the limit, or the limit if there is none.

    A single line break between two lines with text is looked for: there a byte-level BPE ends a token in the whole text, too.
    """
    end = limit
    while (end := text.rfind("\n", start + 1, end)) > 0:
        if not text[end - 1].isspace() and not text[end + 1].isspace():
            return end + 1
    return limit


def _read_json(path: Path, column: str, whole_numbers: bool) -> Iterator[str | None]:
    """Read one JSON object a line, or one JSON value: a list of objects, alone or as the only list in an object."""
    columns, found = [], False
    for where, row in _rows_of_json(path, column):
        if not isinstance(row, dict):
            raise BadFile(f"{path} cannot be read as json: {where}holds {str(row)[:40]!r} where an object should be")
        cell, columns = row.get(column), columns or list(row)
        found = found or column in row
        cell = str(cell) if whole_numbers and type(cell) is int else cell  # a bool is no number
        if isinstance(cell, str):
            cell.encode()  # a JSON string may hold half of a surrogate pair, which is no text
        elif cell is not None:
            _refuse_type(path, column, str(pa.scalar(cell).type))
        yield cell
    if columns and not found:
        _refuse_column(path, column, columns)


def _rows_of_json(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a JSON file and where they stand."""
    number = 0
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if number == 1 and path.suffix.lower() == ".json" and _is_whole(row, column):
                        break
                    yield f"line {number} ", row
            else:
                return
    except json.JSONDecodeError as error:
        if number > 1 or file_kind(path) != "json" or ".json" not in map(str.lower, path.suffixes):
            raise BadFile(f"{path} cannot be read as json: line {number}: {error}") from error
    yield from (("", row) for row in _list_of_json(path, column))


def _is_whole(value: Any, column: str) -> bool:
    """Return whether the value on the first line is a whole file of rows, not one row."""
    return isinstance(value, list) or (isinstance(value, dict) and column not in value and len(_lists_in(value)) == 1)


def _list_of_json(path: Path, column: str) -> list[Any]:
    with open_text(path) as file:
        value = json.load(file)
    if isinstance(value, list):
        return value
    lists = [[value]] if column in value else _lists_in(value)
    if len(lists) != 1:
        raise BadFile(f"{path} cannot be read as json: it holds neither lines of objects nor one list of objects")
    return lists[0]


def _lists_in(value: dict[str, Any]) -> list[list[Any]]:
    return [rows for rows in value.values() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]


def _read_csv(path: Path, column: str, _: bool, delimiter: str = ",") -> Iterator[str | None]:
    """Read a table of comma separated values; a cell is text, whatever it says, also a number."""
    csv.field_size_limit(sys.maxsize)  # a document may be longer than the 128 KiB that a cell may have by default
    with open_text(path, newline="") as file:
        rows = csv.reader(_without_nul(path, file), delimiter=delimiter, strict=True)
        names = next(rows, [])
        if column not in names:
            _refuse_column(path, column, names)
        place = names.index(column)
        for row in rows:
            if row and len(row) != len(names):
                raise BadFile(f"{path} cannot be read as csv: line {rows.line_num} has {len(row)} cells, not {len(names)}")
            if row:
                yield row[place]


def _without_nul(path: Path, file: TextIO) -> Iterator[str]:
    for line in file:
        if "\0" in line:
            raise BadFile(f"{path} is a binary file: it has NUL bytes")
        yield line


def _read_tsv(path: Path, column: str, whole_numbers: bool) -> Iterator[str | None]:
    return _read_csv(path, column, whole_numbers, "\t")


def _read_parquet(path: Path, column: str, whole_numbers: bool) -> Iterator[Piece]:
    with open_bytes(path) as source, seekable(source) as whole, pq.ParquetFile(whole) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            _refuse_column(path, column, schema.names)
        kind = schema.field(column).type
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        allowed = (*TEXT_TYPES, pa.types.is_integer) if whole_numbers else TEXT_TYPES
        if not any(is_type(plain) for is_type in allowed):
            _refuse_type(path, column, str(kind))
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for cell in batch.column(0).to_pylist():
                yield from _pieces(cell if cell is None else str(cell))


def parquet_rows(path: Path) -> int:
    """Return the number of rows of a Parquet file, which may be compressed once more."""
    with open_bytes(path) as source, seekable(source) as whole, pq.ParquetFile(whole) as file:
        return file.metadata.num_rows


def _refuse_column(path: Path, column: str, columns: list[str]) -> None:
    raise BadFile(f"{path} has no column {column!r}; text_column may be one of {columns}")


def _refuse_type(path: Path, column: str, kind: str) -> None:
    raise BadFile(f"{path}: column {column!r} holds {kind}, not text")


TABLES: dict[str, Callable[[Path, str, bool], Iterator[str | None]]] = {"json": _read_json, "csv": _read_csv, "tsv": _read_tsv}
SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".jsonlines": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
