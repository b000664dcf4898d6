"""The script of `make faults` works, and says of a fault that is not met that it failed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "faults"
sys.path.insert(0, str(HERE))

from jobs import JOBS  # noqa: E402
from kinds import KINDS  # noqa: E402


def test_every_kind_has_jobs_and_every_job_a_kind() -> None:
    assert {job for _, jobs in KINDS.values() for job in jobs} == JOBS.keys()
    assert len({fault for fault, _ in KINDS.values()}) == len(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGKILL", "full disk", "damaged checkpoint"])
def test_a_try_of_a_kind(kind: str) -> None:
    words = ["--only", kind, "--job", "training with memory", "--times", "1", "--seed", "123"]
    done = subprocess.run([sys.executable, str(HERE / "run.py"), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    assert json.loads((HERE.parents[1] / "runs" / "faults.json").read_text())
