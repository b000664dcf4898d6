"""Whether the weights that something was made by are still as they were."""

import torch
from torch import nn

Mark = tuple[torch.Tensor, int, int]
"""A tensor, how often it was written to, and where it lies."""

_PLAIN = (torch.Tensor, nn.Parameter)


def mark_weights(*modules: nn.Module) -> list[Mark] | None:
    """Return the tensors of modules and the state that they are in; None where that cannot be told.

    A tensor on no device is loaded only for the call (accelerate's offloading); inference tensors do not count what is written to
    them; and those of some quantised formats have no place.
    """
    marks = []
    for part in (part for module in modules for part in module.modules()):
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is None:
                continue
            if tensor.is_meta or tensor.is_inference() or type(tensor) not in _PLAIN:
                return None
            marks.append((tensor, tensor._version, tensor.data_ptr()))
    return marks


def same_weights(before: list[Mark], now: list[Mark]) -> bool:
    """Return whether two lists name the same tensors in the same state."""
    return len(before) == len(now) and all(
        old is new and past == version and here == place
        for (old, past, here), (new, version, place) in zip(before, now, strict=True)
    )
