"""The position numbers of cached tokens, where the caller gives `position_ids`.

They stand in a layer of their own behind those of the model, as keys of one head and one channel: so whatever reorders, crops,
repeats, slides or resets a cache does the same to them. A cache whose tokens are counted has no such layer.
"""

from copy import copy
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.cache_utils import DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.cache_utils import EncoderDecoderCache
from transformers.cache_utils import StaticLayer
from transformers.cache_utils import StaticSlidingWindowLayer

from .position_documents import whole_numbers
from .positions import Positions

_KINDS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
"""Layers that keep what they are given; beside any other, one that quantises for instance, numbers stand in the first."""


def seen_so_far(cache: Cache, sequence: int) -> tuple[int | torch.Tensor, int, int]:
    """Return how many tokens a cache has seen, the number of keys of a pass over `sequence` new ones, and what stands before the keys.

    transformers' exporters let a layer that slides report the tokens that it kept as all there were. Those that it had dropped before
    are counted here, so that an exported step numbers its tokens, and reads its mask, as this one does.
    """
    seen, (keys, before) = cache.get_seq_length(), cache.get_mask_sizes(sequence, 0)
    first: Any = next(iter(getattr(cache, "layers", [])), None)
    if torch.compiler.is_exporting() and isinstance(first, DynamicSlidingWindowLayer) and not before:
        before = max(first.cumulative_length - first.sliding_window + 1, 0)
        seen = seen + before
    return seen, keys, before


def append_position_ids(
    cache: Cache | EncoderDecoderCache | None, position_ids: torch.Tensor | None, shape: tuple[int, int], layers: int
) -> torch.Tensor | None:
    """Join the numbers of cached tokens to those of the new ones, which `remember_position_ids` appends once the pass is through.

    Args:
        cache: the cache of this pass; None without one.
        position_ids: what the caller gave; where it numbers cached tokens too, those are known already.
        shape: batch size and number of new tokens.
        layers: number of layers of the model.

    Returns:
        `(batch, key)` where the cache knows the numbers of its tokens, else `position_ids` as given.

    Raises:
        ValueError: new tokens are to be counted on behind cached ones that were numbered.
    """
    own, known = _numbers(cache, layers)
    if known is None:
        return position_ids
    past = own.get_seq_length()
    if known.get_seq_length() == 0 or (position_ids is None and past == 0):
        del own.layers[layers:]  # emptied since
        return position_ids
    if position_ids is None:
        raise ValueError(
            f"the cached tokens were numbered by position_ids: give position_ids of the {shape[1]} new tokens too, or of all tokens"
        )
    if not whole_numbers(position_ids):
        return position_ids  # which `build_positions` then refuses
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids
    length, sequence = position_ids.shape[-1], shape[1]
    fits = length == sequence or length in (past + sequence, own.get_mask_sizes(sequence, 0)[0])
    if not fits or position_ids.shape[0] not in (1, shape[0]):
        return position_ids  # likewise
    if length != sequence:
        first = int(past) if length >= past + sequence else length - sequence
        position_ids = position_ids[:, first : first + sequence]
    numbers = _as_keys(position_ids, shape[0])
    # Compiled code copies no layer: there, a call is refused before it runs.
    layer = known if torch.compiler.is_compiling() else _copy(known)
    return layer.update(numbers, numbers)[0][:, 0, :, 0]


def remember_position_ids(cache: Cache | EncoderDecoderCache | None, positions: Positions, layers: int) -> None:
    """Keep the position ids of a pass that went through: those of all tokens, after the first pass that was given any."""
    own, known = _numbers(cache, layers)
    if known is not None and not torch.compiler.is_compiling():
        new = _as_keys(positions.query, known.keys.shape[0])
        known.update(new, new)
    if own is None or known is not None or positions.contiguous:
        return
    first = own.layers[0]
    slots = getattr(first, "max_cache_len", None)
    sizes = {"max_cache_len": slots, "sliding_window": getattr(first, "sliding_window", slots)}
    layer: Any = type(first)(**sizes) if type(first) in _KINDS else DynamicLayer()
    if getattr(first, "record_past", False):
        layer.activate_past_recording()
    tokens = int(positions.start) + positions.query.shape[1]
    numbers = _as_keys(positions.key[:, :tokens], first.keys.shape[0])
    layer.update(numbers, numbers)
    own.layers.append(layer)


def _numbers(cache: Cache | EncoderDecoderCache | None, layers: int) -> tuple[Any, Any]:
    """Return the cache that holds the decoder's own tokens, and its layer of position ids; None for each that is missing."""
    own: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return own, None if own is None or len(own.layers) <= layers else own.layers[layers]


def _copy(layer: Any) -> Any:
    """Return a layer of a cache that holds the same and may change alone."""
    twin = copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, value.clone())
    return twin


def _as_keys(numbers: torch.Tensor, batch: int) -> torch.Tensor:
    """Return position ids `(batch|1, length)` in the shape of keys, `(batch, 1, length, 1)`."""
    return numbers.expand(batch, -1)[:, None, :, None]
