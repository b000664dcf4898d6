"""Models of transformers, converted: same outputs here, and in a process that has only the converted folder."""

import copy
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from elsewhere import reload_folders
from matrix import ids_of
from originals import SCALED
from originals import WIDE
from originals import converted
from originals import original
from originals import originals
from parity import FLOAT32
from parity import left_padding
from safetensors.torch import load_file
from safetensors.torch import save_file
from test_convert_transfo_xl import written
from test_hub import SERVER
from test_hub import TOKEN
from test_hub import run_python

from hf_relpos.conversion.api import convert_checkpoint
from hf_relpos.conversion.api import convert_folder
from hf_relpos.conversion.vocabulary import word_tokenizer

OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
EXACT = {"rtol": 1e-9, "atol": 1e-9}
"""For models of transformers without a part that computes in float32 whatever their dtype."""


def named(model: Any) -> Any:
    """The configuration of a model as its folder would have it: with the name of its class."""
    model.config.architectures = [type(model).__name__]
    return model.config


def inputs_of(source: str, ours: Any, padded: bool) -> dict[str, torch.Tensor]:
    """Tokens with and without padding, and a text for the decoder of an encoder-decoder."""
    inputs = {"input_ids": ids_of()}
    if padded:  # on the left where the original can do that: BLOOM makes NaN of it
        inputs["attention_mask"] = left_padding() if source in ("llama", "mistral") else left_padding().flip(1)
    if ours.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids_of(seed=1)[:, :7]
    return inputs


@pytest.mark.parametrize("source, make", originals())
@torch.no_grad()
def test_same_outputs(source: str, make: Callable[[], Any]) -> None:
    """All outputs of the whole model in float64; every weight is accounted for."""
    theirs = make()
    weights = theirs.state_dict()
    ours, report = converted(source, named(theirs), weights)
    head = re.search(r"For[A-Z]\w+|LMHeadModel|Model", type(theirs).__name__)[0]
    language = "ForCausalLM" if ours.config.causal else "ForPermutationLM"
    kind = head.replace("LMHeadModel", language).replace("Simple", "")
    assert report.model == ours.config.architectures[0] and report.model.endswith(kind)
    assert report.used.keys() | report.unused.keys() == weights.keys()
    assert not report.used.keys() & report.unused.keys() and "unknown" not in report.unused.values()
    assert {target for targets in report.used.values() for target in targets} <= ours.state_dict().keys()
    one_way = source == "xlnet" and ours.config.causal  # the original cannot take padding then
    for padded in (False,) if one_way else (False, True):
        inputs = inputs_of(source, ours, padded)
        found, wanted = ours(**inputs), theirs(**inputs)
        names = [name for name in OUTPUTS if name in wanted]
        assert names
        for name in names:
            same = found[name], wanted[name]
            if padded and found[name].shape[:2] == inputs["attention_mask"].shape:
                same = tuple(output[inputs["attention_mask"].bool()] for output in same)
            torch.testing.assert_close(*same, **(EXACT if source == "bert" else FLOAT32))


@pytest.mark.parametrize("source, make", originals("Model$|ForMaskedLM$|ForCausalLM$|ConditionalGeneration$"))
def test_the_class_follows_from_the_weights(source: str, make: Callable[[], Any]) -> None:
    """A checkpoint that does not name its class is a language model if it has the head, else a base model."""
    theirs = make()
    wanted = convert_checkpoint(source, named(theirs), theirs.state_dict())
    theirs.config.architectures = None
    found = convert_checkpoint(source, theirs.config.to_dict(), theirs.state_dict())
    assert found[0].to_dict() == wanted[0].to_dict()
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)


@pytest.mark.parametrize("source, make", originals("Llama.*LM$|NeoX.*LM$|Bloom|even$"))
@torch.no_grad()
def test_same_text(source: str, make: Callable[[], Any]) -> None:
    """What both generate, one token after the other and with beams; T5 cannot with unlike numbers of layers."""
    theirs = make()
    ours, _ = converted(source, named(theirs), theirs.state_dict())
    for beams in (1, 3):
        options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0, "eos_token_id": 36}
        texts = [model.float().generate(ids_of(), **options) for model in (ours, theirs)]
        assert torch.equal(*texts)


@torch.no_grad()
def test_xlnet_goes_on_from_its_memory() -> None:
    theirs = original("XLNetLMHeadModel", vocab_size=37, d_model=48, n_layer=2, n_head=6, attn_type="uni", mem_len=5)
    ours, _ = converted("xlnet", named(theirs), theirs.state_dict())
    memory = memories = None
    for seed in range(3):
        found, wanted = ours(ids_of(seed=seed), memory=memory), theirs(ids_of(seed=seed), mems=memories)
        torch.testing.assert_close(found.logits, wanted.logits, **FLOAT32)
        memory, memories = found.memory, wanted.mems


@torch.no_grad()
def test_xlnet_tells_segments_apart() -> None:
    theirs = original("XLNetModel", vocab_size=37, d_model=48, n_layer=2, n_head=6)
    ours, _ = converted("xlnet", named(theirs), theirs.state_dict())
    inputs = {"input_ids": ids_of(), "token_type_ids": (ids_of() % 2).long()}
    torch.testing.assert_close(ours(**inputs)[0], theirs(**inputs)[0], **FLOAT32)


def test_a_head_of_its_own_is_not_tied() -> None:
    """Embeddings and head that should be the same but differ are both kept, as transformers does, with a note."""
    theirs = original("LlamaForCausalLM", vocab_size=37, hidden_size=48, num_hidden_layers=1, num_attention_heads=6)
    theirs.config.tie_word_embeddings = True
    ours, report = converted("llama", named(theirs), theirs.state_dict())
    assert not ours.config.tie_word_embeddings and any("not tied" in note for note in report.notes)
    torch.testing.assert_close(ours(ids_of()).logits, theirs(ids_of()).logits, **FLOAT32)


def test_a_classifier_without_bias_gets_zeros() -> None:
    theirs = original("LlamaForSequenceClassification", hidden_size=48, num_attention_heads=6, num_hidden_layers=1)
    theirs.config.id2label = {0: "no", 1: "yes"}
    ours, report = converted("llama", named(theirs), theirs.state_dict())
    assert list(report.missing) == ["classifier.bias"] and not ours.classifier.bias.any()
    assert ours.config.id2label == {0: "no", 1: "yes"}


def test_heads_without_a_counterpart_are_reported() -> None:
    """The base model is converted; what could not be is named, with the reason."""
    theirs = original("BertForSequenceClassification", hidden_size=48, num_attention_heads=6, num_hidden_layers=1)
    ours, report = converted("bert", named(theirs), theirs.state_dict())
    assert report.model == "RelPosEncoderModel" and type(ours).__name__ == report.model
    left = {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert report.unused.keys() == left
    assert all(f"unused: {name}: {reason}" in str(report) for name, reason in report.unused.items())
    assert "bert.embeddings.word_embeddings.weight -> embed_tokens.weight" in str(report)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One folder of each kind, converted here and loaded by one other process."""
    root, home = tmp_path_factory.mktemp("converted"), tmp_path_factory.mktemp("home")
    for given in originals(RELOADED):
        source, make = given.values
        theirs, folder = make().float(), root / given.id
        theirs.save_pretrained(folder / "original")
        report = convert_folder(str(folder / "original"), folder / "model")
        entries = json.loads((folder / "model" / "config.json").read_text())["auto_map"].items()
        auto = next(auto for auto, entry in entries if entry.endswith(report.model))
        (folder / "job.json").write_text(json.dumps({"auto": auto, "heads": []}))
        save_file({"ids": ids_of()}, folder / "inputs.safetensors")
        target = {"decoder_input_ids": ids_of()[:, :5]} if "Seq2Seq" in report.model else {}
        with torch.no_grad():
            outputs = theirs(ids_of(), **target)
        wanted = {name: outputs[name].contiguous() for name in OUTPUTS if name in outputs}
        save_file(wanted, folder / "wanted.safetensors")
    convert_transformer_xl(root / "transfo-xl")
    reload_folders(root, home)
    return root


def convert_transformer_xl(folder: pathlib.Path) -> None:
    """A job with a checkpoint of the paper's code, whose model here agrees with loops over its formulas."""
    folder.mkdir()
    report = convert_folder(str(written(folder / "original")), folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert report.model == type(model).__name__ and model.config.cutoffs
    (folder / "job.json").write_text(json.dumps({"auto": "AutoModelForCausalLM", "heads": ["AutoModel"]}))
    save_file({"ids": ids_of()}, folder / "inputs.safetensors")
    with torch.no_grad():
        save_file({"logits": model.eval()(ids_of()).logits}, folder / "wanted.safetensors")


RELOADED = "^(?!Llama.*( |Model))(?!.*(narrow|even|c2p|p2c|1.1|sequential|T5Model|XLNetFor)).*$"


@pytest.mark.parametrize("name", [*(given.id for given in originals(RELOADED)), "transfo-xl"])
def test_converted_folders_load_elsewhere(folders: pathlib.Path, name: str) -> None:
    """Where only torch and transformers are: the outputs of the original."""
    folder = folders / name
    assert json.loads((folder / "report.json").read_text())["first class"].startswith("transformers_modules.")
    found, wanted = (load_file(folder / f"{part}.safetensors") for part in ("first", "wanted"))
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], **FLOAT32)


def test_what_a_converted_folder_holds(tmp_path: pathlib.Path) -> None:
    """Code, weights in the precision of the original, its tokenizer, its tokens for generation, and a card."""
    theirs = original("LlamaForCausalLM", vocab_size=37, hidden_size=48, num_hidden_layers=1, num_attention_heads=6)
    theirs.bfloat16().generation_config.eos_token_id = [3, 4]
    theirs.save_pretrained(tmp_path / "original", max_shard_size="20KB")
    assert len(list((tmp_path / "original").glob("*.safetensors"))) > 1
    word_tokenizer(["<unk>", "a", "b"]).save_pretrained(tmp_path / "original")
    report = convert_folder(str(tmp_path / "original"), tmp_path / "converted")
    folder = tmp_path / "converted"
    assert {"modeling_relpos.py", "configuration_relpos.py", "scheme_registry.py"} <= {path.name for path in folder.iterdir()}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == [3, 4]
    assert transformers.AutoTokenizer.from_pretrained(folder)("b a c").input_ids == [2, 1, 0]
    card = (folder / "README.md").read_text()
    assert "`original` (`llama`)" in card and "AutoModelForCausalLM" in card and report.summary in card
    assert folder.stat().st_mode == (tmp_path / "original").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "original"]


@pytest.mark.slow
@pytest.mark.skipif(not SERVER.exists(), reason="the hub ../shared/tools is absent")
def test_a_name_on_the_hub(tmp_path: pathlib.Path) -> None:
    """Weights and tokenizer are fetched by name, and the card says whose they are."""
    theirs = original("LlamaForCausalLM", vocab_size=37, hidden_size=48, num_hidden_layers=1, num_attention_heads=6)
    theirs.float().save_pretrained(tmp_path / "original", max_shard_size="30KB")
    word_tokenizer(["<unk>", "a", "b"]).save_pretrained(tmp_path / "original")
    push = "import sys, huggingface_hub as hub; api = hub.HfApi(token=sys.argv[2]); "
    push += "api.create_repo('me/llama'); api.upload_folder(repo_id='me/llama', folder_path=sys.argv[1])"
    pull = "import os, sys; os.environ['HF_TOKEN'] = sys.argv[2]; from hf_relpos.__main__ import main; "
    pull += "main(['convert', 'me/llama', sys.argv[1]])"
    command = [sys.executable, str(SERVER), "--root", str(tmp_path / "hub"), "--token", TOKEN]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        common = {"PATH": os.environ["PATH"], "HF_ENDPOINT": server.stdout.readline().strip(), "OMP_NUM_THREADS": "1"}
        package = str(pathlib.Path(__file__).resolve().parents[1])
        run_python(push, [str(tmp_path / "original"), TOKEN], **common, HF_HOME=str(tmp_path / "here"))
        run_python(pull, [str(tmp_path / "output"), TOKEN], **common, HF_HOME=str(tmp_path / "there"), PYTHONPATH=package)
    finally:
        server.terminate()
        server.wait()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "output")
    torch.testing.assert_close(model(ids_of()).logits, theirs(ids_of()).logits, **FLOAT32)
    assert "base_model: me/llama" in (tmp_path / "output" / "README.md").read_text()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "output")("b a").input_ids == [2, 1]


OLD_ROTARY: dict[str, dict[str, Any]] = {
    "rope_theta alone": {"rope_theta": 500.0},
    "no field": {},
    **{
        f"{kind}, {spelling}": {"rope_theta": 500.0, "rope_scaling": {spelling: kind, **SCALED[kind]}}
        for kind in SCALED
        for spelling in ("type", "rope_type")
    },
    "both spellings": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
    "new field, old spelling": {"rope_parameters": {"type": "linear", "rope_theta": 500.0, "factor": 2.0}},
}


@pytest.mark.parametrize("fields", OLD_ROTARY.values(), ids=OLD_ROTARY)
@torch.no_grad()
def test_rotary_fields_of_older_transformers(fields: dict[str, Any]) -> None:
    """What `config.json` held before `rope_parameters` is read as transformers reads it, beyond the trained length too."""
    theirs = original("LlamaForCausalLM", **WIDE, max_position_embeddings=8)
    saved = {name: value for name, value in theirs.config.to_dict().items() if name not in ("rope_parameters", "dtype")}
    saved |= {**copy.deepcopy(fields), "architectures": ["LlamaForCausalLM"]}
    read = type(theirs.config).from_dict(copy.deepcopy(saved))
    wanted = type(theirs)(read).double().eval()
    wanted.load_state_dict(theirs.state_dict())
    for module in wanted.modules():  # what `original` makes exact
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.double()
    ours, _ = converted("llama", saved, theirs.state_dict())
    torch.testing.assert_close(ours(ids_of()).logits, wanted(ids_of()).logits, **FLOAT32)
    if kind := (fields.get("rope_scaling") or fields.get("rope_parameters") or {}).get("type"):
        assert ours.config.position_parameters["rope_type"] == kind
