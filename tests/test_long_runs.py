"""The short trial of `make long`: memory is flat, and numbers are those of a short run, of one thread and of one pass."""

import gc
import mmap
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
    """A model that keeps 4 MiB and an open file a save.

    The 4 MiB are mapped anew each time: an allocator could take them from what earlier tests of the process left free.
    """
    kept, load = [], long_runs.RelPosDecoderForCausalLM.from_pretrained

    def load_and_keep(folder: Path) -> torch.nn.Module:
        pages = mmap.mmap(-1, 4 << 20)
        pages.write(bytes([1]) * len(pages))
        kept.append((pages, (folder / "config.json").open()))
        return load(folder)

    monkeypatch.setattr(long_runs.RelPosDecoderForCausalLM, "from_pretrained", load_and_keep)
    gc.collect()  # what earlier tests left would hide as much when it goes
    found = long_runs.save_often(20, tmp_path)
    for pages, file in kept:
        pages.close()
        file.close()
    assert found.last.bytes - found.first.bytes > 8 << 20 and found.last.files > found.first.files and not found.flat


def test_tenths_are_those_of_what_was_sampled() -> None:
    found = finding("x", 20, [Sample(size << 20, 5, size) for size in range(20)], "")
    assert (found.first.bytes, found.last.bytes) == (1 << 19, 37 << 19) and found.seconds == 19
    assert not found.flat and finding("x", 20, [Sample(1 << 20, 5, 0.0)] * 20, "").flat
