"""Processes of their own: some find the same modules, in others hf_relpos cannot be imported."""

import os
import pathlib
import subprocess
import sys
from typing import Any


def environment() -> dict[str, str]:
    """This process's, in which a child finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def reload_folders(root: pathlib.Path, home: pathlib.Path) -> None:
    """Let `reload_folders.py` do the jobs under `root`, offline, without standard input, with `home` as its folder."""
    variables = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    script = pathlib.Path(__file__).with_name("reload_folders.py")
    command = ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, "-I", str(script), str(root)]
    done = subprocess.run(command, env=variables, cwd=home, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def run_script(name: str, *arguments: Any, **variables: str) -> None:
    """Run a script of this folder to its end, with these environment variables alone."""
    command = [sys.executable, str(pathlib.Path(__file__).with_name(name)), *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def answer_by_remote_code(root: pathlib.Path) -> None:
    """Let `seam_of_remote_code.py` answer the document beside each model under `root`, each by the code in its folder."""
    home = str(root / "home")
    run_script("seam_of_remote_code.py", root, PATH=os.environ["PATH"], HF_HUB_OFFLINE="1", HF_HOME=home)
