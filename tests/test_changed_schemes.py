"""Trained models whose position scheme, or a field that others follow from, is another when they are loaded."""

import contextlib
import itertools
import json
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import ModelCard
from matrix import LANGUAGE_MODELS
from matrix import ROWS
from matrix import SIZES
from matrix import Case
from matrix import cases
from matrix import ids_of
from matrix import sharpen
from runs import write_config
from safetensors.torch import load_file
from transformers import AutoConfig

from hf_relpos import SCHEMES
from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos import RelPosSeq2SeqForConditionalGeneration
from hf_relpos.model import configuration_changes as changes
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.model_card import write_model_card
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.model_setup import check_block_size
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run

SAME_SIZE: dict[str, dict[str, Any]] = {"t5": {"num_buckets": 8, "max_distance": 10}, "learned_bias": {"max_distance": 7}}
"""Parameters by which different schemes have tables of one shape and of one name in the scheme."""
DECODER_KINDS = ["nope", "rope", "pope", "t5", "transformer_xl", "fire", "cope", "fox", "learned_absolute", "rope+t5"]
"""None, rotary without and with weights, bias, vectors, dense without and with products, gates, absolute, two in one."""
ENCODER_KINDS = ["rope", "alibi", "t5", "shaw", "dape", "deberta", "sinusoidal", "learned_absolute"]
CHAIN = ["rope", "nope", "fox", "t5", "rope", "learned_absolute", "cope", "pope", "transformer_xl", "rope+fox", "nope"]
"""Each kind of scheme of decoders as what is changed, and as what it is changed to."""


def parameters_of(scheme: str | list[str]) -> dict[str, Any]:
    if isinstance(scheme, list):
        return {part: parameters_of(part) for name in scheme for part in name.split("+")}
    return SAME_SIZE.get(scheme) or ROWS[scheme].variants[0]


def model_of(scheme: Any, family: str = "decoder", **fields: Any) -> Any:
    config = Case(family, scheme, parameters_of(scheme)).config(num_hidden_layers=3, **fields)
    return sharpen(LANGUAGE_MODELS[family](config)).eval()


def save(model: Any, folder: pathlib.Path) -> pathlib.Path:
    """Save a model without the code that goes with it, which takes longer than all else."""
    with mock.patch.object(type(model), "_auto_class", None), mock.patch.object(type(model.config), "_auto_class", None):
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs."""
    logger = logging.getLogger("transformers")
    with mock.patch.object(logger, "propagate", True), caplog.at_level(logging.WARNING):
        yield caplog


def position_weights(model: Any) -> set[str]:
    return {name for name, _ in model.named_parameters() if "position_schemes." in name}


def assert_kept_and_new(loaded: Any, report: dict[str, Any], before: dict[str, torch.Tensor], new: set[str]) -> None:
    """All weights are those of before but the new ones, which are reported, filled and not what the folder had."""
    after = loaded.state_dict()
    assert report["missing_keys"] | {name for name, *_ in report["mismatched_keys"]} == new
    assert all(torch.equal(after[name], before[name]) for name in after.keys() - new)
    assert all(torch.isfinite(after[name]).all() for name in new)


def test_no_scheme_has_a_weight_of_the_name_of_another() -> None:
    """Over all pairs of schemes in a model: names are disjoint, so nothing can be loaded from one into the other."""
    names: dict[str, set[str]] = {}
    for given in cases():
        with torch.device("meta"):
            names.setdefault(given.values[0].scheme, set()).update(position_weights(given.values[0].model()))
    for one, other in itertools.combinations(names, 2):
        assert names[one].isdisjoint(names[other]), (one, other)
    own = {name.split(".")[3] for found in names.values() for name in found}
    assert own.isdisjoint(SCHEMES), "a weight named like a scheme would hide an old name"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[pathlib.Path, Any]]:
    """A folder and a model of each kind of scheme, of encoders with a prefix."""
    root = tmp_path_factory.mktemp("kinds")
    models = {scheme: model_of(scheme) for scheme in DECODER_KINDS}
    models |= {f"encoder-{scheme}": model_of(scheme, "encoder") for scheme in ENCODER_KINDS}
    return {name: (save(model, root / name), model) for name, model in models.items()}


PAIRS = [("decoder", *pair) for pair in itertools.permutations(DECODER_KINDS, 2)]
PAIRS += [("encoder", *pair) for pair in itertools.permutations(ENCODER_KINDS, 2)]


@pytest.mark.parametrize("family, before, after", PAIRS)
def test_another_scheme_begins_anew(folders: dict[str, Any], family: str, before: str, after: str) -> None:
    """All other weights are kept, and the model computes what they and its new positions give."""
    folder, model = folders[before if family == "decoder" else f"encoder-{before}"]
    given = {"position_scheme": after, "position_parameters": parameters_of(after), "attn_implementation": "eager"}
    loaded, report = type(model).from_pretrained(folder, **given, output_loading_info=True)
    assert loaded.config.position_scheme == after
    assert_kept_and_new(loaded, report, model.state_dict(), position_weights(loaded))
    assert report["unexpected_keys"] == position_weights(model)
    same = type(model)(loaded.config).eval()
    same.load_state_dict(loaded.state_dict())
    assert torch.equal(loaded(ids_of()).logits, same(ids_of()).logits)


def train_lm(folder: pathlib.Path, name: str, *argv: str, **settings: Any) -> pathlib.Path:
    """Make a run of one step that learns nothing; return its folder."""
    still = {"max_steps": 1, "learning_rate": 0.0, "do_train": True, "sample_tokens": 0, "logging_strategy": "no"}
    run(prepare([write_config(folder, **still | settings), *argv, "--output_dir", str(folder / name)]))
    return folder / name


def weights_in(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_train_lm_goes_on_with_another_scheme(tmp_path: pathlib.Path, logged: pytest.LogCaptureFixture) -> None:
    """From kind to kind: all other weights are kept, one line says what changes, and the card names model and change."""
    old = train_lm(tmp_path, "0", position_scheme=CHAIN[0])
    for number, (before, after) in enumerate(itertools.pairwise(CHAIN), 1):
        changes.logger.warning_once.cache_clear()
        logged.clear()
        new = train_lm(tmp_path, str(number), "--model_name_or_path", str(old), "--position_scheme", after)
        told = f"position_scheme={after!r} takes the place of {before!r}"
        assert sum(told in message for message in logged.messages) == 1
        kept, found = weights_in(old), weights_in(new)
        assert all(torch.equal(found[name], kept[name]) for name in kept.keys() & found.keys())
        assert all("position_schemes." in name for name in kept.keys() ^ found.keys())
        assert json.loads((new / "config.json").read_text())["position_scheme"] == after
        card = (new / "README.md").read_text()
        assert (
            f"trained further from `{old.name}` (a folder" in card
            and f"`position_scheme` from {before!r} to {after!r}" in card
        )
        old = new


def test_the_card_names_the_model_of_the_hub(tmp_path: pathlib.Path) -> None:
    """That of the parent's card, where the parent is a folder: a path is no name of the Hub."""
    parent = train_lm(tmp_path, "parent")
    assert "base_model" not in (parent / "README.md").read_text()
    (parent / "README.md").write_text("---\nbase_model: me/model\n---\n")
    child = train_lm(tmp_path, "child", "--model_name_or_path", str(parent), "--position_scheme", "nope")
    assert ModelCard.load(child / "README.md").data.to_dict()["base_model"] == "me/model"
    record = json.loads((child / "run_arguments.json").read_text())
    record["model"]["model_name_or_path"], record["start"] = "me/other", {"model_commit": "0" * 40}
    (child / "run_arguments.json").write_text(json.dumps(record))
    card = ModelCard.load(write_model_card(child))
    assert card.data.to_dict()["base_model"] == "me/other" and "trained further from `me/other`." in card.text


LENGTHS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "other theta": ({}, {"position_parameters": {"rope_theta": 5e5}}, 64),
    "yarn goes by the old length": ({}, {"position_parameters": {"rope_type": "yarn", "factor": 2.0}}, 32),
    "a relative one from a table": ({"position_scheme": "learned_absolute"}, {"position_scheme": "alibi"}, 64),
    "a new table": ({}, {"position_scheme": "learned_absolute"}, 64),
    "other layers": ({}, {"position_scheme": ["nope", "rope"]}, 64),
}


@pytest.mark.parametrize("saved, given, length", LENGTHS.values(), ids=LENGTHS)
def test_longer_blocks(tmp_path: pathlib.Path, saved: dict[str, Any], given: dict[str, Any], length: int) -> None:
    """A model that goes on with longer blocks is made for them, unless its scheme goes by the old length."""
    RelPosDecoderConfig(**SIZES | saved, max_position_embeddings=32).save_pretrained(tmp_path)
    argv = [
        word for name, value in given.items() for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value))
    ]
    arguments, *_ = parse_arguments(["--model_name_or_path", str(tmp_path), *argv])
    config = build_config(arguments, 64)
    assert config.trained_length == length
    assert check_block_size(config, 64) == 64
    with pytest.raises(ValueError, match="at most 32") if saved else contextlib.nullcontext():
        arguments, *_ = parse_arguments(["--model_name_or_path", str(tmp_path)])
        check_block_size(build_config(arguments, 64), 64)


def test_the_change_is_told_once(folders: dict[str, Any], logged: pytest.LogCaptureFixture) -> None:
    """One message lists what is new and what of the folder is not used."""
    RelPosDecoderForCausalLM.from_pretrained(folders["t5"][0], position_scheme="learned_bias")
    (told,) = [message for message in logged.messages if "position_schemes" in message]
    assert re.findall(r"position_schemes\.(\S+) +\| (\w+)", re.sub(r"\{0, 1, 2\}", "*", told)) == [
        ("*.t5.bias", "UNEXPECTED"),
        ("*.learned_bias.bias", "MISSING"),
    ]


def test_layers_keep_what_is_theirs(tmp_path: pathlib.Path) -> None:
    """Of a list, layers whose scheme stays keep tables and parameters, also when others are added to it or leave it."""
    model = model_of(["t5", "learned_bias", "t5"])
    folder = save(model, tmp_path)
    load = RelPosDecoderForCausalLM.from_pretrained
    loaded, report = load(folder, position_scheme=["t5", "t5", "rope"], output_loading_info=True)
    assert loaded.config.position_parameters == {"t5": SAME_SIZE["t5"]}
    assert_kept_and_new(loaded, report, model.state_dict(), {"model.position_schemes.1.t5.bias"})
    loaded, report = load(folder, position_scheme=["rope", "learned_bias", "t5"], output_loading_info=True)
    assert_kept_and_new(loaded, report, model.state_dict(), set())
    loaded, report = load(folder, position_scheme="t5", output_loading_info=True)
    assert loaded.config.position_parameters == SAME_SIZE["t5"]
    assert_kept_and_new(loaded, report, model.state_dict(), {"model.position_schemes.1.t5.bias"})


def test_what_layers_share_is_not_what_one_owns(tmp_path: pathlib.Path) -> None:
    model = model_of("t5")
    folder = save(model, tmp_path)
    loaded, report = RelPosDecoderForCausalLM.from_pretrained(folder, share_positions="model", output_loading_info=True)
    assert_kept_and_new(loaded, report, model.state_dict(), {"model.position_schemes.shared.t5.bias"})


def test_tables_of_another_size_begin_anew(tmp_path: pathlib.Path, logged: pytest.LogCaptureFixture) -> None:
    """Of the same scheme too; a weight that is no position stays a refusal."""
    model = model_of("shaw")
    folder = save(model, tmp_path)
    given = {"position_parameters": {"max_distance": 9, "values": False}}
    loaded, report = RelPosDecoderForCausalLM.from_pretrained(folder, **given, output_loading_info=True)
    assert_kept_and_new(loaded, report, model.state_dict(), position_weights(loaded))
    assert len([message for message in logged.messages if "Reinit due to size mismatch" in message]) == 1
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        RelPosDecoderForCausalLM.from_pretrained(folder, vocab_size=40, **given)


PARAMETERS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "one for another": ("t5", {"num_buckets": 8}, "alibi", {}),
    "one stays": ("rope", {"rope_theta": 50.0}, "rope", {"rope_theta": 50.0}),
    "joined": ("rope", {"rope_theta": 50.0}, "alibi+rope", {"rope": {"rope_theta": 50.0}}),
    "parted": ("rope+t5", {"rope": {"rope_theta": 50.0}, "t5": {"num_buckets": 8}}, "t5", {"num_buckets": 8}),
    "of some layers": ("rope", {"rope_theta": 50.0}, ["rope", "nope"], {"rope": {"rope_theta": 50.0}}),
    "of all layers": (["rope", "t5"], {"rope": {"rope_theta": 50.0}, "t5": {"num_buckets": 8}}, "rope", {"rope_theta": 50.0}),
}


@pytest.mark.parametrize("before, parameters, after, wanted", PARAMETERS.values(), ids=PARAMETERS)
def test_parameters_stay_with_their_scheme(
    before: Any, parameters: dict[str, Any], after: Any, wanted: dict[str, Any]
) -> None:
    """Those of schemes that are left stay; those of the others go, instead of being refused."""
    saved = RelPosDecoderConfig(**SIZES, position_scheme=before, position_parameters=parameters).to_dict()
    assert RelPosDecoderConfig.from_dict(dict(saved), position_scheme=after).position_parameters == wanted
    given = {"position_scheme": "shaw", "position_parameters": {"max_distance": 3}}
    assert RelPosDecoderConfig.from_dict(dict(saved), **given).position_parameters == {"max_distance": 3}


FOLLOWING: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "window": (RelPosDecoderConfig, {"mem_len": 8}, {"mem_len": 4}, {"sliding_window": 5}),
    "window of its own": (RelPosDecoderConfig, {"mem_len": 8, "sliding_window": 6}, {"mem_len": 4}, {"sliding_window": 6}),
    "no window": (RelPosDecoderConfig, {"mem_len": 8, "sliding_window": None}, {"mem_len": 4}, {"sliding_window": None}),
    "heads": (RelPosDecoderConfig, {}, {"num_attention_heads": 6}, {"head_dim": 4, "num_key_value_heads": 6}),
    "a head of its own size": (RelPosDecoderConfig, {"head_dim": 10}, {"num_attention_heads": 6}, {"head_dim": 10}),
    "fewer keys": (RelPosDecoderConfig, {"num_key_value_heads": 1}, {"num_attention_heads": 6}, {"num_key_value_heads": 1}),
    "width": (
        RelPosDecoderConfig,
        {"intermediate_size": None},
        {"hidden_size": 48},
        {"head_dim": 16, "intermediate_size": 192},
    ),
    "an inner width of its own": (RelPosDecoderConfig, {}, {"hidden_size": 48}, {"intermediate_size": 28}),
    "scaled": (RelPosDecoderConfig, {}, {"position_scheme": "sinusoidal"}, {"scale_embedding": True}),
    "not scaled": (
        RelPosEncoderConfig,
        {"position_scheme": "sinusoidal"},
        {"position_scheme": "t5"},
        {"scale_embedding": False},
    ),
    "scaled on purpose": (
        RelPosDecoderConfig,
        {"scale_embedding": True},
        {"position_scheme": "t5"},
        {"scale_embedding": True},
    ),
    "kinds of layers": (RelPosDecoderConfig, {"mem_len": 4}, {"num_hidden_layers": 1}, {"layer_types": ["sliding_attention"]}),
    "depth": (RelPosSeq2SeqConfig, {}, {"num_hidden_layers": 5}, {"num_decoder_layers": 5}),
    "a depth of its own": (
        RelPosSeq2SeqConfig,
        {"num_decoder_layers": 3},
        {"num_hidden_layers": 5},
        {"num_decoder_layers": 3},
    ),
    "first token": (RelPosSeq2SeqConfig, {}, {"pad_token_id": 3}, {"decoder_start_token_id": 3}),
    "both stacks": (
        RelPosSeq2SeqConfig,
        {"position_scheme": "t5", "position_parameters": {"num_buckets": 8}},
        {"position_scheme": "alibi"},
        {"encoder_position_scheme": "alibi", "decoder_position_scheme": "alibi", "encoder_position_parameters": {}},
    ),
    "one stack": (
        RelPosSeq2SeqConfig,
        {"position_scheme": "t5", "position_parameters": {"num_buckets": 8}, "decoder_position_scheme": "rope"},
        {"position_scheme": "alibi"},
        {"encoder_position_scheme": "alibi", "decoder_position_scheme": "rope", "encoder_position_parameters": {}},
    ),
    "a stack of its own": (
        RelPosSeq2SeqConfig,
        {"position_scheme": "t5", "position_parameters": {"num_buckets": 8}},
        {"encoder_position_scheme": "alibi"},
        {"decoder_position_parameters": {"num_buckets": 8}, "encoder_position_parameters": {}},
    ),
}


@pytest.mark.parametrize("kind, saved, given, wanted", FOLLOWING.values(), ids=FOLLOWING)
def test_what_follows_from_a_field_follows_anew(kind: Any, saved: dict[str, Any], given: dict[str, Any], wanted: Any) -> None:
    """A field that was derived when the folder was saved follows what is given at loading; one that was chosen stays."""
    file = json.loads(kind(**SIZES | saved).to_json_string())
    found = kind.from_dict(file, **given)
    assert {name: getattr(found, name) for name in wanted} == wanted


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "keys of heads": (
        RelPosDecoderConfig,
        {"num_attention_heads": 6, "num_key_value_heads": 2},
        {"num_attention_heads": 3},
        "=2 does not divide 3 ",
    ),
    "width of heads": (RelPosDecoderConfig, {}, {"num_attention_heads": 5}, "does not divide hidden_size=24"),
    "layers of a list": (
        RelPosDecoderConfig,
        {"position_scheme": ["t5", "rope"]},
        {"num_hidden_layers": 3},
        "lists 2 schemes",
    ),
    "memory": (RelPosDecoderConfig, {"mem_len": 4}, {"position_scheme": "sinusoidal"}, "is refused for mem_len=4"),
    "memory of overlaps": (RelPosEncoderConfig, {"mem_len": 4, "reuse_len": 2}, {"mem_len": 0}, "reuse_len=2 needs a memory"),
    "clusters": (RelPosDecoderConfig, {"cutoffs": [30]}, {"vocab_size": 20}, r"cutoffs=\[30\] must rise"),
    "query stream": (
        RelPosEncoderConfig,
        {"query_stream": True},
        {"position_scheme": "sinusoidal"},
        "refused for a query stream",
    ),
}


@pytest.mark.parametrize("kind, saved, given, reason", REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused(kind: Any, saved: dict[str, Any], given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kind.from_dict(kind(**SIZES | saved).to_dict(), **given)


def test_stacks_of_an_encoder_decoder(tmp_path: pathlib.Path) -> None:
    """The stack whose scheme stays keeps its tables."""
    fields = {"position_scheme": "t5", "position_parameters": SAME_SIZE["t5"]}
    model = sharpen(RelPosSeq2SeqForConditionalGeneration(RelPosSeq2SeqConfig(**SIZES | fields)))
    given = {"decoder_position_scheme": "learned_bias", "decoder_position_parameters": SAME_SIZE["learned_bias"]}
    kind = RelPosSeq2SeqForConditionalGeneration
    loaded, report = kind.from_pretrained(save(model, tmp_path), **given, output_loading_info=True)
    new = {f"model.decoder.position_schemes.{layer}.learned_bias.bias" for layer in range(2)}
    assert_kept_and_new(loaded, report, model.state_dict(), new)


CHANGES: dict[str, list[str]] = {
    "scheme": ["--position_scheme", "alibi"],
    "layers": ["--position_scheme", '["rope", "rope", "t5"]'],
    "parameters": ["--position_parameters", '{"t5": {"num_buckets": 6}}'],
    "owner": ["--share_positions", "model"],
    "memory": ["--mem_len", "6"],
}


@pytest.mark.parametrize("words", CHANGES.values(), ids=CHANGES)
def test_training_goes_on_from_what_from_pretrained_loads(folders: dict[str, Any], words: list[str]) -> None:
    """One policy: the arguments of train_lm.py make the configuration that `from_pretrained` makes of the same fields."""
    folder, _ = folders["rope+t5"]
    arguments, *_ = parse_arguments(["--model_name_or_path", str(folder), *words])
    wanted = AutoConfig.from_pretrained(folder, **arguments.config_fields())
    found = build_config(arguments, None)
    assert found.to_dict() == wanted.to_dict()
    assert found.to_dict() != AutoConfig.from_pretrained(folder).to_dict()


def numbered(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under the names of version 0.1.0: the schemes of a stack were numbered in the order of its layers."""
    names = [name.split("position_schemes.")[1].split(".") for name in state if "position_schemes." in name]
    places = list(dict.fromkeys(".".join(parts[:2]) for parts in names))
    old = {f"position_schemes.{place}.": f"position_schemes.{number}." for number, place in enumerate(places)}
    return {
        next((name.replace(today, before) for today, before in old.items() if today in name), name): weight
        for name, weight in state.items()
    }


@pytest.mark.parametrize("scheme", ["t5", ["t5", "rope+t5", "shaw"]], ids=str)
def test_a_checkpoint_with_old_names_resumes(scheme: Any) -> None:
    """Trainer resumes by `load_state_dict`, which finds old names too, in the order in which the optimizer's state had them."""
    model = model_of(scheme)
    state, old = model.state_dict(), numbered(model.state_dict())
    assert not position_weights(model) & old.keys()
    layers = [name.split("position_schemes.")[1].split(".")[0] for name in old if "position_schemes." in name]
    assert layers == sorted(layers)
    other = RelPosDecoderForCausalLM(model.config)
    other.load_state_dict(old)
    assert all(torch.equal(weight, state[name]) for name, weight in other.state_dict().items())


def test_parameters_that_change_the_meaning_of_tables_warn(tmp_path: pathlib.Path) -> None:
    """Once and by name, for any scheme; the same parameters are silent."""
    for name, before, after in (("kerple", "log", "power"), ("t5", 80, 100)):
        own = "kernel" if name == "kerple" else "max_distance"
        config = RelPosDecoderConfig(**{**SIZES, "position_scheme": name, "position_parameters": {own: before}})
        config.save_pretrained(tmp_path / name)
        with mock.patch.object(changes.logger, "warning_once") as warned:
            type(config).from_pretrained(tmp_path / name, position_parameters={own: before})
            type(config).from_pretrained(tmp_path / name, position_scheme=name, position_parameters={own: before})
            assert not warned.called
            type(config).from_pretrained(tmp_path / name, position_scheme=name, position_parameters={own: after})
        assert repr({own: after}) in warned.call_args.args[0] and "keep what they have learned" in warned.call_args.args[0]


def test_other_heads_for_trained_projections_warn(tmp_path: pathlib.Path) -> None:
    RelPosDecoderConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, position_scheme="rope").save_pretrained(
        tmp_path
    )
    with mock.patch.object(changes.logger, "warning_once") as warn:
        RelPosDecoderConfig.from_pretrained(tmp_path, num_attention_heads=2)
        warn.assert_not_called()
        RelPosDecoderConfig.from_pretrained(tmp_path, num_attention_heads=4)
    assert "num_attention_heads=4 takes the place of 2" in warn.call_args[0][0]
