"""Open a file as bytes or as text, whatever it is compressed with and whichever Unicode encoding it has: its first bytes say so."""

import bz2
import codecs
import gzip
import io
import lzma
import shutil
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from typing import BinaryIO
from typing import TextIO
from typing import cast

import pyarrow as pa

COMPRESSED: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda file: pa.input_stream(file, compression="zstd"),
    b"\x04\x22\x4d\x18": lambda file: pa.input_stream(file, compression="lz4"),
}
ARCHIVES = {b"PK\x03\x04": "zip", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar", b"\x1f\x9d": "compress"}
# The longer ones first: the mark of UTF-32 begins like that of UTF-16.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class BadFile(ValueError):
    """A file that cannot be read as text; its message names it."""


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed if its first bytes say that it is compressed.

    Raises:
        BadFile: it is an archive.
    """
    with path.open("rb") as file:
        head = file.read(8)
        file.seek(0)
        for magic, archive in ARCHIVES.items():
            if head.startswith(magic):
                raise BadFile(f"{path} is a binary file: an archive of type {archive}; unpack it first")
        opener = next((opener for magic, opener in COMPRESSED.items() if head.startswith(magic)), nullcontext)
        with opener(file) as unpacked:
            yield unpacked


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a file as Unicode text, without its byte order mark."""
    with open_bytes(path) as file, io.BufferedReader(cast(Any, file)) as buffered:
        head = buffered.peek(4)
        encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if head.startswith(mark)), "utf-8-sig")
        with io.TextIOWrapper(buffered, encoding, newline=newline) as text:
            yield text


def seekable(source: BinaryIO) -> BinaryIO:
    """Return a file that can be read from any place: a copy on the disk where the decompressed one cannot."""
    if source.seekable():
        return source
    whole = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    shutil.copyfileobj(source, whole)
    return cast(BinaryIO, whole)
