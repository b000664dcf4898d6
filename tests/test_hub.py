"""Push to a hub and pull from it elsewhere, through a small hub that stands beside the repository."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from matrix import Case
from matrix import ids_of
from reload_folders import run
from safetensors.torch import load_file

SERVER = pathlib.Path(__file__).resolve().parents[2] / "shared" / "tools" / "hub_server.py"
TOKEN = "hf_dummy"
PUSH = """
import sys, transformers, hf_relpos
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("me/tiny", token=sys.argv[2])
"""
PULL = """
import json, sys
sys.modules["hf_relpos"] = None
import transformers
from safetensors.torch import load_file
model = transformers.AutoModelForCausalLM.from_pretrained("me/tiny", trust_remote_code=True, token=sys.argv[2])
model.save_pretrained(sys.argv[1])
print(type(model).__module__)
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SERVER.exists(), reason="the hub ../shared/tools is absent")]


def run_python(code: str, arguments: list[str], **environment: str) -> str:
    """Run code in a new process with standard input closed, and return what it printed."""
    command = ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_push_and_pull(tmp_path: pathlib.Path) -> None:
    """The model that comes back, with the code that came along, computes what the one here does."""
    model, ids = (
        Case("decoder", "transformer_xl", {}).model(head=True, dtype=torch.float32, attn_implementation=None),
        ids_of(),
    )
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, str(SERVER), "--root", str(tmp_path / "hub"), "--token", TOKEN]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        common = {"PATH": os.environ["PATH"], "HF_ENDPOINT": server.stdout.readline().strip(), "OMP_NUM_THREADS": "1"}
        package = str(pathlib.Path(__file__).resolve().parents[1])
        run_python(PUSH, [str(tmp_path / "model"), TOKEN], **common, HF_HOME=str(tmp_path / "here"), PYTHONPATH=package)
        module = run_python(PULL, [str(tmp_path / "pulled"), TOKEN], **common, HF_HOME=str(tmp_path / "there"))
    finally:
        server.terminate()
        server.wait()
    assert module.startswith("transformers_modules.")
    assert json.loads((tmp_path / "pulled" / "config.json").read_text())["auto_map"]
    first, second = (load_file(tmp_path / part / "model.safetensors") for part in ("model", "pulled"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    again = type(model).from_pretrained(tmp_path / "pulled").eval()
    torch.testing.assert_close(run(again, ids), run(model, ids), rtol=0, atol=1e-6)


def test_a_user_elsewhere_pulls_what_a_deleted_environment_pushed() -> None:
    """Private, with card and tokenizer, over a dead connection, by branch, tag and code revision (`make hub`)."""
    script = pathlib.Path(__file__).with_name("hub_round_trip.py")
    done = subprocess.run([sys.executable, str(script), str(SERVER)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "lost: the upload to me/tiny ended early" in done.stdout and "generated: b'def main" in done.stdout
