"""Arguments of `train_lm.py`: numbers of YAML, lists, ranges, and the help."""

import json
import pathlib
import re
from functools import partial
from typing import Any

import pytest
import torch
from matrix import SIZES
from runs import write_config

from hf_relpos import RelPosDecoderConfig
from hf_relpos.training.argument_checks import refuse_numbers
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.command_line import EXAMPLES
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.run import main
from hf_relpos.training.run import prepare
from hf_relpos.training.settings_file import parse_list
from hf_relpos.training.settings_file import parse_mapping
from hf_relpos.training.settings_file import parse_yaml


@pytest.fixture
def config(tmp_path):
    return partial(write_config, tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("-2.5e+1", -25.0),
        (".5", 0.5),
        ("3", 3),
        ("010", 10),
        ("1_000", 1000),
        ("[1e-6, {a: 1e4}]", [1e-6, {"a": 1e4}]),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("true", True),
        ("null", None),
        ('{"a": [1, "b"], "c": {"d": 5e5}}', {"a": [1, "b"], "c": {"d": 5e5}}),
    ],
)
def test_yaml_means_what_it_says(text, value):
    """YAML 1.1 reads 1e-5 as a word, 1:30 as 90, 010 as 8, and a day as a date that no argument takes."""
    assert parse_yaml(text) == value and type(parse_yaml(text)) is type(value)


def test_numbers_everywhere(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "learning_rate: 1e-5\nmax_steps: 1e3\nweight_decay: 1E-2\nlr_scheduler_type: cosine_with_min_lr\nrun_name: 2024-01-01\n"
        "lr_scheduler_kwargs: {min_lr: 1e-6}\nposition_parameters: {rope_theta: 1e4}\nreport_to: none\n"
        "config_overrides:\n  layer_norm_eps: 1e-6\n  cutoffs: [10, 20]\n"
    )
    argv = ["--config_overrides", "initializer_range=2e-2,vocab_size=300,hidden_dropout=1e-1", "--eval_steps", "1e2"]
    model, data, run = parse_arguments([str(path), *argv])
    config = build_config(model, data.block_size)
    assert (run.learning_rate, run.max_steps, run.weight_decay, run.eval_steps) == (1e-5, 1000, 0.01, 100)
    assert run.lr_scheduler_kwargs == {"min_lr": 1e-6} and run.run_name == "2024-01-01"
    assert (config.layer_norm_eps, config.initializer_range, config.hidden_dropout) == (1e-6, 2e-2, 0.1)
    assert config.cutoffs == [10, 20] and config.position_parameters["rope_theta"] == 1e4
    with pytest.raises(SystemExit):
        parse_arguments(["--max_steps", "1.5"])


def test_lists_on_the_command_line():
    assert parse_mapping("x", "cutoffs=[10,20],vocab_size=300") == {"cutoffs": [10, 20], "vocab_size": 300}
    assert parse_mapping("x", "a=[1,2], b={c: [3,4]}") == {"a": [1, 2], "b": {"c": [3, 4]}}
    assert parse_mapping("x", "{rope_theta: 1e4}") == {"rope_theta": 1e4}
    assert parse_list("x", "[rope, nope]") == parse_list("x", '["rope", "nope"]') == ["rope", "nope"]
    for given in ("hidden_size", "{a: [}", "[1]"):
        with pytest.raises(ValueError, match="^x='.*' is neither JSON nor key=value,..."):
            parse_mapping("x", given)
    with pytest.raises(ValueError, match="x='rope' is not a list"):
        parse_list("x", "rope")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("learning_rate", -1, "at least 0"),
        ("learning_rate", "nan", "at least 0"),
        ("muon_learning_rate", -0.1, "at least 0"),
        ("position_learning_rate", -0.1, "at least 0"),
        ("max_steps", 0, "at least 1, or -1 for num_train_epochs"),
        ("max_steps", -2, "at least 1, or -1 for num_train_epochs"),
        ("num_train_epochs", 0, "above 0"),
        ("gradient_accumulation_steps", 0, "at least 1"),
        ("save_steps", 0, "above 0"),
        ("adam_beta1", 1, "at least 0 and below 1"),
        ("label_smoothing_factor", 1.5, "at least 0 and below 1"),
        ("weight_decay", -1, "at least 0"),
        ("max_grad_norm", -1, "at least 0"),
        ("sample_tokens", -1, "at least 0"),
        ("per_device_train_batch_size", 0, "at least 1"),
        ("mlm_probability", 1, "above 0 and below 1"),
        ("seed", -1, "at least 0 and below"),
    ],
)
def test_numbers_that_no_run_can_use_are_refused_before_anything_is_written(config, tmp_path, name, value, allowed):
    with pytest.raises(SystemExit, match=rf"^error: {name}={float(value):g}\S* must be {allowed}") as stop:
        main([config(), f"--{name}", str(value)])
    assert "\n" not in str(stop.value) and not (tmp_path / "out").exists()


def test_the_defaults_are_within_their_ranges():
    given = parse_arguments(["--report_to", "none"])
    assert refuse_numbers(*given) is None
    given[-1].learning_rate = -1.0
    with pytest.raises(ValueError, match="learning_rate=-1"):
        refuse_numbers(*given)


def test_an_error_of_a_library_in_the_run_is_one_line_and_blocks_nothing(config, tmp_path):
    bad = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}
    with pytest.raises(SystemExit, match="^error: lr_end .1.0. must be smaller than initial lr"):
        main([config(**bad)])
    main([config(learning_rate=0.02)])
    assert (tmp_path / "out" / "all_results.json").is_file()


def test_half_precision_that_is_asked_for_wins_over_that_which_is_allowed(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    run = RunArguments(fp16=True, bf16_if_fast=True, report_to="none")
    assert run.fp16 and not run.bf16
    assert RunArguments(bf16_if_fast=True, report_to="none").bf16


def test_help_has_groups_examples_and_one_spelling_a_flag(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    flags = re.findall(r"^  (--\w+)", text, flags=re.MULTILINE)
    assert len(flags) == len(set(flags)) > 130 and not re.search(r"--[a-z]+-[a-z]", text) and "--no_" not in text
    titles = re.findall(r"^(\S.*):$", text, flags=re.MULTILINE)
    assert titles[1:4] == ["model", "text", "run"] and titles[-1] == "examples" and len(titles) > 10
    assert all(len(line) < 320 for line in text.splitlines())


def test_every_example_of_the_help_is_a_command_line():
    lines = re.findall(r"^  python train_lm.py (.*)$", EXAMPLES, flags=re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        refuse_numbers(*parse_arguments([*line.split(), "--report_to", "none"]))


@pytest.mark.parametrize(("given", "spelled"), [("max-steps", "max_steps"), ("no_log_on_each_node", "log_on_each_node")])
def test_another_spelling_is_answered_with_the_one_there_is(given, spelled):
    with pytest.raises(ValueError, match=f"unknown argument '{given}'; did you mean .*'{spelled}'"):
        parse_arguments([f"--{given}", "3"])


def test_a_misspelled_run_makes_no_folder(config, tmp_path):
    with pytest.raises(ValueError, match="did you mean"):
        prepare([config(learning_rates=1)])
    assert not (tmp_path / "out").exists()


NUMBERS = [
    ("hidden_size", 48.0, 48),
    ("hidden_size", "4.8e1", 48),
    ("hidden_size", 48.5, "a whole number"),
    ("hidden_size", True, "a whole number"),
    ("hidden_size", "wide", "a whole number"),
    ("hidden_size", float("inf"), "a whole number"),
    ("sliding_window", 4.0, 4),
    ("sliding_window", "auto", None),
    ("sliding_window", False, "a whole number or 'auto' or null"),
    ("layer_norm_eps", 1, 1.0),
    ("layer_norm_eps", "1e-6", 1e-6),
    ("layer_norm_eps", True, "a number"),
    ("gated_mlp", 1, "true or false"),
    ("cutoffs", [10.0, 20], [10, 20]),
    ("cutoffs", [10.5], "a whole number"),
]


@pytest.mark.parametrize("name, value, wanted", NUMBERS)
def test_numbers_of_fields_are_exact_or_refused(name: str, value: Any, wanted: Any, tmp_path: pathlib.Path) -> None:
    """In settings of a run, which are read from text, and beside a saved configuration."""
    config = RelPosDecoderConfig(**{**SIZES, "attn_implementation": None})
    config.save_pretrained(tmp_path)
    arguments = ModelArguments(model_type="relpos_decoder", config_overrides=json.dumps({name: value}))
    ways = [lambda: build_config(arguments, None), lambda: RelPosDecoderConfig.from_pretrained(tmp_path, **{name: value})]
    for way in ways:
        if isinstance(wanted, str):
            with pytest.raises(ValueError, match=rf"{name}=.* is not allowed: {wanted}$"):
                way()
        else:
            found = getattr(way(), name)
            assert found == wanted and type(found) is type(wanted)


def test_a_field_of_the_model_is_said_to_be_one() -> None:
    with pytest.raises(
        ValueError, match="unknown argument 'hidden_size'; it is a field of the model.*--config_overrides hidden_size="
    ):
        parse_arguments(["configs/decoder_t5.yaml", "--hidden_size", "64"])
    with pytest.raises(ValueError, match="unknown argument 'qqqq'; --help lists all"):
        parse_arguments(["configs/decoder_t5.yaml", "--qqqq", "64"])
