"""`transformers serve` and `transformers chat`, over HTTP on this computer: answers are those of `generate`."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from client_models import DECODERS_AND_LLAMA
from client_models import Kind
from client_models import asks_of
from test_pipelines import CHAT
from test_pipelines import FIELDS

from hf_relpos.data.tokenizers import build_byte_tokenizer

pytestmark = pytest.mark.clients
asks = asks_of("transformers: serve, chat", package="transformers")
ROOT = Path(__file__).parents[2]
COMMAND = "from transformers.cli.transformers import app; app()"
SCRIPT = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8"), flags=re.DOTALL
)[0]
LETTERS = set(b"abcdefghijklmnopqrstuvwxyz")
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "no_repeat_ngram_size": 1}
OPTIONS["suppress_tokens"] = [
    token for token in range(FIELDS["vocab_size"]) if token not in LETTERS
]  # of bytes: all can be shown
TEXTS = ["one text", "another one, which is longer"]


@dataclass
class Server:
    """A server that runs, and its log."""

    address: str
    log: Path

    def ask(self, path: str, **body: Any) -> Any:
        """Return what it answers, its events in a list if it streams, or the number of its error."""
        given = json.dumps(body | {"generation_config": json.dumps(OPTIONS)}).encode()
        request = urllib.request.Request(self.address + path, given, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code
        return [json.loads(line[6:]) for line in text.splitlines() if line] if body.get("stream") else json.loads(text)


def answers_at(address: str) -> bool:
    """Return whether something answers there."""
    try:
        urllib.request.urlopen(address, timeout=5)
    except OSError:
        return False
    return True


def start(script: str, folder: Path) -> Iterator[Server]:
    """Start a server of any model that it is asked for, and end it."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server = Server(f"http://127.0.0.1:{port}", folder / "log.txt")
    options = ["--host", "127.0.0.1", "--port", port, "--device", "cpu", "--trust-remote-code"]
    with server.log.open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", script, "serve", *options], stdout=log, stderr=log, cwd=ROOT)
    try:
        while not answers_at(server.address + "/health"):
            assert process.poll() is None, server.log.read_text()
            time.sleep(0.2)
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`transformers serve` as it is."""
    yield from start(COMMAND, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`serve` by the script of the page about servers."""
    yield from start(SCRIPT, tmp_path_factory.mktemp("script"))


@pytest.fixture
def folder(kind: Kind, tmp_path: Path) -> str:
    """A saved model with a tokenizer of bytes that has a template of chats."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = CHAT
    kind.model(dtype=torch.float32, **FIELDS).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def chat_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answers(folder: str, template: str = "{}") -> list[str]:
    """Return what `generate` answers to each text, put into a template."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for text in TEXTS:
        given = tokenizer(template.format(text), return_tensors="pt")
        output: Any = model.generate(**given, **OPTIONS)
        found.append(tokenizer.decode(output[0, given.input_ids.shape[1] :], skip_special_tokens=True))
    assert len(set(found)) == len(TEXTS), "answers that do not depend on the text would show nothing"
    return found


def chats_are_answered(server: Server, folder: str) -> None:
    found = [server.ask("/v1/chat/completions", model=folder, messages=chat_of(text)) for text in TEXTS]
    assert [one["choices"][0]["message"]["content"] for one in found] == answers(folder, "user: {}\nassistant: ")


@asks("serve --trust-remote-code of a folder, as it is")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_serve_as_it_is(plain_server: Server, kind: Kind, folder: str, record_property: Any) -> None:
    if kind.peer:
        return chats_are_answered(plain_server, folder)
    assert plain_server.ask("/v1/chat/completions", model=folder, messages=chat_of(TEXTS[0])) == 500
    last = plain_server.ask("/load_model", model=folder, stream=True)[-1]
    assert "has no attribute RelPosDecoderForCausalLM" in last["message"]
    record_property("says", "fails: it looks for the class by name in the package transformers only")


@asks("serve by the script of four lines (how-to/serve.md): chats, texts, each also streamed")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_serve_by_the_script(server: Server, kind: Kind, folder: str) -> None:
    chats_are_answered(server, folder)
    wanted = answers(folder)
    assert [server.ask("/v1/completions", model=folder, prompt=text)["choices"][0]["text"] for text in TEXTS] == wanted
    events = server.ask("/v1/completions", model=folder, prompt=TEXTS[1], stream=True)
    assert "".join(event["choices"][0]["text"] for event in events) == wanted[1]
    events = server.ask("/v1/chat/completions", model=folder, messages=chat_of(TEXTS[1]), stream=True)
    parts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(parts) == answers(folder, "user: {}\nassistant: ")[1]


@asks("chat, with the server of that script")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_chat(server: Server, kind: Kind, folder: str) -> None:
    """The client prints the answer."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | {"COLUMNS": "200"}
    flags = [f"{name}={value}".replace(" ", "") for name, value in OPTIONS.items()]
    argv = [sys.executable, "-c", COMMAND, "chat", folder, server.address, *flags]
    typed = f"{TEXTS[0]}\nn\n!exit\n"
    done = subprocess.run(argv, input=typed, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    assert answers(folder, "user: {}\nassistant: ")[0] in done.stdout
