"""`accelerate estimate-memory` of a published model, through a small hub that stands beside the repository."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from client_models import DECODERS
from client_models import LLAMA
from client_models import Kind
from client_models import params

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = ROOT.parent / "shared" / "tools" / "hub_server.py"
PUSH = """
import sys, transformers, hf_relpos
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).push_to_hub("me/tiny", token="hf_dummy")
"""
ESTIMATE = """
import sys
sys.modules["hf_relpos"] = None
from accelerate.commands.accelerate_cli import main
sys.argv = ["accelerate", "estimate-memory", "me/tiny", "--library_name", "transformers", *sys.argv[1:]]
main()
"""
pytestmark = [pytest.mark.clients, pytest.mark.skipif(not SERVER.exists(), reason="the hub ../shared/tools is absent")]


def python(code: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, which can ask nothing of the keyboard."""
    command, closed = [sys.executable, "-c", code, *arguments], subprocess.DEVNULL
    return subprocess.run(command, env=environment, stdin=closed, capture_output=True, text=True, timeout=300)


@pytest.mark.row("accelerate", "estimate-memory of a name on the Hub, remote code allowed")
@pytest.mark.parametrize("kind", params(DECODERS["memory"], LLAMA))
def test_estimate(kind: Kind, tmp_path: pathlib.Path) -> None:
    """Without the flag, remote code is refused in one line."""
    kind.model("AutoModelForCausalLM", dtype=torch.float32).save_pretrained(tmp_path / "model")
    command = [sys.executable, str(SERVER), "--root", str(tmp_path / "hub"), "--token", "hf_dummy"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        given = {"PATH": os.environ["PATH"], "HF_ENDPOINT": server.stdout.readline().strip(), "OMP_NUM_THREADS": "1"}
        pushed = python(PUSH, [str(tmp_path / "model")], **given, HF_HOME=str(tmp_path / "here"), PYTHONPATH=str(ROOT))
        assert pushed.returncode == 0, pushed.stderr[-2000:]
        found = python(ESTIMATE, ["--trust_remote_code"], **given, HF_HOME=str(tmp_path / "there"))
        plain = python(ESTIMATE, [], **given, HF_HOME=str(tmp_path / "elsewhere"))
    finally:
        server.terminate()
        server.wait()
    assert "Training using Adam" in found.stdout, found.stderr[-2000:]
    assert kind.peer or "trust_remote_code=True" in plain.stderr
