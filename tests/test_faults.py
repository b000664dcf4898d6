"""The script of `make faults` works, and says of a fault that is not met that it failed."""

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "faults"
sys.path.insert(0, str(HERE))

from jobs import JOBS  # noqa: E402
from kinds import KINDS  # noqa: E402
from running import LATE  # noqa: E402


def test_every_kind_has_jobs_and_every_job_a_kind() -> None:
    assert {job for _, jobs in KINDS.values() for job in jobs} == JOBS.keys()
    assert len({fault for fault, _ in KINDS.values()}) == len(KINDS)


def test_the_page_counts_tries_that_met_no_fault_and_keeps_what_was_written_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("run_faults", HERE / "run.py")  # another folder has a run.py, too
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    monkeypatch.setattr(run, "PAGE", tmp_path / "faults.md")
    assert run.written_by_hand() == ""
    found = {
        ("SIGINT", "push", 0): LATE,
        ("SIGINT", "push", 1): "went on",
        ("full disk", "convert", 0): "FAILED: said nothing",
    }
    by_hand = f"{run.BY_HAND}\n\nA table of mends.\n\n"
    run.PAGE.write_text(run.page(found, Namespace(times=2, seed=0), by_hand))
    text = run.PAGE.read_text()
    assert "of 3 tries, 1 failed" in text and "In 1 of them" in text
    assert f"| SIGINT | push | 2 | 1 {LATE}, 1 went on | 0 |" in text
    assert run.written_by_hand() == by_hand


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGKILL", "full disk", "damaged checkpoint"])
def test_a_try_of_a_kind(kind: str) -> None:
    words = ["--only", kind, "--job", "training with memory", "--times", "1", "--seed", "123"]
    done = subprocess.run([sys.executable, str(HERE / "run.py"), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    assert json.loads((HERE.parents[1] / "runs" / "faults.json").read_text())
