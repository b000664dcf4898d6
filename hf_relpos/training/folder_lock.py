"""Keep the folder of a run to one process: two that write the same checkpoints leave a mixture of both."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.get_logger(__name__)
_held: set[int] = set()


@contextmanager
def named_if_not_written(output_dir: str | Path | None) -> Iterator[None]:
    """Raise a ValueError that names the folder of a run where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"output_dir={output_dir!r} cannot be written: {error}; choose another --output_dir") from error


@contextmanager
def hold_folder(output_dir: str | Path) -> Iterator[None]:
    """Make the folder of a run, and keep it to this process; the system lets go of it however the process ends.

    Where there are no locks, a warning says once for each folder that a second run is not noticed.

    Raises:
        ValueError: another process has it, or it cannot be written.
    """
    with named_if_not_written(output_dir):
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    lock = _lock(Path(output_dir))
    if lock is None:
        raise ValueError(
            f"output_dir={output_dir!r} is written by another run just now: wait for it, or choose another --output_dir"
        )
    _held.add(lock)
    try:
        yield
    finally:
        _held.discard(lock)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder, and return the open file that holds the lock; None if another process holds it."""
    if fcntl is None:
        _warn_without_lock(folder, "this system has no flock")
        return os.open(os.devnull, os.O_RDONLY)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        return None
    except OSError as error:  # a file system without locks
        _warn_without_lock(folder, str(error))
    return opened


def _warn_without_lock(folder: Path, reason: str) -> None:
    logger.warning_once(
        f"output_dir={str(folder)!r} cannot be locked ({reason}): two runs that write into it at the same time are not noticed; "
        "give each run a folder of its own"
    )


def _let_go() -> None:
    """Close what a forked process inherits: else a worker that outlives its run would go on holding the folder."""
    for lock in _held:
        os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
