"""Signals: a job is killed, asked to end or interrupted, at any moment or within a save."""

import shutil
import signal
from collections.abc import Callable

from hub import hub_of
from hub import published
from jobs import Outcome
from running import BEGUN
from running import LATE
from running import Running
from running import wait
from tries import Try
from tries import assert_nothing_lost
from tries import go_on


def stopped(number: int) -> Callable[[Try], str]:
    """Return the fault of a job that gets a signal at a moment drawn from its time."""

    def fault(given: Try) -> str:
        shutil.copytree(given.whole.begun, given.room)
        with hub_of(given.name, given.room, given.hub) as address:
            before = published(address) if address else {}
            running = Running(given.name, given.room, given.said, address=address)
            wait(running, given.rng.uniform(BEGUN, max(BEGUN, given.whole.seconds)))
            return stop(given, running, number, address, before)

    return fault


def stopped_in_save(number: int) -> Callable[[Try], str]:
    """Return the fault of a run that gets a signal while it writes a checkpoint."""

    def fault(given: Try) -> str:
        shutil.copytree(given.whole.begun, given.room)
        running = Running(given.name, given.room, given.said)
        at = given.rng.randrange(len(given.whole.saves))
        running.wait_for("saves", at + 1)
        wait(running, given.rng.uniform(0, given.whole.saves[at]))
        return stop(given, running, number, "", {})

    return fault


def stop(given: Try, running: Running, number: int, address: str, before: Outcome) -> str:
    running.signal(number)
    code = running.end()
    if number == signal.SIGINT:
        running.must_say(code)
    else:
        assert code in (-number, 0), f"exit code {code}: {running.said.read_text()[-1000:]}"
    assert_nothing_lost(given, running.saved)
    if address:
        assert published(address) in (before, given.whole.outcome), "the Hub holds a part of the files"
    go_on(given, address)
    return LATE if code == 0 else "went on"
