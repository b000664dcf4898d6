"""Sliding caches and padding.

A cache that slides keeps the keys of as many places as the window is wide; a window shows as many tokens, padding not counted. Where
padding follows tokens, it takes places that the window still needs. Then a cache keeps all keys, or what it lacks is refused.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.cache_utils import DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer

from .positions import known

_REMEDY = (
    "a sliding cache counts padding, so that it lacks keys that sliding_window={window} shows: pad on the left, or give a cache that "
    "keeps all keys, cache=DynamicCache()"
)


def pads_after_tokens(attention_mask: torch.Tensor) -> bool:
    """Return whether `(batch, length)` is known to have padding behind a token in any row."""
    valid = attention_mask.bool()
    return known((valid[:, :-1] & ~valid[:, 1:]).any()) is True


def keep_all_keys(cache: Cache | None, attention_mask: Any, new: int) -> None:
    """Let a dynamic cache that slides keep all keys from now on, where padding follows tokens.

    Layers that have dropped keys by now stay as they are; `drop_keys` then decides.

    Args:
        cache: of the pass; None without one.
        attention_mask: of the pass; only one of two dimensions tells of padding.
        new: number of new tokens.
    """
    layers = getattr(cache, "layers", [])
    sliding = [index for index, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer]
    if not sliding or not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        return
    if any(layers[index].cumulative_length >= layers[index].sliding_window for index in sliding):
        return
    if not pads_after_tokens(attention_mask[:, : layers[sliding[0]].cumulative_length + new]):
        return
    for index in sliding:
        slid, layers[index] = layers[index], DynamicLayer()
        if slid.is_initialized:
            layers[index].update(slid.keys, slid.values)


def drop_keys(
    valid: torch.Tensor, gaps: torch.Tensor | None, queries: slice, dropped: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `valid` and `gaps` of the keys that are still in a cache, `(batch, length - dropped)`.

    Args:
        valid: `(batch, length)` False for padding.
        gaps: `(batch, length)` padding between the first token of a row and each key (`padding_between`).
        queries: which of them are the queries.
        dropped: how many of the first are no longer in the cache.
        window: number of tokens that a query sees, itself included; None for all.

    Raises:
        ValueError: a query would see a key that was dropped, because padding took its place.
    """
    if gaps is None:
        return valid[:, dropped:], None
    if window is not None:
        place = torch.arange(valid.shape[1], device=valid.device) - gaps
        last = place[:, :dropped].masked_fill(~valid[:, :dropped], -window).amax(1)
        first = place[:, queries].masked_fill(~valid[:, queries], valid.shape[1] + window).amin(1)
        if known((first - last < window).any()):
            raise ValueError("padding follows tokens: " + _REMEDY.format(window=window))
    return valid[:, dropped:], gaps[:, dropped:]


def check_static_cache(cache: Any, attention_mask: torch.Tensor, window: int | None) -> None:
    """Refuse, by a ValueError, to generate behind padding that follows tokens in a static cache that slides: it cannot grow."""
    slides = any(
        getattr(layer, "is_sliding", False) and layer.max_cache_len == window for layer in getattr(cache, "layers", [])
    )
    if window is not None and slides and pads_after_tokens(attention_mask):
        raise ValueError("padding follows tokens in the prompt: " + _REMEDY.format(window=window))
