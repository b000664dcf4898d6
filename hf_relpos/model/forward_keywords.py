"""Keyword arguments that a forward takes without naming them.

As the models of transformers do, a forward ignores what other software hands on (`tokenizer`, `head_mask`). But what is nearly one of its
own names, or an own name of another model of this package, was meant: it is refused instead of forgotten.
"""

import warnings
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any

import torch
from transformers.utils.generic import TransformersKwargs

NAMES = {
    "input_ids", "attention_mask", "position_ids", "inputs_embeds", "token_type_ids", "memory", "reset_mask", "seq_idx",
    "perm_mask", "target_mapping", "cache", "past_key_values", "use_cache", "labels", "shift_labels", "logits_to_keep",
    "start_positions", "end_positions", "encoder_outputs", "encoder_hidden_states", "encoder_attention_mask",
    "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids",
}  # fmt: skip
"""What the forwards of this package name."""
PASSED_ON = {
    *TransformersKwargs.__optional_keys__, "use_cache", "logits_to_keep", "return_dict", "cache_position", "next_sequence_length",
} - {"position_ids", "seq_idx"}  # fmt: skip
"""What is handed to every forward, and changes nothing where it has no meaning."""
REPLACED = {
    "mems": "memory, the SegmentMemory that the last output holds where the configuration has mem_len > 0",
    "use_mems": "mem_len of the configuration: where it is above 0, a model returns a memory whenever it uses no cache",
    "past_index": "mem_len: SegmentTrainer and train_lm.py carry the memory of such a model from batch to batch",
}
"""Names of earlier transformers, and what does their work here."""


def refuse_replaced(owner: str, keywords: dict[str, Any]) -> None:
    """Refuse, by a TypeError, a keyword of earlier transformers, and say what replaced it."""
    for name, successor in REPLACED.items():
        if keywords.get(name) is not None:
            raise TypeError(f"{owner} takes no {name}; what replaced it is {successor}")


def check_keywords(owner: str, keywords: dict[str, Any], causal: bool) -> None:
    """Refuse keywords that were meant for a forward but would be forgotten. None is never refused.

    Args:
        owner: name of the method, for the message.
        keywords: what it was given beside the arguments that it names.
        causal: whether the model is; `is_causal` may only say the same.

    Raises:
        TypeError: an own name of another model, nearly an own name, or a name of earlier transformers.
        ValueError: `is_causal` contradicts the configuration.
    """
    refuse_replaced(owner, keywords)
    given = [name for name, value in keywords.items() if value is not None and name not in PASSED_ON]
    close = {name: get_close_matches(name, NAMES, n=1, cutoff=0.8) for name in given}
    unknown = [f"{name} (did you mean {found[0]}?)" if found[0] != name else name for name, found in close.items() if found]
    if unknown:
        raise TypeError(f"{owner} got unknown arguments: {', '.join(unknown)}")
    if keywords.get("is_causal") not in (None, causal):
        raise ValueError(f"is_causal={keywords['is_causal']} contradicts the model, which is {'' if causal else 'not '}causal")


def accept_old_cache_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward take its `cache` by the old name `past_key_values` too, and warn, as transformers does.

    Where both are given the new name counts, as in transformers; but an empty cache gives way to one that holds tokens. So the prefix
    is read that PEFT's prefix tuning hands on beside the empty cache of `generate`.
    """

    @wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        old, cache = kwargs.pop("past_key_values", None), kwargs.get("cache")
        if old is not None:
            if not torch.compiler.is_compiling():
                both = " Both are given; the one that holds tokens is used." if cache is not None else ""
                name = f"{type(self).__name__}.{forward.__name__}"
                warnings.warn(f"`past_key_values` is deprecated for `{name}`. Use `cache` instead.{both}", FutureWarning, 2)
            if cache is None or (not cache.get_seq_length() and old.get_seq_length()):
                kwargs["cache"] = old
        return forward(self, *args, **kwargs)

    return wrapper
