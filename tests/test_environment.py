"""The tests set their own environment, so that they pass in a shell where nothing is set."""

import os
from pathlib import Path

import torch


def test_continuous_integration_runs_what_the_readme_says() -> None:
    lines = Path(__file__).parents[1].joinpath(".ci", "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "set -euo pipefail",
        'cd "$(dirname "$0")/.."',
        "make test",
    ]


def test_processes_that_tests_start_compute_with_as_many_threads_as_this_one() -> None:
    """Threads decide the order of sums: without this, runs in two processes differ in their last bits."""
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]) == 1
