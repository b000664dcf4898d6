"""Jobs on local files and the standard library open no connection, though nothing tells them that they are offline."""

import os
import subprocess
import sys
from pathlib import Path

from runs import write_config

SCRIPT = """
import socket, sys

attempts = []

def refuse(name):
    def connect(*args, **kwargs):
        if getattr(args[0], "family", None) != socket.AF_UNIX:  # processes of one machine may talk
            attempts.append((name, args))
            raise OSError("no connection may be opened")
        return original(*args, **kwargs)
    original = getattr(socket.socket, name, None)
    return connect

for name in ("connect", "connect_ex"):
    setattr(socket.socket, name, refuse(name))
socket.getaddrinfo = refuse("getaddrinfo")

from hf_relpos.__main__ import main as command
from hf_relpos.training.run import main

config, folder, data = sys.argv[1:]
main([config])
main([config, "--output_dir", folder + "_bpe", "--tokenizer_name", "bpe", "--vocab_size", "270", "--mem_len", "16",
      "--preprocessing_num_workers", "2"])
main([config, "--output_dir", folder + "_more", "--model_name_or_path", folder])
command(["evaluate", folder, data])
command(["card", folder])
print("attempts:", attempts)
"""


def test_local_jobs_open_no_connection(tmp_path):
    config = write_config(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, config, str(tmp_path / "out"), str(tmp_path / "text.txt")],
        cwd=Path(__file__).parents[1],
        env=environment | {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "attempts: []"
