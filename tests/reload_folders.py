"""Run in a process of its own, where neither this package nor anything beyond torch and transformers can be imported.

For each folder below the one given on the command line, it loads the model by the Auto class that `job.json` names,
runs the saved inputs, saves the model a second time and loads that too, and writes what it found beside.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable
from importlib.machinery import BuiltinImporter
from importlib.machinery import FrozenImporter
from importlib.machinery import PathFinder
from typing import Any


class WithoutExtras(PathFinder):
    """Finds what is installed, except this package and what it does not need to load a model."""

    names = {"hf_relpos", "datasets", "evaluate", "matplotlib", "sklearn", "tensorboard", "x_transformers", "einops"}

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.split(".")[0] in cls.names else super().find_spec(fullname, path, target)


if __name__ == "__main__":
    sys.meta_path = [BuiltinImporter, FrozenImporter, WithoutExtras]

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import dynamic_module_utils  # noqa: E402


def read_code_once() -> None:
    """Let transformers look for imports once in each file of code: it does so in all of them at every save and load."""
    for name in ("get_imports", "get_relative_imports"):
        setattr(dynamic_module_utils, name, once_a_file(getattr(dynamic_module_utils, name)))


def once_a_file(look: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    """Return a function of a file that keeps its results as long as the file is the same."""
    kept: dict[tuple[str, int, int], list[str]] = {}

    def look_once(path: Any) -> list[str]:
        state = os.stat(path)
        key = str(path), state.st_mtime_ns, state.st_size
        if key not in kept:
            kept[key] = look(path)
        return list(kept[key])

    return look_once


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, non-persistent ones included."""
    named = [*model.named_parameters(), *((f"buffer {name}", tensor) for name, tensor in model.named_buffers())]
    return {name: tensor.detach().clone() for name, tensor in named}


@torch.no_grad()
def run(model: torch.nn.Module, ids: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """All tensors of a forward pass, its memory, and what `generate` makes of the same input where there is one."""
    target = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    output = model.eval()(ids, **target, **inputs)
    found = {name: value.contiguous() for name, value in output.items() if isinstance(value, torch.Tensor)}
    if output.get("memory") is not None:
        found["memory"] = output.memory.hidden.contiguous()
    if model.can_generate():
        found["generated"] = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return found


def reload(folder: pathlib.Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    auto = getattr(transformers, job["auto"])
    inputs = load_file(folder / "inputs.safetensors")
    report = {}
    for name, source in (("first", folder / "model"), ("second", folder / "again")):
        model = auto.from_pretrained(source, trust_remote_code=True)
        report[f"{name} class"] = f"{type(model).__module__}.{type(model).__name__}"
        save_file(run(model, **inputs), folder / f"{name}.safetensors")
        save_file(state_of(model), folder / f"{name}_state.safetensors")
        if name == "first":
            model.save_pretrained(folder / "again")
    for head in job["heads"]:
        model = getattr(transformers, head).from_pretrained(folder / "model", trust_remote_code=True)
        report[head] = type(model).__name__
    report["config"] = type(transformers.AutoConfig.from_pretrained(folder / "model", trust_remote_code=True)).__name__
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    read_code_once()
    for entry in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        reload(entry)
