"""Disks: one that is full at some moment, and one that cannot be written any more."""

import shutil
import signal
import subprocess
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hub import Skipped
from running import LATE
from running import Running
from running import wait
from tries import Try
from tries import assert_nothing_lost
from tries import go_on


@contextmanager
def disk(room: Path, size: int) -> Iterator[Callable[[str], None]]:
    """Let the room be a disk of so many bytes; give what mounts it again with other options."""
    room.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(room)], capture_output=True).returncode:
        raise Skipped("a disk of its own needs the right to mount")
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(room)], check=True) and None
    finally:
        subprocess.run(["umount", "-l", str(room)], check=True)


def bytes_of(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 + 4096 for path in folder.rglob("*"))


def full_disk(given: Try) -> str:
    begun, whole = bytes_of(given.whole.begun), bytes_of(given.whole.room)
    with disk(given.room, begun + int(given.rng.uniform(0, 1) * (whole - begun)) + 65536) as remount:
        shutil.copytree(given.whole.begun, given.room, dirs_exist_ok=True)
        running = Running(given.name, given.room, given.said)
        code = running.end()
        running.must_say(code)
        assert_nothing_lost(given, running.saved)
        remount("size=1g")
        go_on(given)
    return LATE if code == 0 else "refused, then went on"


def read_only(given: Try) -> str:
    """A disk that is mounted read-only when a stopped job is to go on."""
    with disk(given.room, 1 << 30) as remount:
        shutil.copytree(given.whole.begun, given.room, dirs_exist_ok=True)
        running = Running(given.name, given.room, given.said)
        wait(running, given.rng.uniform(0, given.whole.seconds))
        running.signal(signal.SIGKILL)
        if running.end() == 0:
            return LATE
        remount("ro")
        second = Running(given.name, given.room, given.said)
        code = second.end()
        line = second.must_say(code)
        assert code == 1 and "ead-only" in line, f"exit code {code}: {line}"
        remount("rw")
        assert_nothing_lost(given, running.saved)
        go_on(given)
    return "refused, then went on"
