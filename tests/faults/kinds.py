"""The faults: each lets a job meet something bad once, runs the job again, and asserts what must hold.

After each fault, the newest checkpoint that was told to be whole is still there and whole. The job then ends, when it is run again, with
the bits of a job that was never disturbed; or it refuses, by one line that names what is wrong.
"""

import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path
from typing import Any
from typing import NamedTuple

import psutil
import spoil
from huggingface_hub import HfApi
from jobs import JOBS
from jobs import REPO
from jobs import TOKEN
from jobs import Outcome
from jobs import converted
from jobs import work

from hf_relpos.training.checkpoints import last_checkpoint

BEGUN = 0.05
"""Seconds after which a process is within its job."""
IGNORED = re.compile(r"Exception ignored in.*?\nKeyboardInterrupt", re.DOTALL)
ENDS = re.compile(r"(^|\]|\r)(error: |interrupted)", re.MULTILINE)  # a bar of progress may be drawn once more behind it
"""How the line begins that a job ends with, perhaps behind a progress bar."""
LIMIT = 300
"""Seconds after which a job that should have ended counts as hanging."""


class Skipped(Exception):
    """A fault that cannot be tried here, with the reason."""


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


# Signals


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
    return "finished before it" if code == 0 else "went on"


def wait(running: Running, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and running.listen(left) != "ended":
        pass


# Disks


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
    return "finished before it" if code == 0 else "refused, then went on"


def read_only(given: Try) -> str:
    """A disk that is mounted read-only when a stopped job is to go on."""
    with disk(given.room, 1 << 30) as remount:
        shutil.copytree(given.whole.begun, given.room, dirs_exist_ok=True)
        running = Running(given.name, given.room, given.said)
        wait(running, given.rng.uniform(0, given.whole.seconds))
        running.signal(signal.SIGKILL)
        if running.end() == 0:
            return "finished before it"
        remount("ro")
        second = Running(given.name, given.room, given.said)
        code = second.end()
        line = second.must_say(code)
        assert code == 1 and "ead-only" in line, f"exit code {code}: {line}"
        remount("rw")
        assert_nothing_lost(given, running.saved)
        go_on(given)
    return "refused, then went on"


# Processes


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
    return "finished before it" if code == 0 else "refused, then went on"


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
    return "finished before it" if code == 0 else "refused, then went on"


# Files


def damage(path: Path, rng: random.Random) -> str:
    """Cut a file off, empty or remove it, or change one bit."""
    content, how = path.read_bytes(), rng.choice(["cut", "emptied", "removed", "one bit changed"])
    if how == "removed" or not content:
        path.unlink()
    elif how == "one bit changed":
        place = rng.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))
    else:
        path.write_bytes(content[: rng.randrange(1, len(content)) if how == "cut" else 0])
    return how


def stopped_room(given: Try) -> Path:
    """Lay out a run that was killed behind a checkpoint in its middle, and return that checkpoint."""
    shutil.copytree(given.whole.begun, given.room)
    running = Running(given.name, given.room, given.said)
    running.wait_for("saved", 3)
    running.signal(signal.SIGKILL)
    running.end()
    last = last_checkpoint(given.room / "out", memory=JOBS[given.name].memory)
    assert last is not None
    return Path(last)


def goes_on_or_names(given: Try, damaged: Path, how: str) -> str:
    """Assert that a job ends as the whole one did, or refuses by one line that names the damaged file or its folder."""
    running = Running(given.name, given.room, given.said)
    code = running.end()
    line = running.must_say(code)
    if code:
        assert damaged.name in line or damaged.parent.name in line, f"{damaged.name} {how}, but: {line}"
        return "refused"
    found = JOBS[given.name].outcome(given.room)
    mine = {key: value for key, value in found.items() if not key.startswith(damaged.parent.name + " ")}
    different = [key for key, value in mine.items() if given.whole.outcome.get(key) != value]
    assert not different, f"{damaged.relative_to(given.room)} {how}: other bits in {sorted(different)}"
    return "went on"


READ = ("*.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "segment_memory_0.pt")
"""Files of a checkpoint that going on reads; code, settings and tokenizer come from elsewhere."""


def changed_checkpoint(given: Try) -> str:
    folder = stopped_room(given)
    files = sorted({path for pattern in READ for path in folder.glob(pattern)})
    path = given.rng.choice(files)
    return goes_on_or_names(given, path, damage(path, given.rng))


def changed_text(given: Try) -> str:
    """The text changes between two starts of a run, or while it runs; what it has read of the text does not."""
    if given.rng.random() < 0.5:
        stopped_room(given)
    else:
        shutil.copytree(given.whole.begun, given.room)
        running = Running(given.name, given.room, given.said)
        wait(running, given.rng.uniform(0, given.whole.seconds))
        text = given.room / "text.txt"
        text.write_text(text.read_text().replace("line 7:", "line seven:"))
        code = running.end()
        running.must_say(code)
        assert_nothing_lost(given, running.saved)
        shutil.copy(given.whole.begun / "text.txt", text)
        go_on(given)
        return "went on" if code == 0 else "refused, then went on"
    text = given.room / "text.txt"
    text.write_text(text.read_text().replace("line 7:", "line seven:"))
    running = Running(given.name, given.room, given.said)
    line = running.must_say(running.end())
    assert "sha256" in line and "already holds another run" in line, line
    shutil.copy(given.whole.begun / "text.txt", text)
    go_on(given)
    return "refused, then went on"


def changed_table(given: Try) -> str:
    """A file in the cache of tables is damaged between two starts of a run."""
    stopped_room(given)
    files = [path for path in sorted((given.room / "cache").rglob("*")) if path.suffix in (".arrow", ".json")]
    path = given.rng.choice(files)
    return goes_on_or_names(given, path, damage(path, given.rng))


def changed_record(given: Try) -> str:
    stopped_room(given)
    path = given.room / "out" / "run_arguments.json"
    path.write_bytes(path.read_bytes()[: given.rng.randrange(100)])
    return goes_on_or_names(given, path, "cut")


def changed_source(given: Try) -> str:
    """A file of the checkpoint that is converted is cut off or removed."""
    shutil.copytree(given.whole.begun, given.room)
    path = given.rng.choice([given.room / "gpt2" / name for name in ("config.json", "model.safetensors")])
    content = path.read_bytes()
    path.write_bytes(content[: given.rng.randrange(len(content))])
    running = Running(given.name, given.room, given.said)
    line = running.must_say(running.end())
    assert line.startswith("error: ") and path.name in line, line
    assert not (given.room / "converted").exists()
    path.write_bytes(content)
    go_on(given)
    return "refused, then went on"


# Numbers


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


# The Hub


def start_hub(script: Path, room: Path, port: int = 0) -> tuple[subprocess.Popen, str]:
    """Start a Hub on this machine that holds another model, and return its process and its address."""
    command = [sys.executable, str(script), "--root", str(room.with_suffix(".hub")), "--port", str(port), "--token", TOKEN]
    server = subprocess.Popen([*command, "--lfs", "auto"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


@contextmanager
def hub_of(name: str, room: Path, script: Path | None) -> Iterator[str]:
    """Give the address of a Hub for a job that needs one, "" for the others."""
    if name != "push":
        yield ""
        return
    if script is None or not script.is_file():
        raise Skipped("no script that plays the Hub: --hub SCRIPT")
    server, address = start_hub(script, room)
    try:
        HfApi(endpoint=address, token=TOKEN).create_repo(REPO, exist_ok=True)
        yield address
    finally:
        server.kill()
        server.wait()


def published(address: str) -> Outcome:
    """Return the files of the repository on the Hub, by name."""
    api: Any = HfApi(endpoint=address, token=TOKEN)
    if not api.repo_exists(REPO):
        return {}
    entries = api.list_repo_tree(REPO, recursive=True)
    return {entry.path: entry.blob_id for entry in entries if entry.path != ".gitattributes"}


RUNS = ("training", "training with memory")
KINDS: dict[str, tuple[Callable[[Try], str], tuple[str, ...]]] = {
    "SIGKILL": (stopped(signal.SIGKILL), (*RUNS, "data preparation", "evaluate", "compare", "convert", "push")),
    "SIGKILL within a save": (stopped_in_save(signal.SIGKILL), RUNS),
    "SIGTERM": (stopped(signal.SIGTERM), (*RUNS, "data preparation", "evaluate", "compare", "convert", "push")),
    "SIGINT": (stopped(signal.SIGINT), (*RUNS, "data preparation", "evaluate", "compare", "convert", "push")),
    "SIGINT within a save": (stopped_in_save(signal.SIGINT), RUNS),
    "full disk": (full_disk, (*RUNS, "data preparation", "evaluate", "compare", "convert")),
    "read-only disk": (read_only, (*RUNS, "data preparation", "compare", "convert")),
    "lost network": (lost_network, ("push",)),
    "dead worker": (dead_worker, ("training with workers", "data preparation")),
    "two at once": (two_at_once, (*RUNS, "data preparation", "compare", "convert")),
    "damaged checkpoint": (changed_checkpoint, RUNS),
    "damaged record": (changed_record, RUNS[:1]),
    "damaged table": (changed_table, RUNS),
    "damaged source": (changed_source, ("convert",)),
    "changed text": (changed_text, RUNS),
    **{f"spoiled {what}": (spoiled(what), RUNS) for what in spoil.WHAT},
}
"""Each kind of fault, and the jobs that it is tried on."""
