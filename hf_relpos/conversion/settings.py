"""The configuration of a source, read field by field, so that what was not read can be told."""

from collections.abc import Sequence
from typing import Any

from transformers import CONFIG_MAPPING
from transformers import PreTrainedConfig

_COMMON = set(PreTrainedConfig().to_dict()) | {
    "model_type", "head_dim", "use_cache", "torch_dtype", "auto_map", "is_decoder", "initializer_factor",
    "feed_forward_proj", "pretraining_tp", "slow_but_exact",
}  # fmt: skip
"""Fields that do not bear on what a model computes, that every conversion settles, or that others follow from."""


class Settings:
    """A configuration of transformers, or its fields; fields that only an older transformers knew are kept too.

    Args:
        source: the kind of checkpoint, for messages.
        config: the configuration, or the content of `config.json`.
    """

    def __init__(self, source: str, config: PreTrainedConfig | dict[str, Any]) -> None:
        self.source = source
        if isinstance(config, dict) and (kind := str(config.get("model_type", source))) in CONFIG_MAPPING:
            config = CONFIG_MAPPING[kind].from_dict(dict(config))
        self._config = config
        self._values: dict[str, Any] = config if isinstance(config, dict) else config.to_dict()
        self._read: set[str] = set()

    def __call__(self, name: str, *default: Any) -> Any:
        """Return a field, or the default where there is none.

        Raises:
            ValueError: there is neither.
        """
        names = getattr(self._config, "attribute_map", {})
        self._read |= {name, names.get(name, name)}
        found = self._values.get(name) if isinstance(self._config, dict) else getattr(self._config, name, None)
        if found is None and not default:
            raise ValueError(f"{self.source}: the configuration has no {name}")
        return default[0] if found is None else found

    def require(self, name: str, allowed: Sequence[Any], reason: str) -> None:
        """Refuse a value that cannot be represented; an absent field is taken for the first one allowed.

        Raises:
            ValueError: names the field, its value, the reason and what is allowed.
        """
        value = self(name, allowed[0])
        if value not in allowed:
            listed = " or ".join(repr(choice) for choice in allowed)
            raise ValueError(f"{self.source}: {name}={value!r} cannot be converted: {reason}; only {listed} can")

    def common(self) -> dict[str, Any]:
        """Return the fields that mean the same here."""
        fields = {name: self(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            fields[name] = self(name, None)
        for name in ("initializer_range", "tie_word_embeddings", "max_position_embeddings"):
            if (value := self(name, None)) not in (None, -1):  # XLNet has -1 positions: no bound
                fields[name] = value
        return fields

    @property
    def architectures(self) -> list[str]:
        """Return the model classes that the checkpoint was saved from, as far as it says."""
        return list(self("architectures", []))

    @property
    def unread(self) -> list[str]:
        """Return the fields that nothing was made of."""
        return sorted(set(self._values) - self._read - _COMMON)
