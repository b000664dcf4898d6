"""A Hub on this machine, for the jobs that upload."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from jobs import REPO
from jobs import TOKEN
from jobs import Outcome


class Skipped(Exception):
    """A fault that cannot be tried here, with the reason."""


def start_hub(script: Path, room: Path, port: int = 0) -> tuple[subprocess.Popen, str]:
    """Start a Hub on this machine that holds another model, and return its process and its address."""
    command = [sys.executable, str(script), "--root", str(room.with_suffix(".hub")), "--port", str(port), "--token", TOKEN]
    server = subprocess.Popen([*command, "--lfs", "auto"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


@contextmanager
def hub_of(name: str, room: Path, script: Path | None) -> Iterator[str]:
    """Give the address of a Hub for a job that needs one, "" for the others."""
    if name != "push":
        yield ""
        return
    if script is None or not script.is_file():
        raise Skipped("no script that plays the Hub: --hub SCRIPT")
    server, address = start_hub(script, room)
    try:
        HfApi(endpoint=address, token=TOKEN).create_repo(REPO, exist_ok=True)
        yield address
    finally:
        server.kill()
        server.wait()


def published(address: str) -> Outcome:
    """Return the files of the repository on the Hub, by name."""
    api: Any = HfApi(endpoint=address, token=TOKEN)
    if not api.repo_exists(REPO):
        return {}
    entries = api.list_repo_tree(REPO, recursive=True)
    return {entry.path: entry.blob_id for entry in entries if entry.path != ".gitattributes"}
