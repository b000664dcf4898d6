"""Loads weights into a model whose names, or whose positions, are others than those of the folder."""

from dataclasses import replace
from functools import cached_property
from typing import Any

from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import PreTrainedModel

from .scheme_modules import is_numbered
from .scheme_modules import name_numbered

ANSWERS = ("classifier.", "qa_outputs.")
"""What names of the linear layer of a head for answers began with in version 0.1.0, and begin with now."""


class OldNames(WeightRenaming):
    """Renames what version 0.1.0 saved, when schemes were numbered: the folder's configuration tells which they were.

    Args:
        config: the configuration of the model, which may have other schemes.
        answers: whether the model has a head for answers, whose layer was named as those of all other heads.
        folder: where the weights come from, if from a folder or the Hub.
        options: how its files are found.
    """

    def __init__(self, config: Any, answers: bool, folder: str | None, options: Any) -> None:
        super().__init__("position_schemes.", "position_schemes.")
        self.config, self.answers, self.folder, self.options = config, answers, folder, options or {}

    @cached_property
    def saved(self) -> Any:
        """Return the configuration that the weights were saved with, which is read only for folders with old names."""
        return self.config if self.folder is None else type(self.config).from_pretrained(self.folder, **self.options)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name of today, without the pattern that would make transformers save by the old name again."""
        if self.answers and source_key.startswith(ANSWERS[0]):
            heads = self.saved.architectures or ()
            if self.folder is None or any(head.endswith("QuestionAnswering") for head in heads):
                return source_key.replace(*ANSWERS), None
        if not is_numbered(source_key):
            return source_key, None
        *_, last = stacks = self.saved.stacks()
        return name_numbered(source_key, stacks[0] if "encoder." in source_key else last), None


class WeightLoading:
    """Loads weights of positions in `from_pretrained`: those of another scheme, layer or size are new, and listed."""

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights, those with old names too."""
        answers = hasattr(model, ANSWERS[1][:-1])
        renaming = OldNames(model.config, answers, load_config.pretrained_model_name_or_path, load_config.download_kwargs)
        load_config = replace(load_config, weight_mapping=[*(load_config.weight_mapping or []), renaming])
        return PreTrainedModel._load_pretrained_model(model, state_dict, files, load_config, *args, **kwargs)

    @staticmethod
    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        """Fill what is new, and report it; a table of positions that changed its size is new, like one that is missing."""
        if all("position_schemes." in name for name, *_ in loading_info.mismatched_keys):
            load_config = replace(load_config, ignore_mismatched_sizes=True)
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)


def rename_numbered(stack: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Rename the position weights of a stack before `load_state_dict`, which resumes training, where they have old names."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}position_schemes.") and is_numbered(name)]:
        state_dict[name_numbered(name, stack.config)] = state_dict.pop(name)


def rename_answers(head: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Rename the linear layer of a head for answers before `load_state_dict`, where it has its old name."""
    for name in [name for name in state_dict if name.startswith(prefix + ANSWERS[0])]:
        state_dict[prefix + name.removeprefix(prefix).replace(*ANSWERS)] = state_dict.pop(name)
