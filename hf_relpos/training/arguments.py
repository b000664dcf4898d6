"""The arguments of `train_lm.py`: three dataclasses, read from a YAML file and the command line.

Names are those of transformers' `run_clm` and `run_mlm` where the meaning is the same. Any argument may stand in the
YAML; the command line wins. A YAML file may name a `base:` (a path relative to itself) whose values it inherits.
"""

import argparse
import json
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any
from typing import ClassVar

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import is_tensorboard_available
from transformers.trainer_utils import SchedulerType

from hf_relpos.training.best_model import greater_is_better
from hf_relpos.training.command_line import CommandLine
from hf_relpos.training.settings_file import parse_list
from hf_relpos.training.settings_file import parse_mapping
from hf_relpos.training.settings_file import read_yaml
from hf_relpos.training.settings_file import refuse_unknown


def argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """The model: a new one from its configuration, or a folder to start from."""

    _argument_group_name: ClassVar[str] = "model"

    model_name_or_path: str | None = argument(None, "Folder or Hub name to start from instead of a new model.")
    model_type: str = argument("relpos_decoder", "Family of a new model: relpos_decoder or relpos_encoder.")
    position_scheme: str | None = argument(None, "Name of the position scheme, or a JSON list with one name a layer.")
    position_parameters: str | None = argument(None, "The scheme's own parameters, as JSON.")
    share_positions: str | None = argument(None, "'layer' or 'model': who owns a set of position parameters.")
    mem_len: int | None = argument(None, "Tokens of segment memory; 0 turns it off.")
    config_overrides: str | None = argument(
        None, "Other fields of the configuration: hidden_size=128,... or JSON; added to those of the YAML."
    )
    attn_implementation: str | None = argument(None, "Attention backend: eager, sdpa, flex_attention, ...")

    def config_fields(self) -> dict[str, Any]:
        """Return the configuration fields that were asked for."""
        scheme = self.position_scheme
        named = {
            "position_scheme": parse_list("position_scheme", scheme) if scheme and scheme.startswith("[") else scheme,
            "position_parameters": parse_mapping("position_parameters", self.position_parameters) or None,
            "share_positions": self.share_positions,
            "mem_len": self.mem_len,
        }
        given = {name: value for name, value in named.items() if value is not None}
        return parse_mapping("config_overrides", self.config_overrides) | given


@dataclass
class DataArguments:
    """The text, and how it is cut into tokens and blocks."""

    _argument_group_name: ClassVar[str] = "text"

    dataset_name: str | None = argument(
        None, "'stdlib' (the Python library's own sources; the default without files) or a dataset of the Hub."
    )
    dataset_config_name: str | None = argument(None, "Configuration of the Hub dataset.")
    train_file: list[str] | None = argument(None, "Text, jsonl, csv or parquet: files, folders or glob patterns.")
    validation_file: list[str] | None = argument(None, "Text to evaluate on, given like train_file.")
    test_file: list[str] | None = argument(None, "Text for the last evaluation, given like train_file.")
    text_column: str = argument("text", "Column of jsonl, csv, parquet or Hub data that holds the documents.")
    streaming: bool = argument(False, "Read train_file or the Hub dataset while training, not before it.")
    validation_split_percentage: float = argument(5.0, "Share of the training text taken when none is given.")
    tokenizer_name: str | None = argument(
        None, "'byte', 'bpe' (learned from the training text) or a tokenizer to load; default: the model's, or 'byte'."
    )
    vocab_size: int = argument(4096, "Vocabulary of the tokenizer 'bpe'.")
    block_size: int | None = argument(None, "Tokens in a block; default: what the model was trained with, or 256.")
    mlm_probability: float = argument(0.15, "Share of the tokens that a masked language model must fill in.")
    max_train_samples: int | None = argument(None, "Use only the first blocks for training.")
    max_eval_samples: int | None = argument(None, "Use only the first blocks for evaluation.")
    preprocessing_num_workers: int | None = argument(None, "Processes that tokenize.")


@dataclass
class RunArguments(TrainingArguments):
    """transformers' TrainingArguments with this project's defaults, and what it adds."""

    do_train: bool = argument(False, "Train; without any do_..., a run trains, evaluates and predicts.")
    do_eval: bool = argument(False, "Evaluate on the validation text, the model of the folder if nothing is trained.")
    do_predict: bool = argument(False, "Evaluate on the test text too.")
    max_steps: int = argument(-1, "Steps to train; -1 trains for num_train_epochs.")
    resume_from_checkpoint: str | None = argument(
        None, "Go on from a checkpoint: its folder, true (the last whole one) or auto (the last one, if there is any)."
    )
    metric_for_best_model: str | None = argument(
        None, "What load_best_model_at_end goes by: loss (the default), perplexity, bits_per_byte or accuracy."
    )
    greater_is_better: bool | None = argument(None, "Follows from metric_for_best_model.")
    output_dir: str = argument("runs/default", "Folder of the run; with a YAML file, runs/NAME of that file.")
    remove_unused_columns: bool = argument(False, "Drop columns that the model's forward does not name.")
    dataloader_pin_memory: bool = argument(torch.accelerator.is_available(), "Pin the memory of batches.")
    report_to: str = argument(
        "tensorboard" if is_tensorboard_available() else "none", "Where to log: tensorboard, wandb, ..., all or none."
    )
    push_to_hub: bool = argument(False, "Publish model, tokenizer, code and card, and nothing else, after training.")
    hub_model_id: str | None = argument(None, "Name on the Hub: me/my-model; default: that of output_dir.")
    hub_strategy: str = argument("end", "When to publish: end, every_save (without a card), checkpoint or all_checkpoints.")
    overwrite_output_dir: bool = argument(False, "Start afresh in an output_dir that holds another run.")
    muon_learning_rate: float | None = argument(
        None, "Train the matrices of the layers by Muon at this learning rate; the rest by AdamW at learning_rate."
    )
    position_learning_rate: float | None = argument(
        None, "Learning rate of the tables of position schemes; default: learning_rate."
    )
    lane_groups: int = argument(
        1, "With mem_len: groups of lanes that take turns, so that neighbouring steps read different texts."
    )
    bf16_if_fast: bool = argument(False, "bf16 autocast, where the processor computes in it; else float32.")
    sample_prompt: str | None = argument(None, "Text to continue after training; default: from the validation text.")
    sample_tokens: int = argument(200, "Tokens to sample after training; 0 turns the sample off.")

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.bf16 = self.bf16 or (self.bf16_if_fast and not self.fp16 and computes_bf16())
        if self.greater_is_better is None and self.metric_for_best_model:
            self.greater_is_better = greater_is_better(self.metric_for_best_model)
        super().__post_init__()
        if self.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY):  # they watch the same metric
            given: Any = self.lr_scheduler_kwargs or {}
            self.lr_scheduler_kwargs = {"mode": "max" if self.greater_is_better else "min"} | given


def computes_bf16() -> bool:
    """Return whether this machine multiplies in bfloat16 natively: otherwise it is emulated, and slower than float32."""
    if torch.accelerator.is_available():
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    asked: Any = getattr(torch.cpu, "get_capabilities", dict)  # an old torch does not tell: then float32 it is
    able = asked()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))


def parse_arguments(argv: list[str]) -> tuple[ModelArguments, DataArguments, RunArguments]:
    """Read the arguments of a run.

    Args:
        argv: the command line; its first word may be a YAML file.

    Returns:
        The three groups of arguments. Without any of do_train, do_eval and do_predict, all three are done.
    """
    groups: Any = (ModelArguments, DataArguments, RunArguments)
    parser = CommandLine(groups)
    allowed = [action.dest for action in parser._actions]
    config_file, argv = _take_config_file(argv)
    settings = read_yaml(config_file) if config_file else {}
    refuse_unknown(settings, allowed, where=f"{config_file}: ")
    overrides = parse_mapping("config_overrides", settings.pop("config_overrides", None))

    tokens = ["--output_dir", f"runs/{Path(config_file).stem}"] if config_file else []
    tokens += [token for key, value in settings.items() for token in _as_tokens(key, value, parser)] + argv
    if not any(token.split("=")[0] in ("--do_train", "--do_eval", "--do_predict") for token in tokens):
        tokens += ["--do_train", "--do_eval", "--do_predict"]
    model, data, run, unused = parser.parse_args_into_dataclasses(
        tokens, return_remaining_strings=True, look_for_args_file=False
    )
    refuse_unknown([word.lstrip("-").split("=")[0] for word in unused], allowed)
    overrides |= parse_mapping("config_overrides", model.config_overrides)
    model.config_overrides = json.dumps(overrides) if overrides else None
    return model, data, run


def _take_config_file(argv: list[str]) -> tuple[str | None, list[str]]:
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found, rest = parser.parse_known_args(argv)
    return found.config, rest


def _as_tokens(key: str, value: Any, parser: argparse.ArgumentParser) -> list[str]:
    """Return one setting as command-line words, so that YAML and command line follow the same rules."""
    takes_several = any(action.dest == key and action.nargs == "+" for action in parser._actions)
    if takes_several:
        return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}"]
