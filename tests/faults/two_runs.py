"""Two runs: the same job is started a second time while the first one works."""

import shutil

from running import Running
from running import wait
from tries import Try
from tries import go_on


def two_at_once(given: Try) -> str:
    """The same job twice in one room, the second begun at a random moment."""
    shutil.copytree(given.whole.begun, given.room)
    first = Running(given.name, given.room, given.said)
    wait(first, given.rng.uniform(0, given.whole.seconds))
    second = Running(given.name, given.room, given.said.with_suffix(".second"))
    codes = [first.end(), second.end()]
    lines = [first.must_say(codes[0]), second.must_say(codes[1])]
    assert 0 in codes, lines
    go_on(given)
    return "both finished" if codes == [0, 0] else "one refused"
