"""Keys and values of a segment memory, projected once where no gradients run.

Behind a memory, a pass makes keys and values of the remembered hidden states and of its own. Where only the last `mem_len` of both are
remembered again, most of them are what the pass before has made already, by the same weights. So a pass without gradients leaves them
beside the memory that it returns, and they go with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from .segment_memory import SegmentMemory
from .weight_marks import Mark
from .weight_marks import mark_weights
from .weight_marks import same_weights

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys, before a scheme encodes them, and values: `(batch, kv_heads, slots, head_dim)` each."""


class MemoryProjections:
    """Keys and values of the remembered tokens, a pair a layer: those that a pass is given, and those that it leaves.

    Args:
        slots: number of slots of the memory that the pass returns.
        weights: of the projections, as they are.
        before: pairs of the slots of the memory that it is given; None where the layers are to project them.
        tables: what the passes before have kept of distances, which repeat once a memory is full.
    """

    def __init__(
        self, slots: int, weights: list[Mark], before: list[Pair] | None = None, tables: dict[Any, Any] | None = None
    ) -> None:
        self.slots = slots
        self.weights = weights
        self.before = before
        self.tables = {} if tables is None else tables
        self.after: list[Pair] = []

    def join(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Return the keys and values that a layer attends to, given those that it has made; layers come in order."""
        pair = (key, value)
        if self.before is not None:
            pair = _both(torch.cat([old, new], 2) for old, new in zip(self.before[layer], pair, strict=True))
        self.after.append(_both(_newest(part, self.slots) for part in pair))
        return pair

    def keep(self, memory: SegmentMemory) -> None:
        """Leave the pairs beside the memory that the pass returns, if that holds the last slots as they came."""
        if not memory.hidden.is_inference():
            _KEPT[memory.hidden] = _Entry(self.after, self.tables, self.weights, _state(memory.hidden))


def _both(parts: Iterable[torch.Tensor]) -> Pair:
    key, value = parts
    return key, value


def _newest(states: torch.Tensor, slots: int) -> torch.Tensor:
    """Return the last `slots` tokens, behind zeros if there are fewer: those slots are never attended to."""
    missing = slots - states.shape[2]
    return pad(states, (0, 0, missing, 0)) if missing > 0 else states[:, :, -missing:]


@dataclass(frozen=True)
class _Entry:
    """What one pass has left, and the state of all that made it."""

    pairs: list[Pair]
    tables: dict[Any, Any]
    weights: list[Mark]
    state: tuple[Any, ...]


_KEPT: Any = WeakTensorKeyDictionary()
"""What is kept, by the hidden states of a memory: it goes with them and is no part of them, so that a memory stays two tensors."""


def begin_projections(memory: SegmentMemory | None, layers: Iterable[Any], slots: int) -> MemoryProjections | None:
    """Return what a pass is given and leaves; None where it must project all itself.

    That is where gradients run, where a compiler or an exporter looks on, and where a projection is more than its weights: adapters,
    quantised formats, hooks.

    Args:
        memory: that the pass is given.
        layers: of the stack.
        slots: number of slots of the memory that it returns.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    parts = [part for layer in layers for part in (layer.attention_norm, layer.attention.k_proj, layer.attention.v_proj)]
    weights = mark_weights(*parts) if all(map(_is_plain, parts)) else None
    if weights is None:
        return None
    entry = None if memory is None or memory.hidden.is_inference() else _KEPT.get(memory.hidden)
    if memory is None or entry is None or entry.state != _state(memory.hidden) or not same_weights(entry.weights, weights):
        return MemoryProjections(slots, weights)
    return MemoryProjections(slots, weights, entry.pairs, entry.tables)


def _is_plain(module: nn.Module) -> bool:
    """Return whether what a module gives follows from its weights alone."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) in (nn.Linear, nn.LayerNorm, nn.RMSNorm) and not hooked


def _state(hidden: torch.Tensor) -> tuple[Any, ...]:
    """Return how often a memory was written to, where it lies, and in which precision a pass computes now."""
    kind = hidden.device.type
    return hidden._version, hidden.data_ptr(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
