"""Publish a run's folder on the Hub: the model, its tokenizer, its code and its card."""

from pathlib import Path
from typing import Any

from transformers.utils.hub import hf_api

# Logs, checkpoints, results, the record of the run (with paths of this machine) and training_args.bin (a pickle) stay here.
PUBLISHED = ("README.md", "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "*.py")
PUBLISHED += ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.jinja")


def files_to_publish(folder: str | Path) -> list[str]:
    """Return the names of the files of a model folder that go to the Hub."""
    found = {path.name for pattern in PUBLISHED for path in Path(folder).glob(pattern) if path.is_file()}
    return sorted(found)


def publish(folder: str | Path, repo_id: str, message: str | None = None, **options: Any) -> Any:
    """Upload a model folder, and print what is uploaded.

    Args:
        folder: holds the model.
        repo_id: the repository, which exists.
        message: of the commit.
        options: those of `HfApi.upload_folder`; a `revision` that does not exist is made.
    """
    api, files = hf_api(), files_to_publish(folder)
    if revision := options.get("revision"):
        api.create_branch(repo_id, branch=revision, token=options.get("token"), exist_ok=True)
    print(f"published as {repo_id}: {', '.join(files)}")
    return api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=files, commit_message=message, **options)
