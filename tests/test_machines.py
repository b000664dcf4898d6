"""Two processes by data parallelism, by sharding and by tensor parallelism: the numbers of one process."""

import json
from pathlib import Path
from typing import Any

import machines
import pytest
import torch
from elsewhere import environment
from elsewhere import run_script
from machines import ROWS
from safetensors.torch import load_file
from segments import logged
from segments import make_model

CELLS = [pytest.param(row, engine, id=f"{row.name}-{engine}") for row in ROWS for engine in row.engines]

FOUND = ("found_0.safetensors", "found_1.safetensors")


def read_auto_map(folder: Path) -> dict[str, str]:
    """Return which classes a saved folder names."""
    return json.loads((folder / "config.json").read_text())["auto_map"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process left its models, and two went on."""
    folder = tmp_path_factory.mktemp("machines")
    for row in ROWS:
        row.model().save_pretrained(machines.folder_of(folder, row))
    make_model(vocab_size=38).save_pretrained(folder / "lanes")
    make_model(vocab_size=37).save_pretrained(folder / "uneven")
    run_script("seams_of_machines.py", folder, **environment())
    return folder


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[dict[str, torch.Tensor], Any, dict[str, torch.Tensor]]]:
    """Losses before and after the step, memory, and weights after the step in one process."""
    found = {}
    for row in ROWS:
        model, segments = row.model(), row.segments()
        loss, memory = machines.run_segments(model, row, segments, row.targets(segments[1]))
        machines.take_step(model, loss)
        after_step = machines.run_segments(model, row, segments, row.targets(segments[1]))[0].detach()
        found[row.name] = {"loss": loss.detach(), "after_step": after_step}, memory, model.state_dict()
    return found


def same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, weight in found.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("row", "engine"), CELLS)
def test_two_processes_take_the_step_of_one(root: Path, alone: dict, row: machines.Row, engine: str) -> None:
    losses, memory, weights = alone[row.name]
    before, after = machines.folder_of(root, row), machines.folder_of(root, row, engine)
    ranks = [load_file(after / f"found_{rank}.safetensors") for rank in (0, 1)]
    for name, loss in losses.items():
        torch.testing.assert_close((ranks[0][name] + ranks[1][name]) / 2, loss)
    assert row.remembers == (memory is not None) == ("memory" in ranks[0])
    for name, wanted in zip(("memory", "length"), memory or (), strict=False):
        halves = [rank[name] for rank in ranks]
        torch.testing.assert_close(halves[0] if engine == "tp" else torch.cat(halves), wanted)
    assert {path.name for path in after.iterdir()} - {path.name for path in before.iterdir()} == set(FOUND)
    assert read_auto_map(after) == read_auto_map(before)
    saved = load_file(after / "model.safetensors")
    assert saved.keys() >= load_file(before / "model.safetensors").keys()
    same_weights(saved, weights)


@pytest.mark.parametrize(("row", "engine"), [cell for cell in CELLS if cell.values[0].shards and cell.values[1] != "ddp"])
def test_a_sharded_checkpoint_loads_in_one_process(root: Path, alone: dict, row: machines.Row, engine: str) -> None:
    model = row.head.kind.from_pretrained(f"{machines.folder_of(root, row, engine)}-sharded", dtype=torch.float64)
    weights = alone[row.name][2]
    assert model.state_dict().keys() == weights.keys()
    same_weights(model.state_dict(), weights)


def test_lanes_of_a_sharded_model(root: Path, tmp_path: Path) -> None:
    trainer = machines.lane_trainer(tmp_path, make_model(vocab_size=38), 8)
    trainer.train()
    for rank in (0, 1):
        found = json.loads((root / f"lanes_{rank}.json").read_text())
        assert found["losses"] == pytest.approx(logged(trainer), abs=1e-5)
        assert found["evaluation"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-5)
        assert "fsdp_size=2 does not divide the 37 rows of model.embed_tokens.weight" in found["refused"]
