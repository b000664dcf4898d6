"""What a job relies on and loses: the Hub, or a process that works for it."""

import shutil
import time
from contextlib import suppress

import psutil
from hub import published
from hub import start_hub
from running import LATE
from running import LIMIT
from running import Running
from running import wait
from tries import Try
from tries import assert_nothing_lost
from tries import go_on


def lost_network(given: Try) -> str:
    """The Hub goes away at a random moment of an upload."""
    shutil.copytree(given.whole.begun, given.room)
    assert given.hub is not None
    server, address = start_hub(given.hub, given.room)
    try:
        before = published(address)
        running = Running(given.name, given.room, given.said, address=address)
        wait(running, given.rng.uniform(0, given.whole.seconds))
        server.kill()
        server.wait()
        code = running.end()
        running.must_say(code)
        server, address = start_hub(given.hub, given.room, int(address.rpartition(":")[2]))
        assert published(address) in (before, given.whole.outcome), "the Hub holds a part of the files"
        go_on(given, address)
    finally:
        server.kill()
        server.wait()
    return LATE if code == 0 else "refused, then went on"


def dead_worker(given: Try) -> str:
    shutil.copytree(given.whole.begun, given.room)
    running = Running(given.name, given.room, given.said)
    children, process = [], psutil.Process(running.process.pid)
    end = time.monotonic() + LIMIT
    while not children and running.process.is_alive() and time.monotonic() < end:
        running.listen()
        time.sleep(0.001)
        try:
            children = [one for one in process.children() if one.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            break
    assert children, "there was no worker"
    wait(running, given.rng.uniform(0, given.whole.seconds / 3))
    with suppress(psutil.NoSuchProcess):
        given.rng.choice(children).kill()
    code = running.end()
    running.must_say(code)
    assert_nothing_lost(given, running.saved)
    go_on(given)
    return LATE if code == 0 else "refused, then went on"
