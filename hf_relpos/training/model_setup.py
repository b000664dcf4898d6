"""From arguments to a model: a new one of a family, or a trained one to go on with."""

import dataclasses
from difflib import get_close_matches
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers import MODEL_FOR_MASKED_LM_MAPPING
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import AutoModelForMaskedLM
from transformers import GenerationConfig
from transformers import PreTrainedConfig
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase

from hf_relpos.evaluation.language_model import position_bound
from hf_relpos.model.configuration_checks import exact_fields
from hf_relpos.model.configuration_relpos import RelPosConfig
from hf_relpos.model.scheme_registry import scheme_class
from hf_relpos.model.scheme_registry import scheme_parameters
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.checkpoints import check_folder

# What may change when a model is trained further: fields that do not say what its weights are, but for those of positions. Tables
# of a changed scheme begin anew, and the report of loading lists them.
ADJUSTABLE = (
    "position_scheme",
    "position_parameters",
    "share_positions",
    "mem_len",
    "reuse_len",
    "sliding_window",
    "detach_memory",
    "hidden_dropout",
    "attention_dropout",
    "classifier_dropout",
    "attention_path",
    "position_ids_mark_documents",
    "use_cache",
)

# Tokens in a block of a new model.
DEFAULT_BLOCK_SIZE = 256


def check_block_size(config: PreTrainedConfig, block_size: int | None) -> int:
    """Return the block length for a model: the requested one, or the length that the model was made for.

    Raises:
        ValueError: the model is bounded to fewer positions.
    """
    bound = position_bound(config)
    chosen = block_size or getattr(config, "trained_length", bound) or DEFAULT_BLOCK_SIZE
    if bound is not None and chosen > bound:
        raise ValueError(f"block_size={chosen} is beyond the {bound} positions that the model has learned: at most {bound}")
    return chosen


def build_config(arguments: ModelArguments, block_size: int | None) -> PreTrainedConfig:
    """Build the configuration that the arguments describe.

    Args:
        arguments: a family and its fields, or a folder with fields in the place of its own.
        block_size: length of the training blocks, which a new model is made for; None leaves it to the model.
    """
    fields = arguments.config_fields()
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1")
    if arguments.model_name_or_path:
        return _load_config(arguments.model_name_or_path, fields, block_size)
    if arguments.model_type not in CONFIG_MAPPING:
        families = sorted(name for name in CONFIG_MAPPING if name.startswith("relpos"))
        raise ValueError(f"unknown model_type={arguments.model_type!r}; one of {families}, or another of transformers'")
    family = CONFIG_MAPPING[arguments.model_type]
    _refuse_unknown(fields, family)
    fields = exact_fields(family, fields)
    fields = {"max_position_embeddings": block_size or DEFAULT_BLOCK_SIZE, **fields}
    try:
        return family(**fields)
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error


def is_masked(config: PreTrainedConfig) -> bool:
    """Return whether a configuration belongs to a masked language model; otherwise it is a causal one."""
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING


def build_model(
    arguments: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, auto: Any = None
) -> PreTrainedModel:
    """Build the model of a configuration, new or with the weights of `model_name_or_path`.

    Args:
        arguments: what the model starts from.
        config: its configuration.
        tokenizer: the tokenizer, which a new model's vocabulary and special tokens follow.
        auto: the class of its head, as `AutoModelForTokenClassification`; None for a language model.
    """
    auto = auto or (AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM)
    options: dict[str, Any] = {}
    if arguments.mem_len and is_masked(config):
        raise ValueError(
            f"mem_len={arguments.mem_len} is refused for an encoder: it is trained block by block, without memory"
        )
    if arguments.attn_implementation:
        options["attn_implementation"] = arguments.attn_implementation
    if arguments.model_name_or_path:
        name = arguments.model_name_or_path
        model = auto.from_pretrained(name, config=config, dtype=torch.float32, **options)
        if len(tokenizer) > config.vocab_size:
            model.resize_token_embeddings(len(tokenizer))
    else:
        if "vocab_size" not in arguments.config_fields():
            config.vocab_size = len(tokenizer)
        if config.vocab_size < len(tokenizer):
            raise ValueError(f"vocab_size={config.vocab_size} is less than the tokenizer's {len(tokenizer)} tokens")
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, token, getattr(tokenizer, token))
        if config.is_encoder_decoder and config.decoder_start_token_id is None:
            config.decoder_start_token_id = config.pad_token_id
        model = _new_model(auto, config, options)
    if model.can_generate():
        model.generation_config = _generation_config(config, tokenizer)
    return model


def _new_model(auto: Any, config: PreTrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    """Build a model; a ValueError says how large it is where no memory holds it."""
    try:
        return auto.from_config(config, **options)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        with torch.device("meta"):
            count = auto.from_config(config).num_parameters()
        raise ValueError(
            f"the model would have {count:,} parameters, which do not fit into memory: lower hidden_size={config.hidden_size} or "
            f"num_hidden_layers={config.num_hidden_layers}"
        ) from error


def _generation_config(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    bound = position_bound(config)
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=min(200, bound // 2) if bound else 200,
        use_cache=True,
    )


def _load_config(name: str, fields: dict[str, Any], block_size: int | None) -> PreTrainedConfig:
    """Read the configuration of a trained model, with fields in the place of its own, as `from_pretrained(name, **fields)` does.

    The length that it is made for is the new one of the blocks, unless what it has learned or computes goes by the old one.

    Raises:
        ValueError: there is no such model, or its weights fix one of the fields.
    """
    check_folder(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise ValueError(f"model_name_or_path={name!r} is neither a model folder nor a model of the Hub") from error
    _refuse_unknown(fields, type(config))
    fields = exact_fields(type(config), fields)
    own = vars(config)
    fixed = [field for field, value in fields.items() if own.get(field) != value and field not in ADJUSTABLE]
    if fixed:
        has, asked = (", ".join(f"{field}={values.get(field)!r}" for field in fixed) for values in (own, fields))
        raise ValueError(
            f"{name} has {has}, the arguments ask for {asked}: its weights fix that. Leave it out, where it stands in "
            "config_overrides of the YAML file or of its base by 'config_overrides: null'. Of a trained model can be changed: "
            f"{', '.join(ADJUSTABLE)}"
        )
    found = AutoConfig.from_pretrained(name, **fields)
    if not isinstance(found, RelPosConfig) or block_size is None:
        return found
    new_table = position_bound(config) is None and position_bound(found) is not None
    parameters = {scheme: scheme_parameters(found, scheme) for scheme in found.all_schemes()}
    if new_table or not any(scheme_class(scheme).reads_trained_length(own) for scheme, own in parameters.items()):
        found.max_position_embeddings = block_size
    return found


def _refuse_unknown(fields: dict[str, Any], family: type[PreTrainedConfig]) -> None:
    allowed = sorted(field.name for field in dataclasses.fields(family))
    for name in fields:
        if name not in allowed:
            close = " or ".join(map(repr, get_close_matches(name, allowed)))
            raise ValueError(
                f"{family.__name__} has no field {name!r}; {f'did you mean {close}?' if close else f'one of {allowed}'}"
            )
