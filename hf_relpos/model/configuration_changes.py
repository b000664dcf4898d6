"""Fields that are given beside a saved configuration: what follows from them follows anew."""

from typing import Any

from transformers.utils import logging

from .scheme_registry import carry_parameters

logger = logging.get_logger(__name__)

FOLLOWS: dict[str, tuple[str, ...]] = {
    "head_dim": ("hidden_size", "num_attention_heads"),
    "num_key_value_heads": ("num_attention_heads",),
    "intermediate_size": ("hidden_size",),
    "scale_embedding": ("position_scheme",),
    "sliding_window": ("mem_len",),
    "num_decoder_layers": ("num_hidden_layers",),
    "decoder_start_token_id": ("pad_token_id", "bos_token_id"),
    "encoder_position_scheme": ("position_scheme",),
    "decoder_position_scheme": ("position_scheme",),
    "encoder_position_parameters": ("position_scheme", "position_parameters", "encoder_position_scheme"),
    "decoder_position_parameters": ("position_scheme", "position_parameters", "decoder_position_scheme"),
}
"""Fields that are derived when they are left out, each with those that it is derived from."""


def merge_fields(kind: Any, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved configuration with others in their place.

    A saved field that is what would have been derived counts as derived, and follows the given ones; any other stays as it was.
    Parameters of position schemes stay with the schemes that the model still has.

    Args:
        kind: the class of the configuration.
        saved: the fields of its file.
        given: the fields that take their places.
    """
    own = {name: value for name, value in saved.items() if name in kind.__dataclass_fields__}
    before = vars(kind(**own))
    following = {name for name, sources in FOLLOWS.items() if name in own and not given.keys().isdisjoint(sources)}
    kept = {name: value for name, value in saved.items() if name not in following or not _is_derived(kind, own, name)}
    for side in ("", "encoder_", "decoder_"):
        scheme, parameters = f"{side}position_scheme", f"{side}position_parameters"
        old = before.get(scheme)
        new = given.get(scheme, old)
        if scheme in own and new != old:
            logger.warning_once(
                f"{scheme}={new!r} takes the place of {old!r}, with which the model was trained: weights of "
                "positions that it does not have yet begin anew, all others are kept. Train further before you use the model."
            )
        if isinstance(given.get(scheme), str | list) and parameters in kept:
            kept[parameters] = carry_parameters(before[scheme], before[parameters], given[scheme])
        if parameters in given and new == old and (given[parameters] or {}) != (before.get(parameters) or {}):
            logger.warning_once(
                f"{parameters}={given[parameters]!r} take the place of {before[parameters]!r}, with which {before[scheme]!r} was "
                "trained: tables of the same size keep what they have learned, which may now mean something else; tables of "
                "another size begin anew. Train further before you use the model."
            )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if name in given and name in own and given[name] != own[name]:
            logger.warning_once(
                f"{name}={given[name]!r} takes the place of {own[name]!r}: projections that keep their size are cut into other heads "
                "than those that were trained. Train further before you use the model."
            )
    return kept | given


def _is_derived(kind: Any, fields: dict[str, Any], name: str) -> bool:
    """Return whether a field is as it would be if it had been left out."""
    try:
        return vars(kind(**{other: value for other, value in fields.items() if other != name}))[name] == fields[name]
    except ValueError:
        return False
