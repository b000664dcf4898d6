"""Numbers: a training step meets a token id, a gradient or a weight without a meaning."""

import shutil
from collections.abc import Callable

import spoil
from running import Running
from tries import Try
from tries import assert_nothing_lost
from tries import go_on


def spoiled(what: str) -> Callable[[Try], str]:
    """Return the fault of a run that meets a number without a meaning in one of its steps."""

    def fault(given: Try) -> str:
        shutil.copytree(given.whole.begun, given.room)
        value, step = given.rng.choice(spoil.values_for(what)), given.rng.randint(1, 12)
        running = Running(given.name, given.room, given.said, f"{what}/{value}/{step}")
        code = running.end()
        line = running.must_say(code)
        wanted = ("diverged",) if what in ("gradients", "weights") else (str(spoil.VALUES[value]),)
        assert code == 1 and any(word in line for word in wanted), f"{value} in step {step}: exit code {code}: {line}"
        assert_nothing_lost(given, running.saved)
        go_on(given)
        return "refused, then went on"

    return fault
