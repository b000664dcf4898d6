"""A job in a process of its own: what it tells while it runs, how it is stopped, and what it must say at its end."""

import multiprocessing
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from jobs import work

BEGUN = 0.05
"""Seconds after which a process is within its job."""
IGNORED = re.compile(r"Exception ignored in.*?\nKeyboardInterrupt", re.DOTALL)
ENDS = re.compile(r"(^|\]|\r)(error: |interrupted)", re.MULTILINE)  # a bar of progress may be drawn once more behind it
"""How the line begins that a job ends with, perhaps behind a progress bar."""
LATE = "finished before it"
"""What came of a try whose job had ended well when the fault was to come."""
LIMIT = 300
"""Seconds after which a job that should have ended counts as hanging."""


class Running:
    """A job in a process of its own, which has begun."""

    def __init__(self, name: str, room: Path, said: Path, spoiled: str | None = None, address: str = "") -> None:
        self.name, self.room, self.said = name, room, said
        context = multiprocessing.get_context("forkserver")
        self.told, other = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(name, str(room), str(said), other, spoiled, address))
        self.process.start()
        other.close()
        self.saved, self.saving, self.moments = 0, 0, []
        self.wait_for("begins")
        self.began = time.monotonic()

    def listen(self, seconds: float = 0) -> str | None:
        """Take one thing that the job tells, None if there is none within some seconds."""
        try:
            if not self.told.poll(seconds):
                return None
            what, step = self.told.recv()
        except EOFError:
            return "ended"
        self.moments.append((what, time.monotonic()))
        self.saved = step if what == "saved" else self.saved
        return what

    def wait_for(self, wanted: str, times: int = 1) -> None:
        while times and (what := self.listen(LIMIT)) != "ended":
            assert what is not None, f"hangs after {LIMIT} s: {self.last_line()}"
            times -= what == wanted

    def signal(self, number: int) -> None:
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, number)

    def end(self) -> int:
        """Wait for the end, remove what the process left running, and return the exit code."""
        self.wait_for("the end", 1)
        self.process.join(LIMIT)
        code, pid = self.process.exitcode, self.process.pid
        if pid:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        assert code is not None, f"hangs after {LIMIT} s: {self.last_line()}"
        return code

    def last_line(self) -> str:
        lines = self.said.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def must_say(self, code: int) -> str:
        """Assert that the job ended well or with one line, and return that line."""
        text, line = self.said.read_text(errors="replace"), self.last_line()
        if code:  # Python itself ignores an interrupt within some callbacks, says so, and goes on
            assert "Traceback" not in IGNORED.sub("", text), text[-1500:]
            assert code in (1, 130) and ENDS.search(text), f"exit code {code}: {text[-700:]}"
        return line


def wait(running: Running, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and running.listen(left) != "ended":
        pass
