"""Processes of their own: some find the same modules, in others hf_relpos cannot be imported."""

import os
import pathlib
import subprocess
import sys


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
