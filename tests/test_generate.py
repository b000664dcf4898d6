"""After a run: `generate` continues a prompt, and the run and its card say how with words of its own text."""

import json
import re
import shutil

import pytest
from huggingface_hub import ModelCard
from runs import write_config

from hf_relpos.__main__ import main as command
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run
from hf_relpos.training.summary import format_end
from hf_relpos.training.summary import opening

MASKED = {"model_type": "relpos_encoder", "position_scheme": "t5", "validation_split_percentage": 20}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(prepare([write_config(folder, sample_prompt="line 1: the quick")]))
    return folder / "out"


def code_of(card: str) -> str:
    return re.findall(r"^```python\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)[0]


def test_generate_continues_a_prompt(trained, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        command(["generate", str(trained), "--prompt", "the quick", "--max_new_tokens", "9", "--seed", seed])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and all(text.startswith("the quick") for text in texts)
    command(["generate", str(trained), "--prompt", "", "--max_new_tokens", "9"])


def test_generate_says_what_it_cannot_use(trained, tmp_path):
    for folder, options, message in (
        ("/no/model", [], "'/no/model' is neither a model folder nor a model of the Hub"),
        (str(trained), ["--max_new_tokens", "0"], "max_new_tokens=0 must be at least 1"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            command(["generate", folder, "--prompt", "a", *options])
    run(prepare([write_config(tmp_path, **MASKED)]))
    with pytest.raises(SystemExit, match="holds a relpos_encoder, which continues no text: give the folder of a causal model"):
        command(["generate", str(tmp_path / "out"), "--prompt", "a"])
    weights = tmp_path / "out" / "model.safetensors"
    for path in trained.iterdir():
        if path.is_file():
            (tmp_path / "out" / path.name).write_bytes(path.read_bytes())
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SystemExit, match="^error: .*model.safetensors is damaged"):
        command(["generate", str(tmp_path / "out"), "--prompt", "a"])


def test_a_run_ends_with_its_folder_and_the_next_command(tmp_path, capsys):
    run(prepare([write_config(tmp_path)]))
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith(f"The run is in {tmp_path}/out: ")
    assert last[1] == f"Next: python -m hf_relpos generate {tmp_path}/out --prompt 'line 57: the quick brown fox jumps over'"
    assert format_end("runs/x y", "it's", False).endswith("Next: python -m hf_relpos evaluate 'runs/x y' FILE")
    assert opening("\n\n  a first line \nand more") == "a first line" and opening("") == ""
    assert opening("word " * 20) == "word word word word word word word word" and opening("x" * 99) == "x" * 40


@pytest.mark.parametrize("masked", [False, True])
def test_a_card_shows_a_prompt_of_its_own_text(trained, tmp_path, monkeypatch, capsys, masked):
    folder, prompt = trained, "'line 1: the quick'"
    if masked:
        run(prepare([write_config(tmp_path, **MASKED)]))
        folder, prompt = tmp_path / "out", r"brown fox|lazy dog|line \d+"  # of the share set apart
    code = code_of(ModelCard.load(folder / "README.md").text)
    assert re.search(prompt, code) and "import " not in code.split("from_pretrained")[-1]
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(code.replace("do_sample=True", "do_sample=True, max_new_tokens=3"), {})
    assert "the quick" in capsys.readouterr().out or masked


def test_a_card_says_what_resuming_changed(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2}
    run(prepare([write_config(tmp_path, **saves)]))
    assert "resumed" not in (tmp_path / "out" / "README.md").read_text()
    run(prepare([write_config(tmp_path, **saves | {"save_steps": 3}, max_steps=6, resume_from_checkpoint="auto")]))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "At step 4 it was resumed with other settings: `max_steps` from 4 to 6, `save_steps` from 2 to 3." in card


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "model-00002-of-00002.safetensors"])
def test_a_damaged_folder_ends_commands_with_one_line(trained, tmp_path, name):
    """It names the file, whether that was cut off, is empty or holds something else; of weights in parts one may be missing."""
    folder = tmp_path / "model"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    contents = [b"", b"garbage", None]
    if name == "model-00002-of-00002.safetensors":
        index = {"metadata": {}, "weight_map": {"first": "model.safetensors", "second": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        contents[2] = (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    for content in contents:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        for words in (["generate", "--prompt", "a"], ["evaluate"], ["evaluate", "--lengths", "8"]):
            with pytest.raises(
                SystemExit, match=rf"^error: {re.escape(str(folder / name))} is (damaged|missing).*: copy or download"
            ):
                command([words[0], str(folder), *words[1:]])
