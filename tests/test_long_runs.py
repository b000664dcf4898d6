"""The short trial of `make long`: memory is flat, and numbers are those of a short run, of one thread and of one pass."""

from pathlib import Path

import long_runs
import pytest
import torch
from long_runs import RUNS
from long_runs import Sample
from long_runs import finding
from long_runs import run

SCALES = {"steps": 0.003, "saves": 0.01, "threads": 0.02, "chat_cache": 0.01, "chat_memory": 0.005}


@pytest.mark.parametrize("name", RUNS)
def test_memory_and_files_are_flat(name: str) -> None:
    found = run(name, SCALES[name])
    assert found.flat, found


def test_what_is_kept_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that keeps 4 MiB and an open file a save."""
    kept, load = [], long_runs.RelPosDecoderForCausalLM.from_pretrained

    def load_and_keep(folder: Path) -> torch.nn.Module:
        kept.append((torch.ones(1 << 20), (folder / "config.json").open()))
        return load(folder)

    monkeypatch.setattr(long_runs.RelPosDecoderForCausalLM, "from_pretrained", load_and_keep)
    found = long_runs.save_often(20, tmp_path)
    for _, file in kept:
        file.close()
    assert found.last.bytes - found.first.bytes > 8 << 20 and found.last.files > found.first.files and not found.flat


def test_tenths_are_those_of_what_was_sampled() -> None:
    found = finding("x", 20, [Sample(size << 20, 5, size) for size in range(20)], "")
    assert (found.first.bytes, found.last.bytes) == (1 << 19, 37 << 19) and found.seconds == 19
    assert not found.flat and finding("x", 20, [Sample(1 << 20, 5, 0.0)] * 20, "").flat
