"""What cannot be converted, or not be read, is refused with a clear message, and nothing is left behind."""

import json
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from originals import original
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save_file

from hf_relpos.__main__ import main
from hf_relpos.conversion.api import convert_checkpoint
from hf_relpos.conversion.api import convert_folder

TINY = {"vocab_size": 37, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 20}
LLAMA = {**TINY, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
BERT = {**TINY, "model_type": "bert"}
ROPE = {"rope_theta": 500.0, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
XLNET = {"vocab_size": 37, "d_model": 48, "n_layer": 1, "n_head": 6, "model_type": "xlnet"}
DEBERTA = {**TINY, "model_type": "deberta-v2", "relative_attention": True, "position_biased_input": False}


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of a small Llama in shards."""
    original("LlamaForCausalLM", **TINY).float().save_pretrained(tmp_path / "source", max_shard_size="30KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) == 3
    return tmp_path / "source"


def assert_refused(source: pathlib.Path, message: str, allow_pickle: bool = False) -> None:
    """The conversion fails with the message, and nothing but the source is there, as it was."""
    before = {path: path.read_bytes() for path in source.parent.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        convert_folder(str(source), source.parent / "output", allow_pickle)
    assert {path: path.read_bytes() for path in source.parent.rglob("*") if path.is_file()} == before
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def change_weights(source: pathlib.Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the weights of the first shard."""
    path = sorted(source.glob("*.safetensors"))[0]
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def shard(source: pathlib.Path) -> pathlib.Path:
    return sorted(source.glob("*.safetensors"))[0]


BROKEN: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
    "no config": (lambda source: (source / "config.json").unlink(), "has no config.json"),
    "no json": (lambda source: (source / "config.json").write_text("{"), "config.json is not JSON"),
    "a list": (lambda source: (source / "config.json").write_text("[]"), "holds no object, but list"),
    "no kind": (lambda source: (source / "config.json").write_text("{}"), "config.json of .* has no model_type"),
    "another kind": (
        lambda source: (source / "config.json").write_text('{"model_type": "opt"}'),
        "model_type='opt' cannot be converted; one of llama, mistral",
    ),
    "truncated": (lambda source: os.truncate(shard(source), 2000), "is damaged or holds more than tensors"),
    "empty": (lambda source: os.truncate(shard(source), 0), "is damaged or holds more than tensors"),
    "no shard": (lambda source: shard(source).unlink(), "names the shard 'model-00001-of-00003.safetensors', which"),
    "no map": (lambda source: (source / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "no weights": (
        lambda source: [path.unlink() for path in source.glob("model*")],
        "has no weights: none of model.safetensors",
    ),
    "another shard": (
        lambda source: (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.bin"}}'),
        r"names the shard '\.\./model\.bin'",
    ),
    "a weight gone": (
        lambda source: change_weights(source, lambda weights: weights.pop("model.embed_tokens.weight")),
        "names 1 weights that no shard of .* has",
    ),
    "another shape": (
        lambda source: change_weights(
            source, lambda weights: weights.update({"model.embed_tokens.weight": torch.zeros(36, 48)})
        ),
        r"model.embed_tokens.weight became model.embed_tokens.weight of shape \(36, 48\), expected \(37, 48\)",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_folders(fault: str, source: pathlib.Path) -> None:
    change, message = BROKEN[fault]
    change(source)
    assert_refused(source, message)


def test_pickles_are_read_only_when_asked_for(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Nor then, if they hold more than tensors: what would be run is not run."""
    weights = {name: weight for path in source.glob("*.safetensors") for name, weight in load_file(path).items()}
    for path in source.glob("model*"):
        path.unlink()
    file = source / "pytorch_model.bin"
    torch.save(weights, file)
    assert_refused(source, "holds its weights as a pickle only .*--allow_pickle reads it")
    report = convert_folder(str(source), tmp_path / "output", allow_pickle=True)
    assert report.used.keys() == weights.keys()
    for path in sorted((tmp_path / "output").rglob("*"), reverse=True):
        path.unlink()
    (tmp_path / "output").rmdir()
    trap = tmp_path / "source" / "trap"
    file.write_bytes(pickle.dumps(Trap(str(trap))))
    assert_refused(source, "pytorch_model.bin is damaged or holds more than tensors", allow_pickle=True)
    torch.save([1, 2], file)
    assert_refused(source, "pytorch_model.bin is no dictionary of weights", allow_pickle=True)
    os.truncate(file, 10)
    assert_refused(source, "pytorch_model.bin is damaged or holds more than tensors", allow_pickle=True)


class Trap:
    """Unpickled without care, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (pathlib.Path(self.path),)


def test_an_output_that_is_there_is_kept(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mine.txt").write_text("mine")
    for output in (tmp_path / "output", tmp_path / "output" / "mine.txt", source):
        with pytest.raises(ValueError, match="is there already: choose another output folder"):
            convert_folder(str(source), output)
    assert (tmp_path / "output" / "mine.txt").read_text() == "mine"
    (tmp_path / "output" / "mine.txt").unlink()
    convert_folder(str(source), tmp_path / "output")
    assert (tmp_path / "output" / "config.json").exists()


def test_a_write_that_fails_leaves_nothing(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)  # the card is written last
    with pytest.raises(OSError, match="No space left"):
        convert_folder(str(source), tmp_path / "output")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "config, message",
    [
        ({**LLAMA, "rope_parameters": ROPE}, "rope_parameters rope_type='longrope' cannot be converted"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 0.5}},
            "rope_parameters mscale=0.5 cannot be converted",
        ),
        ({**BERT, "position_embedding_type": "rotary"}, "position_embedding_type='rotary' cannot be converted"),
        ({**BERT, "is_decoder": True, "add_cross_attention": True}, "add_cross_attention=True cannot be converted"),
        ({**BERT, "model_type": "roformer", "rotary_value": True}, "rotary_value=True cannot be converted"),
        (
            {**TINY, "model_type": "bloom", "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm=True cannot be converted",
        ),
        ({**DEBERTA, "relative_attention": False}, "relative_attention=False cannot be converted"),
        ({**DEBERTA, "position_biased_input": True}, "position_biased_input=True cannot be converted"),
        ({**DEBERTA, "conv_kernel_size": 3}, "conv_kernel_size=3 cannot be converted"),
        ({**DEBERTA, "pos_att_type": ["p2p"]}, r"pos_att_type=\['p2p'\] cannot be converted"),
        ({**LLAMA, "hidden_size": "wide"}, "a field of the configuration is not what it should be: .*hidden_size"),
        ({**XLNET, "bi_data": True}, "bi_data=True cannot be converted"),
        ({**XLNET, "attn_type": "uni", "same_length": True}, "same_length=True cannot be converted"),
        ({**XLNET, "attn_type": "uni", "reuse_len": 3}, "reuse_len=3 cannot be converted"),
    ],
)
def test_refused_settings(config: dict[str, Any], message: str) -> None:
    """The field, its value, and what can be converted."""
    with pytest.raises(ValueError, match=message) as error:
        convert_checkpoint(config["model_type"], config, {})
    assert str(error.value).startswith(config["model_type"])


def test_refused_weights() -> None:
    """All that is missing is named; what should be the same but differs is refused; an unknown weight is reported."""
    theirs = original("BertForMaskedLM", **TINY)
    weights = theirs.state_dict()
    with pytest.raises(ValueError, match=r"bert: the weights do not fit .*no weight for embed_tokens.weight.* more"):
        convert_checkpoint("bert", theirs.config, {})
    other = {**weights, "cls.predictions.decoder.bias": torch.ones(37)}
    with pytest.raises(ValueError, match="predictions.bias and cls.predictions.decoder.bias should be the same weight"):
        convert_checkpoint("bert", theirs.config, other)
    *_, report = convert_checkpoint("bert", theirs.config, {**weights, "extra.weight": torch.ones(1)})
    assert report.unused["extra.weight"] == "unknown"
    llama = original("LlamaForCausalLM", **TINY)
    deeper = {**llama.state_dict(), "model.layers.1.mlp.up_proj.weight": torch.ones(20, 48)}
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight of shape .* which the model does not have"):
        convert_checkpoint("llama", llama.config, deeper)
    whole = {**llama.state_dict(), "model.norm.weight": torch.ones(48, dtype=torch.int8)}
    with pytest.raises(ValueError, match="model.norm.weight .* is of torch.int8: quantised weights cannot be converted"):
        convert_checkpoint("llama", llama.config, whole)
    fused = original("GPTNeoXForCausalLM", **TINY)
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    with pytest.raises(ValueError, match=rf"{name} has the surprising shape \(5, 48\)"):
        convert_checkpoint("gpt_neox", fused.config, {**fused.state_dict(), name: torch.ones(5, 48)})
    turned = original("RoFormerModel", **TINY).state_dict()
    turned["encoder.embed_positions.weight"] = torch.ones(16, 8)
    with pytest.raises(ValueError, match="does not hold the sines and cosines of RoPE"):
        convert_checkpoint("roformer", {**TINY, "model_type": "roformer"}, turned)


@pytest.mark.parametrize("name", ["GPT_NeoX", "gpt-neox"])
def test_names_of_sources(name: str) -> None:
    """Dashes, underscores and capitals do not matter; an unknown name is refused with all that are known."""
    theirs = original("GPTNeoXForCausalLM", **TINY)
    assert convert_checkpoint(name, theirs.config, theirs.state_dict())[2].source == "gpt_neox"
    with pytest.raises(ValueError, match="model_type='opt' cannot be converted; one of llama.*xlnet can"):
        convert_checkpoint("opt", theirs.config, theirs.state_dict())


def test_command(source: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what became of each weight; what goes wrong ends it with one line and an exit code."""
    main(["convert", str(source), str(tmp_path / "output")])
    printed = capsys.readouterr().out
    assert "used: model.embed_tokens.weight -> model.embed_tokens.weight" in printed
    assert "llama became RelPosDecoderForCausalLM: 12 weights used, 0 unused, 0 missing" in printed
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    assert config["model_type"] == "relpos_decoder" and config["architectures"] == ["RelPosDecoderForCausalLM"]
    for words in ([str(source), str(tmp_path / "output")], [str(tmp_path / "nowhere"), str(tmp_path / "new")]):
        with pytest.raises(SystemExit, match="^error: "):
            main(["convert", *words])
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_command_in_a_process(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "hf_relpos", "convert", str(source), str(tmp_path / "output")]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and "12 weights used" in done.stdout
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "name, fields, message",
    [
        (
            "FalconForCausalLM",
            {"alibi": True, "hidden_size": 48, "num_attention_heads": 6},
            "alibi=True .* rounded to bfloat16",
        ),
        (
            "ElectraForMaskedLM",
            {"embedding_size": 24, "hidden_size": 48, "num_attention_heads": 6},
            "embedding_size=24 cannot",
        ),
        ("GPT2LMHeadModel", {"n_embd": 48, "n_head": 6, "resid_pdrop": 0.5}, "one hidden_dropout serves both"),
        ("GPT2LMHeadModel", {"n_embd": 48, "n_head": 6, "scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
        ("MptForCausalLM", {"d_model": 48, "n_heads": 6, "attn_config": {"clip_qkv": 3.0}}, "clip_qkv=3.0 cannot"),
    ],
)
def test_what_newer_sources_cannot_say(name: str, fields: dict, message: str) -> None:
    config = getattr(transformers, name).config_class(**fields)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(config.model_type, config, {})


def test_gates_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="model_type='wavlm' cannot be converted: its gates"):
        convert_checkpoint("wavlm", {}, {})


def test_a_disk_that_is_full_leaves_nothing_and_ends_with_one_line(source, monkeypatch):
    def full(self, folder):
        pathlib.Path(folder, "model.safetensors").write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(SystemExit, match="error: .*output could not be written: .*No space left"):
        main(["convert", str(source), str(source.parent / "output")])
    assert [path.name for path in source.parent.iterdir()] == [source.name]
