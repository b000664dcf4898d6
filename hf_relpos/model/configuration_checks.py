"""Check configurations: numbers within bounds, heads that divide, and names that are nearly those of fields."""

import math
from dataclasses import fields
from difflib import get_close_matches
from types import UnionType
from typing import Any
from typing import Union
from typing import get_args
from typing import get_origin

from transformers.utils import logging

logger = logging.get_logger(__name__)

SIZE, TOKENS = 2**24, 2**31 - 1
"""The largest size of a vector, and the largest number of tokens."""
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("num_hidden_layers", "num_decoder_layers", "num_attention_heads", "num_key_value_heads"), (1, 2**16)),
    **dict.fromkeys(("hidden_size", "head_dim", "intermediate_size", "embedding_size"), (1, SIZE)),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), (1, TOKENS)),
    "type_vocab_size": (0, SIZE),
    "mem_len": (0, TOKENS),
    "sliding_window": (2, TOKENS),
    "reuse_len": (1, TOKENS),
    "div_val": (1, SIZE),
    "initializer_range": (0, 1e3),
    "layer_norm_eps": (1e-38, 1),
}
"""The least and the largest number that a field may have, if it has one."""
LEAST = {
    "mem_len": "0 (no memory) or more",
    "sliding_window": "at least 2 (the query and one key before it) or None",
    "reuse_len": "at least 1, or None for all tokens",
}
"""What is allowed, where the least number has a meaning of its own."""


def check_numbers(values: dict[str, Any]) -> None:
    """Refuse, by a ValueError, a number out of bounds."""
    for name, (least, largest) in BOUNDS.items():
        number = values.get(name)
        if isinstance(number, int | float) and not least <= number <= largest:
            allowed = f"at most {largest}" if number > largest else LEAST.get(name, f"at least {least}")
            raise ValueError(f"{name}={number} must be {allowed}")
    for name in ("hidden_dropout", "attention_dropout", "classifier_dropout"):
        if (share := values.get(name)) is not None and not 0 <= share < 1:
            raise ValueError(f"{name}={share} must be at least 0 and below 1")


def complete_heads(config: Any) -> None:
    """Derive the head size and the number of key and value heads, or refuse numbers that do not divide."""
    size, heads = config.hidden_size, config.num_attention_heads
    if config.head_dim is None:
        if size % heads:
            small = [number for number in range(1, math.isqrt(size) + 1) if size % number == 0]
            divisors = sorted({*small, *(size // number for number in small)})
            raise ValueError(
                f"num_attention_heads={heads} does not divide hidden_size={size}; it may be one of {divisors}, or give head_dim"
            )
        config.head_dim = size // heads
    if config.num_key_value_heads is None:
        config.num_key_value_heads = heads
    if heads % config.num_key_value_heads:
        raise ValueError(f"num_key_value_heads={config.num_key_value_heads} does not divide {heads} heads")


def refuse_misspelled(config: Any, keywords: dict[str, Any], families: set[str]) -> None:
    """Refuse a keyword that is nearly a field, or one of another family; others are kept, as transformers does.

    A saved file, which names the transformers that wrote it, must load again whatever was set before: there a warning does.

    Args:
        config: the configuration that they were given to.
        keywords: what none of its fields took.
        families: the names of the fields of all families.
    """
    names = [field.name for field in fields(config)]
    foreign = families - {*names, "use_cache"}  # which Trainer sets in every configuration
    for keyword, value in keywords.items():
        close = get_close_matches(keyword, names, n=2, cutoff=0.8)
        if (close or value and keyword in foreign) and keyword not in names:
            meant = "it is one of another family" if keyword in foreign else f"did you mean {' or '.join(map(repr, close))}?"
            message = f"unknown field {keyword!r} of {type(config).__name__}; {meant}"
            if config.transformers_version is None:
                raise ValueError(message)
            logger.warning(message)


def exact_fields(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return fields that were read from text with each number in the type of its field, where that changes nothing.

    So `1e3`, which a reader takes for a float or for a word, counts as the whole number 1000, and 1 as a float.

    Args:
        kind: the class of the configuration.
        given: fields by their names; those that it does not have stay as they are.

    Raises:
        ValueError: another value for a number, or for true and false; names the field, the value and what is allowed.
    """
    types = {field.name: field.type for field in fields(kind)}
    return {name: _exact(name, value, types[name]) if name in types else value for name, value in given.items()}


def _exact(name: str, value: Any, annotation: Any) -> Any:
    allowed = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    numbers = [kind for kind in (int, float) if kind in allowed]
    if isinstance(value, list) and list[int] in allowed:
        return [_exact(name, item, int) for item in value]
    chosen = [choice for kind in allowed for choice in get_args(kind)]
    if value is None or str in allowed or not {*numbers, bool} & {*allowed} or type(value) in allowed or value in chosen:
        return value
    if numbers and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
            if float in numbers:
                return number
            if number.is_integer() and (isinstance(value, str) or number == value):
                return int(number)
        except (ValueError, OverflowError):
            pass
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    known = [words[kind] for kind in (numbers[-1:] or []) + [bool] * (bool in allowed)]
    known += [repr(choice) for choice in chosen if isinstance(choice, str)] + ["null"] * (type(None) in allowed)
    raise ValueError(f"{name}={value!r} is not allowed: {' or '.join(known)}")
