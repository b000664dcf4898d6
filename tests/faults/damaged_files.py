"""Files: a checkpoint, record, table, source or text is damaged or changed, between two starts or under a run."""

import random
import shutil
import signal
from pathlib import Path

from jobs import JOBS
from running import Running
from running import wait
from tries import Try
from tries import assert_nothing_lost
from tries import go_on

from hf_relpos.training.checkpoints import last_checkpoint


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
