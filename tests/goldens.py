"""Reads numbers that other people's implementations produced, kept beside the repository, and compares with them."""

import importlib.util
import pathlib
from typing import Any

import pytest
import torch
from safetensors import safe_open

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "goldens"
EXACT = 1e-9
"""For float64 results of a float64 reference."""


def golden(name: str) -> Any:
    """One folder of goldens through the reader that stands beside it, or a skipped test."""
    if not (GOLDENS / name).is_dir():
        pytest.skip(f"the goldens of {name} are absent: ../shared/goldens")
    spec = importlib.util.spec_from_file_location("golden_reader", GOLDENS / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Golden(str(GOLDENS / name))


def case_names(*names: str) -> list[Any]:
    """The cases of some folders as parameters of a test; one that says it is absent where there is none."""
    found = []
    for name in names:
        path = GOLDENS / name
        if path.is_dir():
            with safe_open(path / "io.safetensors", "pt") as file:
                cases = sorted({key.split("/")[0] for key in list(file.keys())})
            found += [pytest.param(name, case, id=f"{name}-{case}") for case in cases]
        else:
            found.append(pytest.param(name, "", id=f"{name}-absent"))
    return found


def case_weights(reader: Any, case: str) -> dict[str, torch.Tensor]:
    """Return the float64 weights of one case: under `case.<name>.` where it has its own, else those that all cases share.

    The reader leaves such names as they are in folders that mix both (`weights` in its meta.json).
    """
    given, own = reader.weights(fp64=True, case=case), f"case.{case}."
    found = {name.removeprefix(own): weight for name, weight in given.items() if name.startswith(own)}
    return found or {name: weight for name, weight in given.items() if not name.startswith("case.")}


def assert_outputs(reader: Any, case: str, outputs: dict[str, Any]) -> None:
    """Outputs against the float64 ones; where the reference kept only float32 (its memories), against those."""
    exact = {name for name in reader.expect_flat(case, fp64=True) if f"{case}/out64/{name}" in reader.io}
    distances = reader.compare(case, lambda weights, inputs: outputs, fp64=True, quiet=True)
    assert len(distances) >= len(outputs) > 0
    for name, distance in distances.items():
        assert distance < (EXACT if name in exact else 5e-5), f"{name}: {distance}"


def assert_gradients(reader: Any, case: str, outputs: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Gradients of the golden's scalar loss with respect to all weights that it kept, by its own names."""
    wanted = reader.grads(case, fp64=True)
    assert wanted.keys() <= weights.keys()
    found = torch.autograd.grad(reader.loss(case, outputs), [weights[name] for name in wanted])
    for (name, gradient), mine in zip(wanted.items(), found, strict=True):
        assert (mine - gradient).abs().max() < EXACT * max(1.0, gradient.abs().max()), name


def memories(output: Any, length: int) -> list[torch.Tensor]:
    """The valid slots of each layer, time first as both implementations keep them."""
    hidden = output.memory.hidden
    assert output.memory.length.tolist() == [length] * hidden.shape[0]
    return [hidden[:, layer, hidden.shape[2] - length :].transpose(0, 1) for layer in range(2)]
