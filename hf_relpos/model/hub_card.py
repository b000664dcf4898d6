"""Upload more than weights and code to the Hub: the card and the tokenizer of the folder that a model came from."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from huggingface_hub import ModelCardData
from huggingface_hub.errors import HTTPError
from transformers import AutoTokenizer

CARD, TOKENIZER = "README.md", "tokenizer_config.json"
UNWRITTEN = "More Information Needed"
"""What stands in the empty places of the card that transformers makes."""


class HubCardMixin:
    """Lets `push_to_hub` take the card and the tokenizer along.

    transformers uploads weights, configuration and code, with a card whose places are empty.
    """

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """Upload a folder as transformers does, once it is complete."""
        complete_folder(self, Path(working_dir), repo_id)
        upload: Any = super()._upload_modified_files  # pyright: ignore[reportAttributeAccessIssue]
        with explain_failed_upload(repo_id, kwargs.get("revision"), "Call push_to_hub again"):
            return upload(working_dir, repo_id, *args, **kwargs)


@contextmanager
def explain_failed_upload(repo_id: str, revision: str | None, go_on: str) -> Iterator[None]:
    """Raise an OSError that says what an upload of one commit leaves on the Hub when it fails.

    Args:
        repo_id: the repository.
        revision: the branch, None for `main`.
        go_on: how to complete the upload.
    """
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:  # the last is that of a large file
        raise OSError(
            f"the upload to {repo_id} ended early: {error}. All files go there in one commit, so the branch {revision or 'main'} holds "
            f"what it held before (nothing, if it is new) or, if only the answer was lost, all of them. {go_on}: what has arrived is "
            "not sent twice"
        ) from error


def complete_folder(model: Any, folder: Path, repo_id: str) -> None:
    """Add the tokenizer and the card to a folder that is about to be uploaded.

    The card is that of the folder from which the model was loaded, as long as the model has the weights that it describes. Else a
    card that stands on the Hub stays, and an unwritten one gives way to what the configuration tells.

    Args:
        model: the model.
        folder: holds its weights, and the card that transformers found on the Hub or made.
        repo_id: the name on the Hub.
    """
    source = Path(model.name_or_path) if model.name_or_path and Path(model.name_or_path).is_dir() else None
    if source is not None and (source / TOKENIZER).is_file() and not (folder / TOKENIZER).is_file():
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    found = ModelCard.load(folder / CARD, ignore_metadata_errors=True) if (folder / CARD).is_file() else None
    if source is not None and (source / CARD).is_file() and has_weights_of(model, source):
        card = ModelCard.load(source / CARD, ignore_metadata_errors=True)
    elif found is None or UNWRITTEN in found.text:
        card = write_card(model, repo_id)
    else:
        return
    data: Any = card.data
    before: Any = None if found is None else found.data
    own = list(data.tags or [])
    data.tags = own + [tag for tag in (before and before.tags) or [] if tag not in own]
    card.save(folder / CARD)


def has_weights_of(model: Any, folder: Path) -> bool:
    """Return whether a model still has the weights that it was loaded with from a folder."""
    try:
        loaded = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
    except (OSError, ValueError):
        return False
    own = model.state_dict()
    return own.keys() == loaded.keys() and all(torch.equal(own[name].cpu(), loaded[name].cpu()) for name in own)


def write_card(model: Any, repo_id: str) -> ModelCard:
    """Return a card that says what the configuration tells, and that the training is not known."""
    config, auto = model.config, getattr(model, "_auto_class", None) or "AutoModel"
    names = ("position_scheme", "encoder_position_scheme", "decoder_position_scheme")
    given = [getattr(config, name, None) or [] for name in names]
    schemes = dict.fromkeys(scheme for found in given for scheme in ([found] if isinstance(found, str) else found))
    base = model.name_or_path
    text = [
        f"# {repo_id.split('/')[-1]}",
        f"`{type(model).__name__}` (`{config.model_type}`) with {model.num_parameters():,} parameters: "
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"{config.vocab_size:,} tokens, position scheme {' and '.join(f'`{scheme}`' for scheme in schemes)}.",
        "## How to load it",
        f'```python\nfrom transformers import {auto}\n\nmodel = {auto}.from_pretrained("{repo_id}", trust_remote_code=True)\n```',
        "## What is not known",
        "This card was written from the configuration"
        + (f"; the weights are not those of `{Path(base).name}`, from which the model was loaded" if base else "")
        + ". On which text the model was trained, how well it does and what it must not be used for is not recorded here.",
    ]
    data = ModelCardData(library_name="transformers", tags=["hf_relpos", config.model_type, *schemes])
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n")
