"""What goes to the Hub: card and tokenizer go along, logs and pickles do not. The Hub is played by a folder."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.utils.hub as library
from huggingface_hub import HfApi
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.errors import HTTPError
from runs import write_config
from segments import make_table
from segments import make_trainer
from transformers import AutoModel
from transformers import AutoModelForCausalLM
from transformers import AutoTokenizer

from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos import RelPosSeq2SeqForConditionalGeneration
from hf_relpos.model.hub_card import UNWRITTEN
from hf_relpos.training import publishing
from hf_relpos.training.checked_trainer import CheckedTrainer
from hf_relpos.training.publishing import publish
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run


class Hub(HfApi):
    """Keeps what is uploaded as `{name: bytes}`, newest over older, unless its connection is dead."""

    def __init__(self):
        super().__init__()
        self.files, self.commits, self.dead, self.error = {}, [], False, HTTPError("connection reset")

    def answer(self):
        if self.dead:
            raise self.error

    def create_repo(self, repo_id, **options):
        self.answer()
        return SimpleNamespace(repo_id=repo_id)

    def create_branch(self, *args, **options):
        pass

    def create_commit(self, repo_id, operations, commit_message=None, **options):
        self.answer()
        new = {operation.path_in_repo: Path(operation.path_or_fileobj).read_bytes() for operation in operations}
        self.commits.append((commit_message, sorted(new)))
        self.files |= new


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub, load = Hub(), ModelCard.load

    def load_card(name, **options):
        if Path(name).exists():
            return load(name, **options)
        if "README.md" not in hub.files:
            raise EntryNotFoundError("no card")
        path = tmp_path / "downloaded.md"
        path.write_bytes(hub.files["README.md"])
        return load(path, **options)

    monkeypatch.setattr(ModelCard, "load", load_card)
    monkeypatch.setattr(library, "_hf_api", hub)
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    return hub


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(prepare([write_config(folder, save_strategy="steps", save_steps=2, report_to="tensorboard")]))
    return folder / "out"


MODEL = ["config.json", "generation_config.json", "model.safetensors"]
KEPT_HERE = {"training_args.bin", "run_arguments.json", "all_results.json", "trainer_state.json", "sample.txt"}


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel])
def test_the_card_and_the_tokenizer_of_a_run_go_along(hub, trained, tmp_path, auto):
    model = auto.from_pretrained(trained)
    model.push_to_hub("me/tiny", tags=["mine"])
    card, own = ModelCard.load("me/tiny"), ModelCard.load(trained / "README.md")
    assert card.text == own.text and card.data.tags == [*own.data.tags, "mine"]
    assert card.data.to_dict() | {"tags": []} == own.data.to_dict() | {"tags": []}
    assert {"tokenizer.json", "tokenizer_config.json", "modeling_relpos.py"} <= hub.files.keys()
    assert not KEPT_HERE & hub.files.keys()
    for name, content in hub.files.items():
        (tmp_path / name).write_bytes(content)
    assert AutoTokenizer.from_pretrained(tmp_path)("a b").input_ids == AutoTokenizer.from_pretrained(trained)("a b").input_ids


def test_a_card_does_not_describe_other_weights(hub, trained):
    model = AutoModelForCausalLM.from_pretrained(trained)
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    model.push_to_hub("me/changed")
    card = ModelCard.load("me/changed").content
    assert UNWRITTEN not in card and "bits per byte" not in card
    assert "the weights are not those of `out`" in card and f"{model.num_parameters():,} parameters" in card
    assert "tokenizer.json" in hub.files


def test_a_model_without_a_folder_gets_a_card_that_claims_nothing(hub, monkeypatch, tmp_path):
    (tmp_path / "README.md").write_text("of somebody else")
    monkeypatch.chdir(tmp_path)
    config = RelPosSeq2SeqConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, pad_token_id=0)
    RelPosSeq2SeqForConditionalGeneration(config).push_to_hub("me/new")
    card = ModelCard.load("me/new")
    assert UNWRITTEN not in card.content and "somebody" not in card.content
    assert "AutoModelForSeq2SeqLM.from_pretrained" in card.text and "is not recorded here" in card.text
    assert {"hf_relpos", "relpos_seq2seq", "t5"} <= set(card.data.tags) or card.data.tags[:2] == [
        "hf_relpos",
        "relpos_seq2seq",
    ]
    edited = card.content.replace("is not recorded here", "is known to me")
    hub.files["README.md"] = edited.encode()
    RelPosSeq2SeqForConditionalGeneration(config).push_to_hub("me/new")
    assert "is known to me" in ModelCard.load("me/new").text


def test_a_run_publishes_what_is_listed_once(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    settings = {"report_to": "tensorboard", "save_strategy": "steps", "save_steps": 2}
    run(prepare([write_config(tmp_path, **settings, push_to_hub=True, hub_model_id="me/run")]))
    folder = tmp_path / "out"
    assert [message for message, _ in hub.commits] == ["End of training"]
    assert hub.files["README.md"] == (folder / "README.md").read_bytes()
    assert not [name for name in hub.files if name in KEPT_HERE or "/" in name or "events" in name]
    assert {*MODEL, "tokenizer.json", "modeling_relpos.py"} <= hub.files.keys()
    assert f"published as me/run: {', '.join(sorted(hub.files))}" in capsys.readouterr().out
    assert any(folder.rglob("*tfevents*")) and (folder / "training_args.bin").is_file()


def test_each_save_publishes_no_more(hub, tmp_path):
    text = make_table([[1, 2, 3, 4] * 40])
    fields = {"push_to_hub": True, "hub_model_id": "me/steps", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_trainer(tmp_path, text, trainer=CheckedTrainer, **fields).train()
    assert [message for message, _ in hub.commits] == ["Step 2", "Step 4"]
    assert set(MODEL) <= hub.files.keys() and not [name for name in hub.files if name.endswith((".bin", ".pt", ".pth"))]


def test_without_a_token_nothing_begins(hub, tmp_path, monkeypatch):
    """Not even the reading of the text; a token given as an argument does too."""
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    asked = [write_config(tmp_path, push_to_hub=True, train_file=str(tmp_path / "absent.txt"))]
    with pytest.raises(ValueError, match="push_to_hub needs a token .* there is none: run `hf auth login`, set HF_TOKEN"):
        prepare(asked)
    with pytest.raises(ValueError, match=r"absent\.txt"):
        prepare([*asked, "--hub_token", "hf_given"])
    with pytest.raises(ValueError, match="needs a token"):
        make_trainer(tmp_path, make_table([[1, 2] * 40]), trainer=CheckedTrainer, push_to_hub=True)
    assert not hub.commits and not (tmp_path / "out").exists()


def test_a_hub_that_does_not_answer_ends_a_run_before_it_trains(hub, tmp_path):
    hub.dead = True
    with pytest.raises(ValueError, match="hub_model_id='me/run' be written to: connection reset. Nothing was trained"):
        make_trainer(tmp_path, make_table([[1, 2] * 40]), trainer=CheckedTrainer, push_to_hub=True, hub_model_id="me/run")


@pytest.mark.parametrize("error", [HTTPError("connection reset"), RuntimeError("connection reset")], ids=["", "large file"])
def test_a_dead_connection_leaves_all_or_nothing_and_says_so(hub, trained, capsys, error):
    """A folder, in one commit; the second push completes it."""
    hub.dead, hub.error = True, error
    with pytest.raises(
        OSError, match="ended early: connection reset.*branch later holds what it held.*whole in .*out; push it"
    ):
        publish(trained, "me/run", revision="later")
    assert not hub.files and "published" not in capsys.readouterr().out
    hub.dead = False
    publish(trained, "me/run", revision="later")
    assert len(hub.commits) == 1 and {*MODEL, "README.md", "tokenizer.json", "modeling_relpos.py"} <= hub.files.keys()
    assert "published as me/run" in capsys.readouterr().out


def test_a_dead_connection_of_a_model_is_told_too(hub, trained, monkeypatch):
    model = AutoModel.from_pretrained(trained)
    monkeypatch.setattr(hub, "create_repo", lambda repo_id, **options: SimpleNamespace(repo_id=repo_id))
    hub.dead = True
    with pytest.raises(OSError, match="the branch main holds what it held before .* Call push_to_hub again"):
        model.push_to_hub("me/tiny")


def test_an_upload_in_the_background_does_not_fail_silently(hub, trained, caplog):
    hub.dead = True
    job = publish(trained, "me/run", in_background=True)
    with pytest.raises(OSError, match="ended early"):
        job.result()
    hub.run_as_future(int).result()  # jobs run one after another, so its callback has run by now
    assert [record.levelname for record in caplog.records if "ended early" in record.message] == ["WARNING"]
