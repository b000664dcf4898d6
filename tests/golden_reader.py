"""Reads numbers that other implementations, or the plain references, produced, and compares with them.

Folders under `tests/goldens` are committed and always there: a test of them never skips. Further ones stand beside the
repository, in `../shared/goldens`; they come from code that no package index has, and their tests skip where they are absent.

A folder holds `meta.json`, `weights.safetensors` (float32, by the implementation's own names, below `case.<case>.` where a case
has its own), and `io.safetensors` with names `<case>/<kind>/<name>`: kind `in`, `out64` (`out` where it is in float32), `lossw`
(the weights of a scalar loss over outputs), `grad64`.
"""

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

COMMITTED = pathlib.Path(__file__).resolve().parent / "goldens"
BESIDE = pathlib.Path(__file__).resolve().parents[2] / "shared" / "goldens"
NAMES = (
    "bert_relative_key",
    "bert_relative_key_query_causal",
    "distance_tables",
    "plain_references",
    "transfoxl_hf_adaptive_div2",
    "transfoxl_hf_div1",
    "transfoxl_tables",
    "xt_rotary",
)
"""The committed folders."""
EXACT = 1e-9
"""For float64 results of a float64 reference."""

Tensors = dict[str, torch.Tensor]


class Golden:
    """One folder of goldens."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.meta = json.loads((folder / "meta.json").read_text())
        self.io: Tensors = load_file(folder / "io.safetensors")
        self.stored: Tensors = load_file(folder / "weights.safetensors")

    def part(self, case: str, *kinds: str) -> Tensors:
        """Return all tensors of a case of some kinds, later kinds in place of earlier ones."""
        found: Tensors = {}
        for prefix in (f"{case}/{kind}/" for kind in kinds):
            found |= {name.removeprefix(prefix): tensor for name, tensor in self.io.items() if name.startswith(prefix)}
        return found

    def weights(self, case: str | None = None) -> Tensors:
        """Return the float64 weights of a case: those that all share, and its own, which may be kept for several cases."""
        found = {name: weight.double() for name, weight in self.stored.items() if not name.startswith("case.")}
        if case is None:
            return found
        for prefix in (f"case.{case}.", f"{case}.", f"{case.rsplit('_T', 1)[0]}.", f"{case.split('_')[0]}."):
            own = {name.removeprefix(prefix): weight for name, weight in self.stored.items() if name.startswith(prefix)}
            if own:
                shared = found if prefix.startswith("case.") else {}
                return shared | {name: weight.double() for name, weight in own.items()}
        return found

    def inputs(self, case: str) -> dict[str, Any]:
        """Return the inputs, floating ones in float64, lists as lists."""
        given = self.part(case, "in")
        return nest({name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in given.items()})

    def outputs(self, case: str) -> Tensors:
        """Return the outputs by name, those of float64 where there are any."""
        return {name: tensor for name, tensor in self.part(case, "out", "out64").items() if name != "__loss__"}

    def loss(self, case: str, outputs: dict[str, Any]) -> torch.Tensor:
        """Return the scalar whose gradients are kept."""
        found = flatten(outputs)
        return torch.stack([(found[name] * weight.double()).sum() for name, weight in self.part(case, "lossw").items()]).sum()


def flatten(nested: Any, above: str = "") -> Tensors:
    """Return the tensors of dicts and lists by their paths."""
    if isinstance(nested, torch.Tensor):
        return {above: nested}
    found: Tensors = {}
    for name, part in nested.items() if isinstance(nested, dict) else enumerate(nested):
        found |= flatten(part, f"{above}/{name}" if above else str(name))
    return found


def nest(tensors: Tensors) -> dict[str, Any]:
    """Return tensors by name, with a list for `name/0`, `name/1`, ..."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        head, _, index = name.partition("/")
        if index:
            found.setdefault(head, {})[int(index)] = tensor
        else:
            found[name] = tensor
    return {name: [part[key] for key in sorted(part)] if isinstance(part, dict) else part for name, part in found.items()}


def folder_of(name: str, case: str = "") -> pathlib.Path | None:
    """Return the committed folder with a case, else the one beside the repository, else None."""
    for root in (COMMITTED, BESIDE):
        if (root / name).is_dir() and (not case or case in cases_of(root / name)):
            return root / name
    return None


def cases_of(folder: pathlib.Path) -> list[str]:
    """Return the cases of a folder; none where it is absent."""
    if not folder.is_dir():
        return []
    with safe_open(folder / "io.safetensors", "pt") as file:
        return sorted({key.split("/")[0] for key in list(file.keys())})


def golden(name: str, case: str = "") -> Golden:
    """One folder of goldens, or a skipped test where it is not committed and absent."""
    folder = folder_of(name, case)
    if folder is None:
        assert name not in NAMES, f"tests/goldens/{name} is absent or lacks {case!r}: tests/goldens/make.py makes it"
        pytest.skip(f"the goldens of {name} are absent: ../shared/goldens")
    return Golden(folder)


def case_names(*names: str) -> list[Any]:
    """The cases of some folders as parameters of a test; one that says it is absent where there is none."""
    found = []
    for name in names:
        cases = sorted({*cases_of(COMMITTED / name), *cases_of(BESIDE / name)})
        found += [pytest.param(name, case, id=f"{name}-{case}") for case in cases]
        if not cases:
            found.append(pytest.param(name, "", id=f"{name}-absent"))
    return found


def assert_outputs(reader: Golden, case: str, outputs: dict[str, Any]) -> None:
    """Outputs against the float64 ones; where the reference kept only float32, against those."""
    wanted, exact = reader.outputs(case), reader.part(case, "out64")
    found = {name: tensor for name, tensor in flatten(outputs).items() if name in wanted}
    assert len(found) >= len(outputs) > 0
    for name, tensor in found.items():
        assert tensor.shape == wanted[name].shape, name
        distance = (tensor.detach().double() - wanted[name].double()).abs().max()
        assert distance < (EXACT if name in exact else 5e-5), f"{name}: {distance}"


def assert_gradients(reader: Golden, case: str, outputs: dict[str, Any], weights: Tensors) -> None:
    """Gradients of the golden's scalar loss with respect to all weights that it kept, by its own names."""
    wanted = reader.part(case, "grad64")
    assert wanted and wanted.keys() <= weights.keys()
    found = torch.autograd.grad(reader.loss(case, outputs), [weights[name] for name in wanted])
    for (name, gradient), mine in zip(wanted.items(), found, strict=True):
        assert (mine - gradient).abs().max() < EXACT * max(1.0, gradient.abs().max()), name


def memories(output: Any, length: int) -> list[torch.Tensor]:
    """The valid slots of each layer, time first as both implementations keep them."""
    hidden = output.memory.hidden
    assert output.memory.length.tolist() == [length] * hidden.shape[0]
    return [hidden[:, layer, hidden.shape[2] - length :].transpose(0, 1) for layer in range(2)]
