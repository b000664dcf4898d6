"""The command line of `train_lm.py`: one spelling a flag, in groups, with a help that fits what is asked."""

import argparse
import dataclasses
import re
from typing import Any
from typing import get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

ABOUT = "Train and evaluate a causal or masked language model. Any argument may also stand in the YAML file; the command line wins."
USAGE = "%(prog)s [CONFIG.yaml] [--argument value ...]"
EXAMPLES = """examples:
  python train_lm.py configs/default.yaml
      train the default decoder on the Python library's own sources
  python train_lm.py configs/decoder_rope.yaml --train_file my_texts/ --output_dir runs/mine
      train on your own text: files, folders or patterns (txt, jsonl, csv, parquet)
  python train_lm.py configs/decoder_t5.yaml --config_overrides hidden_size=128,num_hidden_layers=4 --max_steps 500
      train a smaller model, for a shorter time
  python train_lm.py configs/default.yaml --resume_from_checkpoint auto
      go on with a run that was interrupted, from its last checkpoint
  python train_lm.py --model_name_or_path runs/default --train_file more.txt --output_dir runs/more --max_steps 200
      go on from a trained model with another text
  python train_lm.py configs/default.yaml --push_to_hub --hub_model_id me/my-model
      publish the model, its tokenizer, its code and its card
"""

# Titles, and how the names of their arguments begin; the first that fits holds. Models and text have groups of their own.
GROUPS = {
    "run": "output_dir overwrite_output_dir resume_from_checkpoint do_ seed data_seed full_determinism sample_ run_name ignore_data",
    "length and batches": "max_steps num_train_epochs per_device_train gradient_accum lane_groups auto_find train_sampling",
    "optimizer and learning rate": "learning_rate muon_ position_learning lr_ warmup_ optim weight_decay adam_ max_grad label_smooth",
    "evaluation and the best model": "eval_ per_device_eval load_best metric_for greater_is batch_eval include_for prediction_loss",
    "checkpoints": "save_ enable_jit restore_callback",
    "precision, speed and memory": "bf16 fp16 tf32 use_cpu torch_ activation_ gradient_check use_liger liger_ use_cache",
    "logs": "log report_to disable_tqdm project trackio include_num skip_memory",
    "the Hub": "push_to_hub hub_",
    "data loading": "dataloader_ remove_unused label_names length_column",
    "several processes and devices": "ddp_ fsdp deepspeed accelerator parallelism local_rank average_tokens",
    "other arguments of transformers' TrainingArguments": "",
}
METAVARS = {int: "N", float: "X", str: "TEXT", string_to_bool: "true|false"}
# More names than these are not listed.
MOST_CHOICES = 12


class CommandLine(HfArgumentParser):
    """Makes an argument of every field of some dataclasses.

    Args:
        dataclass_types: the dataclasses; one with `_argument_group_name` is a group of its own.
    """

    def __init__(self, dataclass_types: Any) -> None:
        self._groups: dict[str, Any] = {}
        options: dict[str, Any] = {"usage": USAGE, "description": ABOUT, "epilog": EXAMPLES, "formatter_class": _Help}
        super().__init__(dataclass_types, allow_abbrev=False, **options)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        hints = get_type_hints(dtype)
        whole = getattr(dtype, "_argument_group_name", None)
        titles = {field.name: whole or _title(field.name) for field in dataclasses.fields(dtype)}
        for title in [whole] if whole else GROUPS:
            self._groups[title] = self.add_argument_group(title)
        for field in dataclasses.fields(dtype):
            field.type = hints[field.name]
            group: Any = _Group(self._groups[titles[field.name]])
            self._parse_dataclass_field(group, field)


class _Group:
    """A group of arguments that takes the first spelling of each, and none that takes another one back."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def add_argument(self, *names: str, **options: Any) -> None:
        if names[0].startswith("--no_"):
            return
        kind, choices = options.get("type", str), options.get("choices", ())
        if len(choices) > MOST_CHOICES:
            options["metavar"] = "NAME"
        elif not choices:
            options["metavar"] = METAVARS.get(kind, "TEXT")
        if options.get("type") is int:
            options["type"] = whole_number
        self._group.add_argument(names[0], **options)


def whole_number(text: str) -> int:
    """Read a whole number, which may be written as 1e4."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"{text} is not a whole number") from None
        return int(number)


def _title(name: str) -> str:
    return next(title for title, beginnings in GROUPS.items() if name.startswith(tuple(beginnings.split() or [""])))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows the first sentence of each help, and a default where there is one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = re.split(r"(?<![ (]e\.g)\.\s+(?=[A-Z`])", " ".join((action.help or "").split()))[0]
        text = text if text.endswith("...") else text.removesuffix(".")
        known = action.default not in (None, False, "", argparse.SUPPRESS, [])
        return f"{text} (default: %(default)s)" if known and "default" not in text.lower() else text
