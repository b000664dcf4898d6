"""Reads a checkpoint of transformers: a folder or a name on the Hub, one file or shards, safetensors by default."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils.hub import cached_file
from transformers.utils.hub import has_file

FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read: the content of `config.json` and all weights by name."""

    source: str
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]


def find_file(source: str, name: str) -> Path | None:
    """Return a file of a folder or of a repository on the Hub, or None when it has none of that name."""
    if Path(source).is_dir():
        return path if (path := Path(source) / name).is_file() else None
    if Path(source).is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise ValueError(f"{source} is not a folder, and a name on the Hub is 'owner/name'")
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        found = cached_file(source, name, **quiet)
    except HFValidationError as error:
        raise ValueError(f"{source} is neither a folder nor a name on the Hub") from error
    return None if found is None else Path(found)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file; a ValueError names a file that holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object, but {type(found).__name__}")
    return found


def read_checkpoint(source: str, allow_pickle: bool = False) -> Checkpoint:
    """Read the configuration and all weights.

    Args:
        source: a folder, or a name on the Hub.
        allow_pickle: read `pytorch_model.bin` where there are no safetensors; nothing but tensors is unpickled.

    Raises:
        ValueError: a file is missing or damaged, or only pickles are there and were not asked for.
    """
    config = find_file(source, "config.json")
    if config is None:
        raise ValueError(f"{source} has no config.json, or is neither a folder nor a model of the Hub within reach")
    fields = read_json(config)
    for name in (*FILES, *(PICKLES if allow_pickle else ())):
        if (path := find_file(source, name)) is not None:
            return Checkpoint(source, fields, _read_weights(source, path))
    if any(has_file(source, name) for name in PICKLES):  # which need not be fetched to say so
        raise ValueError(f"{source} holds its weights as a pickle only ({PICKLES[0]}): --allow_pickle reads it")
    raise ValueError(f"{source} has no weights: none of {', '.join((*FILES, *PICKLES))}")


def _read_weights(source: str, path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of one file, or of all files that an index names."""
    if path.suffix != ".json":
        return _read_file(path)
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{path} has no weight_map")
    weights: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(placed.values()):
        if Path(name).name != name or (shard := find_file(source, name)) is None:
            raise ValueError(f"{path.name} names the shard {name!r}, which {source} does not have")
        weights |= _read_file(shard)
    if lacking := sorted(set(placed) - set(weights)):
        raise ValueError(f"{path.name} names {len(lacking)} weights that no shard of {source} has: {lacking[:5]}")
    return weights


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged or holds more than tensors: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(weight, torch.Tensor) for weight in found.values()):
        raise ValueError(f"{path} is no dictionary of weights")
    return found
