"""The tests set their own environment, so that they pass in a shell where nothing is set."""

import os
import subprocess
import sys
from pathlib import Path

import torch

WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
hidden = {"accelerate", "datasets", "evaluate", "matplotlib", "pandas", "psutil", "pyarrow", "scipy", "sklearn"}
PathFinder.find_spec = staticmethod(lambda name, *given: None if name.partition(".")[0] in hidden else find(name, *given))

import torch
import hf_relpos
from transformers import AutoModelForCausalLM

sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
model = AutoModelForCausalLM.from_config(hf_relpos.RelPosDecoderConfig(**sizes))
assert model(torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 9)
assert not hidden & sys.modules.keys()
try:
    hf_relpos.SegmentTrainer
except ImportError as error:
    assert "needs the packages for training" in str(error), error
else:
    raise AssertionError("it was imported without them")
"""


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


def test_torch_and_transformers_are_enough() -> None:
    """The package imports, and a model runs, where none of the packages for training are installed."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
