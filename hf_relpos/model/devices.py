"""Moves between devices, for models whose parts are on several.

accelerate moves the tensors among the arguments of a part that it placed, also in tuples, lists and dicts, and calls `to` of what else
has such a method. So what layers are handed has one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import fields
from dataclasses import is_dataclass
from dataclasses import replace
from typing import Any

import torch


def to_device(value: Any, device: torch.device | str | int) -> Any:
    """Return a value with all tensors in it on a device; the value itself where they are there already."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return _rebuild(value, value, device, dict)
    if isinstance(value, tuple | list):
        kind: Any = type(value)
        make = getattr(kind, "_make", kind)  # a named tuple takes its parts one by one
        return _rebuild(value, dict(enumerate(value)), device, lambda parts: make(parts.values()))
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return _rebuild(value, parts, device, lambda parts: replace(value, **parts))
    return value


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products on a device keep the precision of what is given, also under autocast."""
    able = torch.amp.is_autocast_available(device.type)  # not on `meta`, where nothing is computed
    return torch.autocast(device.type, enabled=False) if able else nullcontext()


def _rebuild(value: Any, parts: dict[Any, Any], device: Any, make: Callable[[dict[Any, Any]], Any]) -> Any:
    """Make a value anew from its parts on a device, unless all of them are there."""
    moved, same = {}, True
    for name, part in parts.items():
        moved[name] = to_device(part, device)
        same = same and moved[name] is part
    return value if same else make(moved)


class Movable:
    """Gives a dataclass the method that accelerate looks for."""

    def to(self, device: torch.device | str | int, **_: Any) -> Any:
        """Return the same with all tensors on a device."""
        return to_device(self, device)
