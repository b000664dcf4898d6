"""Checkpoints of other architectures brought home: same weights, same logits, as a folder of this package."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any
from typing import cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers import PreTrainedModel

from hf_relpos.conversion.checkpoint import Checkpoint
from hf_relpos.conversion.checkpoint import read_checkpoint
from hf_relpos.conversion.folder import build_model
from hf_relpos.conversion.folder import check_output
from hf_relpos.conversion.folder import write_folder
from hf_relpos.conversion.plan import Head
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.rules import Report
from hf_relpos.conversion.rules import Rule
from hf_relpos.conversion.rules import apply_rules
from hf_relpos.conversion.rules import check_shapes
from hf_relpos.conversion.rules import resolve_tied
from hf_relpos.conversion.rules import with_prefix
from hf_relpos.conversion.settings import Settings
from hf_relpos.conversion.sources import SOURCES
from hf_relpos.conversion.sources import source_name
from hf_relpos.conversion.vocabulary import find_tokenizer
from hf_relpos.model.configuration_relpos import RelPosConfig

__all__ = ["SOURCES", "Report", "convert_checkpoint", "convert_folder"]


def convert_checkpoint(
    source: str, config: PreTrainedConfig | dict[str, Any], state_dict: Mapping[str, torch.Tensor]
) -> tuple[RelPosConfig, dict[str, torch.Tensor], Report]:
    """Convert a configuration and weights.

    Args:
        source: kind of the checkpoint, a `model_type` of transformers: one of `SOURCES`.
        config: its configuration, or the content of its `config.json`.
        state_dict: its weights by name, with or without the prefix of a model with a head.

    Returns:
        The configuration here, whose `architectures` names the class; the weights of that class, without those that
        are tied to others; and the report of each weight.

    Raises:
        ValueError: the source is unknown, a setting cannot be represented, or weights are missing, differ where they
            should be the same, or have surprising shapes.
    """
    model, weights, report = _convert(source, config, state_dict)
    return cast(RelPosConfig, model.config), weights, report


def convert_folder(source: str, output: str | Path, allow_pickle: bool = False) -> Report:
    """Convert a folder, or a model of the Hub, into a folder like any other here.

    Args:
        source: the folder or name.
        output: the new folder; it must not exist, or be empty.
        allow_pickle: read `pytorch_model.bin` where there are no safetensors; nothing but tensors is unpickled.

    Raises:
        ValueError: as in `convert_checkpoint`, or a file is missing or damaged, or the output is there already;
            nothing is left behind.
    """
    output = Path(output).resolve()
    check_output(output)
    checkpoint = read_checkpoint(source, allow_pickle)
    model, weights, report = _convert(_kind(checkpoint), checkpoint.config, checkpoint.weights)
    tokenizer = find_tokenizer(source, report, allow_pickle)
    write_folder(output, build_model(model, weights), tokenizer, source, report)
    return report


def _convert(
    source: str, config: PreTrainedConfig | dict[str, Any], state_dict: Mapping[str, torch.Tensor]
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], Report]:
    """Convert, and return the model without memory, its weights, and the report."""
    kind = source_name(source)
    try:
        settings = Settings(kind, config)
        plan = SOURCES[kind](settings, state_dict)
    except (StrictDataclassError, TypeError, KeyError) as error:
        raise ValueError(f"{kind}: a field of the configuration is not what it should be: {error}") from error
    head = plan.choose_head(settings.architectures, state_dict)
    ours, report = plan.config, Report(kind, notes=list(plan.notes))
    if head is not None and head.model.__name__.endswith("Classification"):
        ours.id2label, ours.label2id = settings("id2label"), settings("label2id")
    if settings.unread:
        report.notes.append(f"fields of the configuration that were not read: {', '.join(settings.unread)}")
    with torch.device("meta"):
        model = (plan.base if head is None else head.model)(ours)
    found = apply_rules(_rules(plan, head), state_dict, plan.prefix, report)
    tied = resolve_tied(found, model.all_tied_weights_keys, report)
    if not tied.issuperset(model.all_tied_weights_keys):
        ours.tie_word_embeddings = False
    expected = {name: weight.shape for name, weight in model.state_dict().items() if name not in tied}
    for name in () if head is None else head.zeros:
        if name not in found:
            found[name] = torch.zeros(expected[name])
            report.missing[name] = "zeros, as the source has no bias there"
    check_shapes(found, expected, report)
    report.model = type(model).__name__
    ours.architectures = [report.model]
    ours.dtype = reduce(torch.promote_types, (weight.dtype for weight in found.values()))
    return model, found, report


def _rules(plan: Plan, head: Head | None) -> list[Rule]:
    """Return all rules; with a head, the weights of the base model stand under `model`."""
    if head is None:
        return list(plan.rules)
    return [*head.rules, *(with_prefix("model.", rule) for rule in plan.rules)]


def _kind(checkpoint: Checkpoint) -> str:
    """Return the `model_type` that a checkpoint names."""
    if "model_type" in checkpoint.config:
        return checkpoint.config["model_type"]
    if "n_token" in checkpoint.config:  # the arguments of Transformer-XL's own code
        return "transfo-xl"
    raise ValueError(f"config.json of {checkpoint.source} has no model_type")
