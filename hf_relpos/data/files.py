"""Find the files that a run reads: names, folders and patterns become paths, each file once; what was left out is counted."""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path

# Bytes at each end of a file that tell it from another one, where files are too large to be read before training.
ENDS = 1 << 16


def find_files(names: Sequence[str]) -> tuple[list[Path], Counter[str]]:
    """Find the files that names stand for, following links.

    Args:
        names: files, folders (everything in them) and glob patterns.

    Returns:
        The files in the order of the names, those of a folder or pattern sorted, each real file once; and how many were
        left out for which reason.

    Raises:
        ValueError: a name is no file, no folder with files and no pattern that matches one; a folder cannot be read.
    """
    left_out: Counter[str] = Counter()
    found: dict[tuple[int, int], Path] = {}
    for name in names:
        paths = _files_of(name, left_out)
        if not paths:
            raise ValueError(f"{name!r} is no file, no folder with files in it and no pattern that matches a file")
        for path in paths:
            if found.setdefault(_identity(path), path) is not path:
                left_out["files given twice"] += 1
    return list(found.values()), left_out


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def describe_files(paths: Sequence[Path]) -> dict[str, int | str]:
    """Return the number of files, their bytes, and the SHA-256 of each one's size and ends: a file that grew is another one."""
    digest, total = hashlib.sha256(), 0
    for path in paths:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "big") + file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
        total += size
    return {"files": len(paths), "bytes": total, "sha256": digest.hexdigest()}


def shared_files(first: Sequence[str], second: Sequence[str]) -> list[Path]:
    """Return the files that two lists of names have in common, whatever links lead to them."""
    others = {_identity(path) for path in find_files(second)[0]}
    return [path for path in find_files(first)[0] if _identity(path) in others]


def _files_of(name: str, left_out: Counter[str]) -> list[Path]:
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(_walk(path, left_out, {os.path.realpath(path)}))
    if path.is_symlink():
        raise ValueError(f"{name!r} is a link to nothing: {os.readlink(path)} is not there")
    return sorted(Path(match) for match in glob.glob(name, recursive=True) if Path(match).is_file())


def _walk(folder: Path, left_out: Counter[str], seen: set[str]) -> Iterator[Path]:
    """Walk a folder and the folders that its links lead to, each once."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from error
    for path in entries:
        if path.name.startswith("."):
            left_out["hidden files and folders"] += 1
        elif path.is_dir():
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield from _walk(path, left_out, seen)
        elif path.is_file():
            yield path
        else:
            left_out["links to nothing" if path.is_symlink() else "devices, pipes and sockets"] += 1


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
