"""Publish a run's folder on the Hub: the model, its tokenizer, its code and its card, all of them or nothing."""

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd
from huggingface_hub import get_token
from transformers.utils.hub import hf_api

from hf_relpos.model.hub_card import explain_failed_upload

logger = logging.getLogger(__name__)

# Logs, checkpoints, results, the record of the run (with paths of this machine) and training_args.bin (a pickle) stay here.
PUBLISHED = ("README.md", "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "*.py")
PUBLISHED += ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.jinja")


def require_token(token: str | None) -> None:
    """Raise a ValueError if neither an argument nor this machine has a token for the Hub. Nothing is asked of the Hub."""
    if not (token or get_token()):
        raise ValueError(
            "push_to_hub needs a token that may write to the Hub, and there is none: run `hf auth login`, set HF_TOKEN or give "
            "hub_token; or leave push_to_hub out and publish the folder later"
        )


def files_to_publish(folder: str | Path) -> list[str]:
    """Return the names of the files of a model folder that go to the Hub."""
    found = {path.name for pattern in PUBLISHED for path in Path(folder).glob(pattern) if path.is_file()}
    return sorted(found)


def publish(
    folder: str | Path,
    repo_id: str,
    message: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    in_background: bool = False,
) -> Any:
    """Upload a model folder in one commit, and print what was uploaded.

    Args:
        folder: holds the model.
        repo_id: the repository, which exists.
        message: of the commit.
        revision: the branch, which is made if it does not exist; `main` by default.
        token: for the Hub; this machine's by default.
        in_background: return a Future at once. It warns if the upload fails, and whoever asks for its result meets the error.

    Raises:
        OSError: the upload ended early; says what is on the Hub and how to go on.
    """
    api, files = hf_api(), files_to_publish(folder)
    go_on = (
        f"The model is whole in {folder}; push it again (a finished run: the same command with --resume_from_checkpoint auto)"
    )

    def upload() -> Any:
        with explain_failed_upload(repo_id, revision, go_on):
            if revision:
                api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
            added = [CommitOperationAdd(name, Path(folder, name)) for name in files]
            done = api.create_commit(repo_id, added, commit_message=message or "Upload model", token=token, revision=revision)
        print(f"published as {repo_id}: {', '.join(files)}")
        return done

    if not in_background:
        return upload()
    job = api.run_as_future(upload)
    job.add_done_callback(_warn_if_failed)
    return job


def _warn_if_failed(job: Future) -> None:
    if not job.cancelled() and (error := job.exception()):
        logger.warning("%s", error)
