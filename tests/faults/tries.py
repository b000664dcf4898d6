"""What all tries share: the undisturbed job that each is compared with, and what must hold after a fault.

The newest checkpoint that was told to be whole is still there and whole. The job then ends, when it is run again, with the bits of a job
that was never disturbed; or it refuses, by one line that names what is wrong.
"""

import random
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from hub import hub_of
from hub import published
from jobs import JOBS
from jobs import Outcome
from jobs import converted
from running import Running

from hf_relpos.training.checkpoints import last_checkpoint


class Whole(NamedTuple):
    """A job that nothing disturbed: its room when it began, its room at the end, what came out, its seconds, its saves."""

    begun: Path
    room: Path
    outcome: Outcome
    seconds: float
    saves: list[float]


class Try(NamedTuple):
    """One try of a fault: the job, a room for it, what is drawn at random, the whole job, and the script of the Hub."""

    name: str
    room: Path
    rng: random.Random
    whole: Whole
    hub: Path | None

    @property
    def said(self) -> Path:
        return self.room.with_suffix(".txt")


def run_whole(name: str, begun: Path, room: Path, hub: Path | None) -> Whole:
    """Lay out a job, run it undisturbed, and return what came out."""
    if not begun.is_dir():
        begun.mkdir(parents=True)
        JOBS[name].lay_out(begun)
    shutil.copytree(begun, room)
    with hub_of(name, room, hub) as address:
        running = Running(name, room, room.with_suffix(".txt"), address=address)
        code = running.end()
        assert code == 0, running.said.read_text()[-2000:]
        seconds = time.monotonic() - running.began
        moments = running.moments
        saves = [end - start for (what, start), (_, end) in zip(moments, moments[1:], strict=False) if what == "saves"]
        outcome = outcome_of(name, room, address)
    return Whole(begun, room, outcome, seconds, saves)


def outcome_of(name: str, room: Path, address: str) -> Outcome:
    return published(address) if name == "push" else JOBS[name].outcome(room)


def go_on(given: Try, address: str = "") -> None:
    """Run the job again, to its end, and assert that it ends as the whole one did."""
    if given.name == "convert" and (given.room / "converted").exists():  # whole, or it would not be there
        assert converted(given.room) == given.whole.outcome
        return
    running = Running(given.name, given.room, given.said, address=address)
    code = running.end()
    assert code == 0, f"does not go on: {running.said.read_text(errors='replace')[-1500:]}"
    found = outcome_of(given.name, given.room, address)
    different = [key for key in given.whole.outcome.keys() | found.keys() if given.whole.outcome.get(key) != found.get(key)]
    assert not different, f"other bits than the whole job: {sorted(different)}"


def assert_nothing_lost(given: Try, saved: int) -> None:
    """Assert that the newest checkpoint that was written to its end is whole."""
    job = JOBS[given.name]
    if job.checkpoints and saved:
        last = last_checkpoint(given.room / job.checkpoints, memory=job.memory)
        assert last and int(last.rpartition("-")[2]) >= saved, f"checkpoint-{saved} was lost: the last one is {last}"
