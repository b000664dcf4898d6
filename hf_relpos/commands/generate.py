"""Add `generate`, which continues a prompt with the model of a folder."""

import argparse
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import AutoTokenizer
from transformers import PreTrainedModel

from hf_relpos.training.checkpoints import check_folder
from hf_relpos.training.summary import sample


def add_generate(commands: Any) -> None:
    """Add `generate`, which continues a prompt with the model of a folder."""
    parser = commands.add_parser("generate", help="continue a prompt with the model of a folder")
    parser.add_argument("folder", help="folder of a causal model and its tokenizer, or their name on the Hub")
    parser.add_argument("--prompt", required=True, help="text to continue; '' begins a document")
    parser.add_argument("--max_new_tokens", type=int, default=200, metavar="N", help="tokens to sample (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same one gives the same text (default: 0)")
    parser.set_defaults(run=run_generate)


def run_generate(arguments: argparse.Namespace) -> None:
    """Print the prompt and its continuation, which ends where the model ends the document."""
    if arguments.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={arguments.max_new_tokens} must be at least 1")
    model = load_causal_model(arguments.folder)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    print(sample(model, tokenizer, arguments.prompt, arguments.max_new_tokens, arguments.seed))


def load_causal_model(folder: str) -> PreTrainedModel:
    """Load a causal language model onto the accelerator, if there is one.

    Raises:
        ValueError: the folder holds none, or one of its files is damaged.
    """
    check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
    except OSError as error:
        raise ValueError(f"{folder!r} is neither a model folder nor a model of the Hub") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{folder} holds a {config.model_type}, which continues no text: give the folder of a causal model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    movable: Any = model
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return model if accelerator is None else movable.to(accelerator)
