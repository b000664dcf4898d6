"""What `SegmentTrainer` adds to a checkpoint: the memory of all lanes, and where the lanes of a stream stand."""

import pickle
from pathlib import Path
from typing import Any

import torch

from hf_relpos.data.stream_lanes import LaneState
from hf_relpos.model.segment_memory import SegmentMemory


def memory_file(checkpoint: str | Path, process: int) -> Path:
    """Return where a process keeps its rows of the memory."""
    return Path(checkpoint, f"segment_memory_{process}.pt")


def load_memory(checkpoint: str | Path, reading: dict[str, Any]) -> SegmentMemory:
    """Load the memory of all lanes, in their order: accumulated batch, process, row.

    Args:
        checkpoint: its folder.
        reading: how the run that goes on reads its text.

    Raises:
        ValueError: the checkpoint holds no memory, not all of it, or its run read a text otherwise.
    """
    steps = zip(*(state["memories"] for state in _load_states(checkpoint, reading)), strict=True)
    parts = [SegmentMemory(*memory) for step in steps for memory in step]
    return SegmentMemory(torch.cat([part.hidden for part in parts]), torch.cat([part.length for part in parts]))


def load_lane_states(checkpoint: str | Path, reading: dict[str, Any]) -> dict[int, LaneState]:
    """Load where the lanes of a stream stand, by their numbers; lanes that have not begun are left out.

    Raises:
        ValueError: as `load_memory`.
    """
    steps = zip(*(state["lanes"] for state in _load_states(checkpoint, reading)), strict=True)
    lanes = [lane for step in steps for rows in step for lane in rows]
    return {number: lane for number, lane in enumerate(lanes) if lane is not None}


def _load_states(checkpoint: str | Path, reading: dict[str, Any]) -> list[dict[str, Any]]:
    first = memory_file(checkpoint, 0)
    processes = _load(first)["processes"] if first.is_file() else 1
    files = [memory_file(checkpoint, process) for process in range(processes)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{checkpoint} lacks {', '.join(missing)}, the segment memory of the run: it was saved with "
            "save_only_model, by another Trainer, or on several disks. ignore_data_skip=True begins the text anew"
        )
    states = [_load(file) for file in files]
    found = states[0].get("reading", {})
    if other := [
        f"{name} {found.get(name)} instead of {value}" for name, value in reading.items() if found.get(name) != value
    ]:
        raise ValueError(f"{checkpoint} was reading a text with {', '.join(other)}, as this run would read it")
    return states


def _load(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} is damaged: resume from an earlier checkpoint ({error})") from error
