"""What a run of `train_lm.py` leaves when it is finished, evaluated again, stopped or diverges."""

import errno
import hashlib
import json
import os
import shutil
import signal
import time
from functools import partial

import pytest
import torch
from runs import SMALL
from runs import results
from runs import write_config
from safetensors.torch import load_file

from hf_relpos.training import folder_lock
from hf_relpos.training import run as run_module
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.folder_lock import hold_folder
from hf_relpos.training.run import main
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run
from hf_relpos.training.run_folder import save_results
from hf_relpos.training.run_folder import start_folder

SAVES = {"save_strategy": "steps", "save_steps": 2}
BEST = SAVES | {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 6}
# Learns, then forgets: the best model is not the last one.
BEST |= {"learning_rate": 3.0, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 6}
AUTO = {"resume_from_checkpoint": "auto"}


@pytest.fixture
def config(tmp_path):
    return partial(write_config, tmp_path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


def model_of(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def steps(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


# ---- the best model


@pytest.mark.parametrize("mem_len", [0, 4])
@pytest.mark.parametrize("metric", ["perplexity", "eval_bits_per_byte", "accuracy"])
def test_the_best_model_by_every_metric_is_kept(config, folder, metric, mem_len):
    job = prepare([config(**BEST, metric_for_best_model=metric, mem_len=mem_len)])
    run(job)
    name = f"eval_{metric.removeprefix('eval_')}"
    log = {entry["step"]: entry[name] for entry in job.trainer.state.log_history if name in entry}
    best = (max if metric == "accuracy" else min)(log, key=log.get)
    assert job.trainer.state.best_model_checkpoint == str(folder / f"checkpoint-{best}")
    assert len(set(log.values())) > 1 and results(folder)[name] == pytest.approx(log[best], rel=1e-6)


def test_a_metric_that_is_not_reported_is_refused(config):
    with pytest.raises(ValueError, match=r"metric_for_best_model='perplexities' is not reported; one of \['loss', 'perpl"):
        prepare([config(**BEST, metric_for_best_model="perplexities")])
    with pytest.raises(ValueError, match=r"'bits_per_byte' is not reported; one of \['loss', 'perplexity', 'accuracy'\]"):
        masked = {"model_type": "relpos_encoder", "position_scheme": "t5", "validation_split_percentage": 20}
        prepare([config(**BEST, **masked, metric_for_best_model="bits_per_byte")])
    with pytest.raises(ValueError, match="'loss' with greater_is_better=True would keep the worst model"):
        prepare([config(**BEST, greater_is_better=True)])


def test_a_schedule_that_watches_a_metric_knows_its_direction():
    for metric, mode in (("accuracy", "max"), ("perplexity", "min"), ("loss", "min")):
        argv = ["--lr_scheduler_type", "reduce_lr_on_plateau", "--metric_for_best_model", metric]
        argv += ["--eval_strategy", "steps", "--eval_steps", "2", "--report_to", "none"]
        assert parse_arguments(argv)[2].lr_scheduler_kwargs["mode"] == mode


# ---- a finished run


@pytest.mark.parametrize("limit", [None, 1])
def test_a_finished_run_keeps_its_best_model(config, folder, limit):
    settings = BEST | AUTO | {"save_total_limit": limit}
    job = prepare([config(**settings)])
    run(job)
    before, found = model_of(folder), results(folder)
    assert job.trainer.state.best_global_step < 6
    again = prepare([config(**settings)])
    assert again.finished
    run(again)
    assert model_of(folder) == before and results(folder)["eval_loss"] == found["eval_loss"]
    if limit is None:  # stopped after its last checkpoint, before the model was written; and moved since
        for name in ("model.safetensors", "trainer_state.json"):
            (folder / name).unlink()
        moved = shutil.copytree(folder, folder.with_name("moved"))
        run(prepare([config(**settings, output_dir=str(moved))]))
        assert model_of(moved) == before
        last = moved / "checkpoint-6" / "trainer_state.json"
        assert json.loads((moved / "trainer_state.json").read_text()) == json.loads(last.read_text())
        other = folder.with_name("other")  # a folder that begins with the end of another run
        elsewhere = {"output_dir": str(other), "resume_from_checkpoint": str(folder / "checkpoint-6")}
        run(prepare([config(**settings | elsewhere)]))
        assert model_of(other) == before and (other / "trainer_state.json").read_text() == last.read_text()
        shutil.rmtree(moved / f"checkpoint-{job.trainer.state.best_global_step}")
        (moved / "trainer_state.json").unlink(missing_ok=True)
        with pytest.raises(ValueError, match="checkpoint-6 is the end of the run, but its best checkpoint .* is gone"):
            prepare([config(**settings, output_dir=str(moved))])


def test_a_run_that_is_only_evaluated_is_the_one_that_was_trained(config, folder):
    run(prepare([config()]))
    found, record = results(folder), (folder / "run_arguments.json").read_bytes()
    metrics = run(prepare([config(), "--do_eval", "--max_steps", "2"]))
    assert metrics["eval_loss"] == found["eval_loss"]
    assert results(folder)["train_loss"] == found["train_loss"] and (folder / "run_arguments.json").read_bytes() == record


def test_a_longer_run_says_what_it_changed(config, folder):
    run(prepare([config(**SAVES)]))
    run(prepare([config(**SAVES, **AUTO, max_steps=6)]))
    record = json.loads((folder / "run_arguments.json").read_text())
    assert record["resumed"] == [{"step": 4, "changed": {"max_steps": [4, 6]}}]
    run(prepare([config(**SAVES, **AUTO, max_steps=8, logging_steps=2)]))
    record = json.loads((folder / "run_arguments.json").read_text())
    assert [entry["step"] for entry in record["resumed"]] == [4, 6]
    with pytest.raises(ValueError, match="already holds another run .dataloader_drop_last: False there, True here"):
        prepare([config(**SAVES, **AUTO, max_steps=10, dataloader_drop_last=True)])


# ---- a broken run


def test_a_diverged_run_ends_with_one_line(config, folder):
    settings = SAVES | {"save_steps": 1, "save_total_limit": 1, "max_steps": 9, "max_grad_norm": 0.0}
    with pytest.raises(SystemExit, match=r"error: training diverged at step \d: .* first in model\.") as stop:
        main([config(**settings, learning_rate=1e25)])
    assert "\n" not in str(stop.value)
    assert not (folder / "all_results.json").exists() and not (folder / "model.safetensors").exists()
    assert "No checkpoint was saved" in str(stop.value) and not any(folder.rglob("*.json"))
    run(prepare([config(**settings)]))  # nothing stands in the way of the corrected run
    assert steps(folder) == [9]


def test_an_evaluation_that_is_not_finite_writes_nothing(config, folder, tmp_path):
    run(prepare([config()]))
    weights = load_file(folder / "model.safetensors")
    job = prepare([config(), "--do_eval", "--model_name_or_path", str(folder), "--output_dir", str(tmp_path / "next")])
    with torch.no_grad():
        next(job.model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="eval_loss is nan: the model gives numbers that are not finite"):
        run(job)
    assert not list((tmp_path / "next").glob("*.json")) and weights


def test_metrics_that_are_no_json_become_null(tmp_path):
    """The perplexity of a loss of 800 is infinite."""
    save_results(tmp_path, "train", {"train_loss": 1.0})
    save_results(tmp_path, "eval", {"eval_perplexity": float("inf"), "eval_loss": 800.0, "eval_source": "text"})
    assert results(tmp_path) == {"train_loss": 1.0, "eval_perplexity": None, "eval_loss": 800.0, "eval_source": "text"}
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_an_overwritten_run_leaves_nothing_in_the_new_ones_folder(config, folder):
    run(prepare([config(**SAVES)]))
    (folder / "notes.txt").write_text("mine")
    sample = (folder / "sample.txt").read_text()
    run(prepare([config(overwrite_output_dir=True, sample_tokens=0)]))
    assert not (folder / "sample.txt").exists() and not steps(folder)
    assert sample not in (folder / "README.md").read_text() and "A sample" not in (folder / "README.md").read_text()
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="would remove '.*out', from which the run starts: choose another output_dir"):
        prepare([config(overwrite_output_dir=True, model_name_or_path=str(folder))])


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["ctrl-c", "full disk"])
@pytest.mark.parametrize("when", [1, 3])
def test_a_stopped_run_ends_with_one_line_and_blocks_nothing(config, folder, monkeypatch, capsys, stop, when):
    def stopping(self, output_dir):
        if output_dir.endswith(f"checkpoint-{when}"):
            raise stop
        save(self, output_dir)

    trainer = run_module.CheckedTrainer
    save = trainer._save_rng_state
    monkeypatch.setattr(trainer, "_save_rng_state", stopping)
    settings = SAVES | {"save_steps": 1, "max_steps": 4}
    with pytest.raises(SystemExit) as ended:
        main([config(**settings)])
    printed = capsys.readouterr().err.splitlines()[-1] if ended.value.code == 130 else str(ended.value)
    assert "\n" not in printed
    if isinstance(stop, KeyboardInterrupt):
        how = f"--resume_from_checkpoint auto goes on from {folder}/checkpoint-2" if when == 3 else "no checkpoint was saved"
        assert printed == f"interrupted: {how}"
    else:
        assert printed == f"error: {folder}/checkpoint-{when} could not be written and was removed: {stop}"
    assert steps(folder) == list(range(1, when))
    monkeypatch.undo()
    corrected = {"resume_from_checkpoint": "auto"} if when == 3 else {"learning_rate": 0.02, "config_overrides": SMALL}
    run(prepare([config(**settings | corrected)]))
    assert steps(folder) == [1, 2, 3, 4]


def test_a_killed_run_without_a_checkpoint_blocks_nothing(config, folder):
    job = prepare([config(**SAVES)])
    start_folder(job.args, job.record)
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "model.safetensors").write_bytes(b"half")
    run(prepare([config(learning_rate=0.02)]))
    assert not steps(folder)


def test_a_folder_that_cannot_be_written_is_named(config, folder):
    job = prepare([config()])
    folder.rmdir()
    folder.write_text("a file")
    with pytest.raises(ValueError, match="output_dir='.*out' cannot be written: .*; choose another --output_dir"):
        run(job)
    folder.unlink()
    folder.mkdir()
    (folder / "run_arguments.json").write_text('{"model": ')
    (folder / "model.safetensors").touch()
    with pytest.raises(ValueError, match="run_arguments.json is damaged"):
        prepare([config()])


# ---- two runs


def test_a_folder_is_written_by_one_run_at_a_time(config, folder):
    job = prepare([config()])
    with hold_folder(folder), pytest.raises(ValueError, match="out' is written by another run just now: wait for it, or"):
        run(job)
    assert not any(folder.iterdir())


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK])
def test_a_folder_without_locks_is_named_once(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    said = []
    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    monkeypatch.setattr(folder_lock.logger, "warning", said.append)
    for _ in range(2):
        with hold_folder(tmp_path / "out"), hold_folder(tmp_path / "out"):
            pass
    (warning,) = said
    assert str(tmp_path / "out") in warning and os.strerror(number) in warning and "two runs" in warning


def test_a_worker_that_outlives_its_run_does_not_hold_the_folder(tmp_path):
    heard, told = os.pipe()
    with hold_folder(tmp_path):
        if (child := os.fork()) == 0:
            os.write(told, b"forked")
            time.sleep(30)
            os._exit(0)
        os.read(heard, 6)
    try:
        with hold_folder(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("settings", "message"), [({}, "already holds this run"), (AUTO, "was written by another run meanwhile")]
)
def test_a_run_that_was_prepared_beside_another_does_not_write_over_it(config, folder, settings, message):
    first, second = prepare([config(**settings)]), prepare([config(**settings)])
    run(first)
    before = model_of(folder)
    with pytest.raises(ValueError, match=message):
        run(second)
    assert model_of(folder) == before
