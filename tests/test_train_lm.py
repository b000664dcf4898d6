"""train_lm.py from arguments to the folder that it leaves, in one process on a tiny text."""

import json
import math
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from runs import SMALL
from runs import TEXT
from runs import results
from runs import write_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers import AutoTokenizer
from transformers import trainer_pt_utils

from hf_relpos import SCHEMES
from hf_relpos.__main__ import main as command
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import computes_bf16
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.arguments import read_yaml
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.run import main
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run
from hf_relpos.training.segment_trainer import SegmentTrainer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path):
    """Writes a YAML file with the settings of a tiny run and some others."""
    return partial(write_config, tmp_path)


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# ---- arguments


def test_yaml_inherits_and_the_command_line_wins(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "learning_rate: 1e-3\nmax_steps: 5\nblock_size: 8\nposition_scheme: rope\nconfig_overrides: {hidden_size: 32}\n"
    )
    (tmp_path / "x.yaml").write_text(
        "base: base.yaml\nposition_scheme: [rope, nope]\nposition_parameters: {rope: {rope_theta: 100.0}}\n"
        "max_steps: null\ntrain_file: [a.txt, b.txt]\nconfig_overrides: {num_hidden_layers: 2}\n"
    )
    for given in (str(tmp_path / "x.yaml"),), ("--config", str(tmp_path / "x.yaml")):
        model, data, args = parse_arguments([*given, "--block_size", "16", "--config_overrides", "hidden_size=64"])
        assert model.config_fields() == {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "position_scheme": ["rope", "nope"],
            "position_parameters": {"rope": {"rope_theta": 100.0}},
        }
        assert (data.block_size, data.train_file) == (16, ["a.txt", "b.txt"])
        assert (args.learning_rate, args.max_steps, args.output_dir) == (1e-3, -1, "runs/x")
        assert args.do_train and args.do_eval and args.do_predict
    assert not parse_arguments(["--do_eval", "--report_to", "none"])[2].do_train


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_every_config_file_makes_a_model_configuration(path):
    model, data, _ = parse_arguments([str(path), "--report_to", "none"])
    config = build_config(model, data.block_size)
    family, _, scheme = path.stem.removesuffix("_memory").partition("_")
    assert config.position_scheme == (scheme if scheme in SCHEMES else config.position_scheme)
    assert config.model_type == ("relpos_encoder" if "encoder" in path.stem.split("_") else "relpos_decoder")
    remembers = path.stem.endswith("_memory") or path.stem in ("default", "enwik8_gpu")
    assert (getattr(config, "mem_len", 0) > 0) == remembers


def test_every_scheme_has_a_config_file_for_each_family_that_takes_it():
    for name, scheme in SCHEMES.items():
        for family, use in (("decoder", "causal"), ("encoder", "bidirectional")):
            assert (ROOT / "configs" / f"{family}_{name}.yaml").is_file() == (use not in scheme.refuses)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocksize": 8}, r"tiny\.yaml: unknown argument 'blocksize'; did you mean 'block_size'"),
        ({"position_scheme": "ropes"}, r"ropes"),
        ({"position_scheme": "alibi", "position_parameters": {"slope": 1}}, r"slope"),
        ({"config_overrides": SMALL | {"num_attention_heads": 3}}, r"num_attention_heads=3"),
        (
            {"config_overrides": SMALL | {"hidden_sise": 3}},
            r"RelPosDecoderConfig has no field 'hidden_sise'; did you mean 'hidden_size'",
        ),
        ({"config_overrides": SMALL | {"hidden_size": "big"}}, r"hidden_size='big' is not allowed: a whole number"),
        ({"config_overrides": SMALL | {"vocab_size": 5}}, r"vocab_size=5 is less than the tokenizer's 259 tokens"),
        ({"model_type": "relpos_decode"}, r"unknown model_type='relpos_decode'; one of \['relpos_decoder'"),
        ({"model_name_or_path": "/no/model"}, r"model_name_or_path='/no/model' is neither"),
        ({"train_file": "/no/text.txt"}, r"/no/text\.txt"),
        ({"model_type": "relpos_encoder", "mem_len": 8}, r"mem_len=8 is refused for an encoder: it is trained block by block"),
        ({"block_size": 10_000}, r"text\.txt\): \d+ tokens found, fewer than one block \(block_size=10000\)"),
        ({"resume_from_checkpoint": "true"}, r"holds no checkpoint"),
        ({"resume_from_checkpoint": "/no/checkpoint"}, r"'/no/checkpoint' is neither true, auto nor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_settings_are_named_and_nothing_is_written(config, tmp_path, settings, message):
    path = config(**settings)
    with pytest.raises(ValueError, match=message):
        prepare([path])
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_bad_command_line_and_yaml_files(config, tmp_path):
    with pytest.raises(ValueError, match="unknown argument 'max_step'; did you mean 'max_steps'"):
        parse_arguments([config(), "--max_step", "3"])
    with pytest.raises(ValueError, match=r"cannot read the configuration .*none\.yaml"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match=r"list\.yaml holds \['a'\]"):
        read_yaml(tmp_path / "list.yaml")
    with pytest.raises(ValueError, match="config_overrides='hidden_size' is neither JSON nor"):
        ModelArguments(config_overrides="hidden_size").config_fields()


def test_errors_end_the_program_with_one_line(config):
    result = subprocess.run(
        [sys.executable, "train_lm.py", "--config", config(block_size=10_000)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: training text (text.txt): ")


# ---- a run


def test_a_run_leaves_a_folder_that_describes_and_loads_itself(config, tmp_path, capsys):
    test_file = tmp_path / "test.txt"
    test_file.write_text(TEXT[:500], encoding="utf-8")
    metrics = run(prepare([config(test_file=str(test_file), tokenizer_name="bpe", vocab_size=280)]))
    folder = tmp_path / "out"
    found = results(folder)
    for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
        assert found[f"eval_{name}"] == metrics[f"eval_{name}"] and found[f"test_{name}"] == metrics[f"test_{name}"]
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert {"train_loss", "eval_gzip_bits_per_byte", "eval_xz_bits_per_byte", "eval_sha256"} <= set(found)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("bits per byte", "gzip bits per byte", "validation", "A sample"))

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.use_cache and model.generation_config.eos_token_id == tokenizer.eos_token_id
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert {"rope", "relpos_decoder"} <= set(card.data.tags)
    assert f"{model.num_parameters():,} parameters" in card.text
    assert f"{found['eval_bits_per_byte']:.4f}" in card.text and "$" not in card.text.replace("$ ", "")
    rewritten = (folder / "README.md").read_bytes()
    (folder / "README.md").unlink()
    command(["card", str(folder)])
    assert (folder / "README.md").read_bytes() == rewritten

    validation = tmp_path / "validation.txt"
    validation.write_text(TEXT[int(len(TEXT) * 0.95) :], encoding="utf-8")
    capsys.readouterr()
    command(["evaluate", str(folder), str(validation), "--batch_size", "2"])
    assert f"{found['eval_loss']:.4f}" in capsys.readouterr().out


def test_evaluation_is_exact_and_independent_of_the_batches(config, tmp_path):
    found = []
    for batch in (1, 5):
        job = prepare(
            [
                config(block_size=37),
                "--per_device_eval_batch_size",
                str(batch),
                "--output_dir",
                str(tmp_path / str(batch)),
            ]
        )
        found.append(job.trainer.evaluate())
    nll, hits, count = 0.0, 0, 0
    for row in job.texts["eval"].blocks:
        inputs = {name: row[name][None] for name in ("input_ids", "reset_mask", "attention_mask")}  # the last is padded
        with torch.no_grad():
            logits = job.model.eval()(**inputs).logits[0]
        kept = row["shift_labels"] != -100
        nll += F.cross_entropy(logits[kept], row["shift_labels"][kept], reduction="sum").item()
        hits += (logits.argmax(-1) == row["shift_labels"]).sum().item()
        count += kept.sum().item()
    byte_count = len(job.validation[0]["text"].encode())
    assert count == byte_count + 1
    for metrics in found:
        assert metrics["eval_loss"] == pytest.approx(nll / count, rel=1e-6)
        assert metrics["eval_bits_per_byte"] == pytest.approx(nll / math.log(2) / byte_count, rel=1e-6)
        assert metrics["eval_accuracy"] == pytest.approx(hits / count)


@pytest.mark.parametrize("settings", [{}, {"mem_len": 8}, {"model_type": "relpos_encoder", "position_scheme": "t5"}])
def test_evaluation_keeps_nothing_of_its_text(config, settings, monkeypatch):
    kept = []
    monkeypatch.setattr(trainer_pt_utils.EvalLoopContainer, "add", lambda self, tensors: kept.append(tensors.shape[1:]))
    job = prepare([config(validation_split_percentage=40, **settings)])
    evaluation = job.trainer.evaluate()
    assert set(kept) == {()}  # the losses of batches; neither labels nor logits
    assert evaluation["eval_tokens"] > 100
    assert job.trainer.evaluate()["eval_loss"] == evaluation["eval_loss"]  # the sums begin anew


def test_masked_language_model(config, tmp_path):
    path = config(model_type="relpos_encoder", position_scheme="t5", validation_split_percentage=20)
    first = run(prepare([path]))
    assert "eval_bits_per_byte" not in results(tmp_path / "out")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.pipeline_tag == "fill-mask"
    again = prepare([path, "--do_eval", "--model_name_or_path", str(tmp_path / "out"), "--output_dir", str(tmp_path / "e")])
    for _ in range(2):
        assert again.trainer.evaluate()["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-6)


def test_streaming_and_limits_on_the_number_of_blocks(config, tmp_path):
    source = tmp_path / "data"
    source.mkdir()
    for split in ("train", "validation"):
        rows = [json.dumps({"text": line}) for line in TEXT.splitlines()]
        (source / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    path = config(train_file=None, dataset_name=str(source), streaming=True, max_eval_samples=2)
    metrics = run(prepare([path]))
    assert metrics["eval_tokens"] == 64
    assert metrics["eval_bits_per_byte"] < metrics["eval_loss"] / math.log(2) * 64 / 60
    job = prepare([config(max_train_samples=3), "--output_dir", str(tmp_path / "few")])
    assert len(job.trainer.train_dataset) == 3


# ---- the folder of a run


def test_another_runs_folder_is_refused_and_left_alone(config, tmp_path):
    folder = tmp_path / "out"
    run(prepare([config()]))
    before = contents(folder)
    with pytest.raises(ValueError, match=r"already holds this run; --resume_from_checkpoint auto goes on with it"):
        prepare([config()])
    for changed in ({"learning_rate": 0.02}, {"learning_rate": 0.02, "resume_from_checkpoint": "auto"}):
        with pytest.raises(ValueError, match=r"already holds another run \(learning_rate: 0.01 there, 0.02 here\)"):
            prepare([config(**changed)])
    with pytest.raises(ValueError, match="exclude each other"):
        prepare([config(overwrite_output_dir=True, resume_from_checkpoint="auto")])
    with pytest.raises(SystemExit, match="error: output_dir="):
        main([config()])
    (tmp_path / "text.txt").write_text(TEXT + "more", encoding="utf-8")
    with pytest.raises(ValueError, match=r"already holds another run \(train: .*sha256"):
        prepare([config()])
    assert contents(folder) == before

    (folder / "run_arguments.json").unlink()
    with pytest.raises(ValueError, match="already holds a model or run"):
        prepare([config()])


def test_overwriting_takes_away_what_the_old_run_left(config, tmp_path):
    folder = tmp_path / "out"
    run(prepare([config(save_strategy="steps", save_steps=2)]))
    (folder / "notes.txt").write_text("mine")
    run(prepare([config(overwrite_output_dir=True, learning_rate=0.02, max_steps=1, do_train=True)]))
    assert not list(folder.glob("checkpoint-*"))
    assert (folder / "notes.txt").read_text() == "mine"
    assert "eval_loss" not in results(folder) and "train_loss" in results(folder)


def test_resuming_equals_an_uninterrupted_run_bit_for_bit(config, tmp_path):
    folder, cut = tmp_path / "out", tmp_path / "cut"
    settings = {
        "config_overrides": SMALL | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        "position_scheme": "t5",
        "save_strategy": "steps",
        "save_steps": 2,
        "gradient_accumulation_steps": 2,
    }
    run(prepare([config(**settings, resume_from_checkpoint="auto")]))
    weights = load_file(folder / "model.safetensors")
    shutil.copytree(folder, cut)
    shutil.rmtree(cut / "checkpoint-4")
    for path in cut.glob("*.safetensors"):
        path.unlink()
    run(prepare([config(**settings, output_dir=str(cut), resume_from_checkpoint="auto")]))
    resumed = load_file(cut / "model.safetensors")
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())

    log = [
        entry["loss"] for entry in json.loads((folder / "trainer_state.json").read_text())["log_history"] if "loss" in entry
    ]
    run(prepare([config(**settings, resume_from_checkpoint="auto")]))
    assert all(torch.equal(load_file(folder / "model.safetensors")[name], weight) for name, weight in weights.items())
    assert len(log) == 4


def test_an_encoder_with_memory_is_trained_without(config):
    """One that was converted has some; masked tokens are still learned block by block, by the stock Trainer."""
    fields = {"position_scheme": "xlnet", "config_overrides": SMALL | {"mem_len": 4}}
    job = prepare([config(model_type="relpos_encoder", **fields)])
    assert not isinstance(job.trainer, SegmentTrainer) and job.model.config.mem_len == 4
    run(job)


def test_a_trained_folder_is_gone_on_with(config, tmp_path):
    run(prepare([config(tokenizer_name="bpe", vocab_size=280)]))
    start = ["--model_name_or_path", str(tmp_path / "out"), "--output_dir", str(tmp_path / "next")]
    job = prepare([config(tokenizer_name="bpe", vocab_size=270), *start])
    assert len(job.tokenizer) == 280
    assert torch.equal(
        job.model.get_input_embeddings().weight,
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_input_embeddings().weight,
    )
    changed = prepare([config(), *start, "--config_overrides", "hidden_dropout=0.25", "--mem_len", "8"])
    assert changed.model.config.hidden_dropout == 0.25
    assert (changed.model.config.mem_len, changed.model.config.sliding_window) == (8, 9)
    other = prepare([config(), *start, "--position_scheme", "t5"]).model.state_dict()
    kept = job.model.state_dict()
    assert {name for name in kept if name not in other or not torch.equal(kept[name], other[name])} == set()
    assert {name for name in other if name not in kept} == {f"model.position_schemes.{layer}.t5.bias" for layer in range(2)}
    with pytest.raises(
        ValueError,
        match="has hidden_size=16, norm_type='layer_norm', the arguments ask for hidden_size=48.* 'config_overrides: null'",
    ):
        prepare([config(), *start, "--config_overrides", "hidden_size=48,norm_type=rms_norm"])


def test_a_torch_that_does_not_tell_computes_in_float32(monkeypatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert computes_bf16()
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not computes_bf16()
