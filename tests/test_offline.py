"""Jobs on local files and the standard library open no connection, though nothing tells them that they are offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

from runs import SMALL
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

config, folder, data, comparison = sys.argv[1:]
main([config])
main([config, "--output_dir", folder + "_bpe", "--tokenizer_name", "bpe", "--vocab_size", "270", "--mem_len", "16",
      "--preprocessing_num_workers", "2"])
main([config, "--output_dir", folder + "_more", "--model_name_or_path", folder])
command(["evaluate", folder, data])
command(["card", folder])
command(["generate", folder, "--prompt", "a", "--max_new_tokens", "2"])
command(["compare", comparison, "--output_dir", folder + "_compared"])
from transformers import GPT2Config, GPT2LMHeadModel
GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)).save_pretrained(folder + "_gpt2")
command(["convert", folder + "_gpt2", folder + "_converted"])
print("attempts:", attempts)
"""


def test_local_jobs_open_no_connection(tmp_path):
    config = write_config(tmp_path)
    task = {"kind": "language_modelling", "lengths": [1], "tokens": 32, "settings": {"block_size": 16}}
    settings = {"config_overrides": SMALL, "max_steps": 1, "use_cpu": True, "train_file": [str(tmp_path / "text.txt")]}
    settings["validation_split_percentage"] = 40
    comparison = {"schemes": ["nope", "t5"], "seeds": [0], "settings": settings, "tasks": {"text": task}}
    (tmp_path / "compare.yaml").write_text(json.dumps(comparison))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT,
            config,
            str(tmp_path / "out"),
            str(tmp_path / "text.txt"),
            str(tmp_path / "compare.yaml"),
        ],
        cwd=Path(__file__).parents[1],
        env=environment | {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "attempts: []"
