"""The arguments of `train_lm.py`: three dataclasses, read from a YAML file and the command line.

Names are those of transformers' `run_clm` and `run_mlm` where the meaning is the same. Any argument may stand in the
YAML; the command line wins. A YAML file may name a `base:` (a path relative to itself) whose values it inherits.
"""

import argparse
import difflib
import json
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser
from transformers import TrainingArguments
from transformers.integrations.integration_utils import is_tensorboard_available
from transformers.trainer_utils import SchedulerType

from hf_relpos.model.forward_keywords import REPLACED
from hf_relpos.training.best_model import greater_is_better

ABOUT = "Train and evaluate a causal or masked language model; any argument may also stand in the YAML file."
USAGE = "%(prog)s [CONFIG.yaml | --config CONFIG.yaml] [--argument value ...]"


def argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """Which model: a new one from its configuration, or a folder to start from."""

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
        """The configuration fields that were asked for."""
        scheme = self.position_scheme
        named = {
            "position_scheme": _parse_list("position_scheme", scheme) if scheme and scheme.startswith("[") else scheme,
            "position_parameters": parse_mapping("position_parameters", self.position_parameters) or None,
            "share_positions": self.share_positions,
            "mem_len": self.mem_len,
        }
        given = {name: value for name, value in named.items() if value is not None}
        return parse_mapping("config_overrides", self.config_overrides) | given


@dataclass
class DataArguments:
    """Which text, and how it is cut into tokens and blocks."""

    dataset_name: str | None = argument(
        None, "'stdlib' (the Python library's own sources; the default without files) or a dataset of the Hub."
    )
    dataset_config_name: str | None = argument(None, "Configuration of the Hub dataset.")
    train_file: list[str] | None = argument(None, "Text, jsonl, csv or parquet: files, folders or glob patterns.")
    validation_file: list[str] | None = argument(None, "Text to evaluate on, given like train_file.")
    test_file: list[str] | None = argument(None, "Text for the last evaluation, given like train_file.")
    text_column: str = argument("text", "Column of jsonl, csv, parquet or Hub data that holds the documents.")
    streaming: bool = argument(False, "Read the Hub dataset while training instead of downloading it first.")
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

    output_dir: str = argument("runs/default", "Folder of the run; with a YAML file, runs/NAME of that file.")
    remove_unused_columns: bool = argument(False, "Drop columns that the model's forward does not name.")
    dataloader_pin_memory: bool = argument(torch.accelerator.is_available(), "Pin the memory of batches.")
    report_to: str = argument(
        "tensorboard" if is_tensorboard_available() else "none", "Where to log: tensorboard, wandb, ..., all or none."
    )
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
    """Whether this machine multiplies in bfloat16 natively: otherwise it is emulated, and slower than float32."""
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
    parser = HfArgumentParser(groups, usage=USAGE, description=ABOUT, allow_abbrev=False)
    config_file, argv = _take_config_file(argv)
    settings = read_yaml(config_file) if config_file else {}
    _refuse_unknown(settings, parser, where=f"{config_file}: ")
    overrides = parse_mapping("config_overrides", settings.pop("config_overrides", None))

    tokens = ["--output_dir", f"runs/{Path(config_file).stem}"] if config_file else []
    tokens += [token for key, value in settings.items() for token in _as_tokens(key, value, parser)] + argv
    if not any(token.split("=")[0] in ("--do_train", "--do_eval", "--do_predict") for token in tokens):
        tokens += ["--do_train", "--do_eval", "--do_predict"]
    model, data, run, unused = parser.parse_args_into_dataclasses(
        tokens, return_remaining_strings=True, look_for_args_file=False
    )
    _refuse_unknown([word.lstrip("-").split("=")[0] for word in unused], parser, where="")
    overrides |= parse_mapping("config_overrides", model.config_overrides)
    model.config_overrides = json.dumps(overrides) if overrides else None
    return model, data, run


def read_yaml(path: str | Path, inheriting: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML file's settings over those of its `base`; mappings are merged, null takes a setting back."""
    path = Path(path)
    if path.resolve() in inheriting:
        raise ValueError(f"{path} is its own base: {' -> '.join(file.name for file in inheriting)}")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds {settings!r}, not 'argument: value' lines")
    inherited = read_yaml(path.parent / settings.pop("base"), (*inheriting, path.resolve())) if "base" in settings else {}
    for key, value in settings.items():
        merge = isinstance(value, dict) and isinstance(inherited.get(key), dict)
        inherited[key] = inherited[key] | value if merge else value
    return {key: value for key, value in inherited.items() if value is not None}


def parse_mapping(name: str, given: str | dict[str, Any] | None) -> dict[str, Any]:
    """Read `key=value,...` or JSON; a mapping is returned as it is."""
    if not given or isinstance(given, dict):
        return given or {}
    try:
        if given.lstrip().startswith("{"):
            return json.loads(given)
        pairs = [pair.split("=", 1) for pair in given.split(",")]
        return {key.strip(): yaml.safe_load(value) for key, value in pairs}
    except ValueError as error:
        raise ValueError(f"{name}={given!r} is neither JSON nor key=value,...: {error}") from error


def _parse_list(name: str, given: str) -> list[Any]:
    """Read a JSON list."""
    try:
        return json.loads(given)
    except ValueError as error:
        raise ValueError(f"{name}={given!r} is not a JSON list: {error}") from error


def _take_config_file(argv: list[str]) -> tuple[str | None, list[str]]:
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found, rest = parser.parse_known_args(argv)
    return found.config, rest


def _as_tokens(key: str, value: Any, parser: argparse.ArgumentParser) -> list[str]:
    """One setting as command-line words, so that YAML and command line are read by the same rules."""
    takes_several = any(action.dest == key and action.nargs == "+" for action in parser._actions)
    if takes_several:
        return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}"]


def _refuse_unknown(names, parser: argparse.ArgumentParser, where: str) -> None:
    allowed = [action.dest for action in parser._actions]
    for name in names:
        if name not in allowed:
            if name in REPLACED:
                raise ValueError(f"{where}unknown argument {name!r}; what replaced it is {REPLACED[name]}")
            close = difflib.get_close_matches(name, allowed, n=3) or sorted(allowed)
            raise ValueError(f"{where}unknown argument {name!r}; did you mean {' or '.join(map(repr, close))}?")


def refuse_counts(data: DataArguments, args: RunArguments) -> None:
    """Refuse numbers that would end a run only after it has begun to write."""
    for group in (data, args):
        for name in (
            "max_train_samples",
            "max_eval_samples",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "lane_groups",
        ):
            value = getattr(group, name, None)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
    if not 0 < data.mlm_probability < 1:
        raise ValueError(f"mlm_probability={data.mlm_probability} must be above 0 and below 1")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"seed={args.seed} must be at least 0 and below 2**32")
