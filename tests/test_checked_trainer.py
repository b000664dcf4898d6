"""Trainer that stops a diverged run, keeps the best model by every metric, and takes whole checkpoints only."""

import json
import os
import signal
from pathlib import Path

import pytest
import segment_script
import torch
from segments import logged
from segments import make_documents
from segments import make_model
from segments import make_table
from segments import make_trainer
from transformers import TrainerCallback

from hf_relpos.training.best_model import greater_is_better
from hf_relpos.training.checked_trainer import CheckedTrainer
from hf_relpos.training.checked_trainer import Diverged
from hf_relpos.training.checked_trainer import find_not_finite
from hf_relpos.training.checkpoints import DIGESTS
from hf_relpos.training.checkpoints import flaw_of
from hf_relpos.training.checkpoints import last_checkpoint
from hf_relpos.training.checkpoints import write_digests
from hf_relpos.training.segment_trainer import SegmentTrainer

TEXT = make_table(segment_script.TRAINING)
SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 6}


class Breaking(TrainerCallback):
    """Spoils a model after so many steps."""

    def __init__(self, step, spoil):
        self.step, self.spoil = step, spoil

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.spoil(model)


def infinite_weight(model):
    with torch.no_grad():
        model.model.layers[1].attention.v_proj.weight[0, 0] = float("inf")


def huge_weights(model):
    """All finite, but what is computed with them is not."""
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.fill_(1e30)


def infinite_gradient(model):
    model.model.layers[0].attention.o_proj.weight.register_hook(lambda gradient: gradient.fill_(float("inf")))


# ---- a diverged run


@pytest.mark.parametrize("kind", [CheckedTrainer, SegmentTrainer])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (infinite_weight, "diverged at step 3: the weights after it give .* first in model.layers.1.attention.v_proj. The"),
        (huge_weights, "diverged at step 3: the weights after it give .* first in model.layers.1"),
        (infinite_gradient, "diverged at step 4: the gradients are not finite, first in model.layers.0.attention.o_proj"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_diverged_run_stops_and_keeps_its_last_good_checkpoint(tmp_path, kind, spoil, message):
    model = make_model()
    trainer = make_trainer(tmp_path, TEXT, model=model, trainer=kind, options={"callbacks": [Breaking(3, spoil)]}, **SAVES)
    with pytest.raises(Diverged, match=message) as error:
        trainer.train()
    good = last_checkpoint(tmp_path)
    assert good == str(tmp_path / f"checkpoint-{3 if spoil is infinite_gradient else 2}")
    assert f"The last good checkpoint is {good}. Lower the learning rate (learning_rate=0.01)" in str(error.value)
    assert flaw_of(good, memory=kind is SegmentTrainer) is None
    again = type(model).from_pretrained(good)
    assert all(weight.isfinite().all() for weight in again.parameters())


def test_a_loss_that_is_not_finite_is_met_without_any_checkpoint(tmp_path):
    options = {"callbacks": [Breaking(2, infinite_weight)]}
    trainer = make_trainer(tmp_path, TEXT, trainer=CheckedTrainer, options=options, max_steps=6)
    with pytest.raises(Diverged, match="step 3: the loss is nan, first in .*v_proj. No checkpoint was saved before it"):
        trainer.train()
    assert all(loss > 1 for loss in logged(trainer))  # the stock Trainer logs 0.0


def test_the_last_step_is_met_too(tmp_path):
    options = {"callbacks": [Breaking(3, infinite_weight)]}
    with pytest.raises(Diverged, match="step 3: the weights after it"):
        make_trainer(tmp_path, TEXT, trainer=CheckedTrainer, options=options, max_steps=3).train()


def test_an_evaluation_that_is_not_finite_ends_a_training(tmp_path):
    text = make_table(segment_script.EVALUATION, padding=0)
    fields = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 6}
    options = {"callbacks": [Breaking(3, infinite_weight)]}
    trainer = make_trainer(tmp_path, TEXT, text, options=options, **fields)
    with pytest.raises(Diverged, match="diverged at step 3: eval_loss is nan, first in model.layers.1.attention.v_proj"):
        trainer.train()
    assert trainer.state.best_metric is None


def test_minus_infinity_may_hide_scores():
    class Hiding(torch.nn.Module):
        def forward(self, scores):
            return {"scores": scores.masked_fill(scores < 0, float("-inf")), "other": [torch.ones(2), "text"]}

    assert find_not_finite(Hiding(), {"scores": torch.tensor([-1.0, 1.0])}) is None
    assert find_not_finite(Hiding(), {"scores": torch.tensor([float("nan")])}) == "the loss"


# ---- the best model


@pytest.mark.parametrize(
    ("metric", "better"),
    [("loss", False), ("eval_perplexity", False), ("bits_per_byte", False), ("eval_a_perplexity", False), ("accuracy", True)],
)
def test_which_value_of_a_metric_is_better(metric, better):
    assert greater_is_better(metric) is better and greater_is_better(f"un{metric}"[:9]) is None


def test_a_trainer_that_would_keep_the_worst_model_is_refused(tmp_path):
    """transformers takes every metric whose name does not end in "loss" for one that should grow."""
    fields = {"metric_for_best_model": "perplexity", "eval_strategy": "steps", "save_strategy": "steps"}
    with pytest.raises(ValueError, match="'perplexity' with greater_is_better=True would keep the worst model: give .*=False"):
        make_trainer(tmp_path, TEXT, TEXT, **fields, load_best_model_at_end=True)
    make_trainer(tmp_path, TEXT, TEXT, **fields, load_best_model_at_end=True, greater_is_better=False)
    make_trainer(tmp_path, TEXT, TEXT, **fields | {"metric_for_best_model": "accuracy"})


# ---- whole checkpoints


@pytest.fixture(scope="module")
def three_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, TEXT, **SAVES | {"save_total_limit": None, "max_steps": 3}).train()
    return folder


@pytest.fixture
def run_folder(three_checkpoints, tmp_path):
    """Three checkpoints of a run, as links that a test may break."""
    for checkpoint in three_checkpoints.glob("checkpoint-*"):
        copy = tmp_path / checkpoint.name
        copy.mkdir()
        for path in checkpoint.iterdir():
            (copy / path.name).symlink_to(path)
    return tmp_path


def spoil(path: Path, how: str) -> None:
    whole = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(b"" if how == "empty" else whole[: len(whole) * 2 // 3])


PARTS = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "segment_memory_0.pt"]


@pytest.mark.parametrize("how", ["missing", "empty", "cut"])
@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_is_whole_or_it_is_not_taken(run_folder, part, how, caplog):
    spoil(run_folder / "checkpoint-3" / part, how)
    trainer = make_trainer(run_folder, TEXT, max_steps=3)
    message = f"checkpoint-3 (lacks|has a damaged) {part}.*: use {run_folder}/checkpoint-2 instead"
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(run_folder / "checkpoint-3"))
    assert trainer.costs == []
    trainer.train(resume_from_checkpoint=True)
    assert len(trainer.costs) == 1
    assert part in caplog.text and f"going on from {run_folder}/checkpoint-2 instead" in caplog.text


def test_without_any_whole_checkpoint_nothing_begins_anew(run_folder):
    for checkpoint in run_folder.glob("checkpoint-*"):
        spoil(checkpoint / "optimizer.pt", "missing")
    trainer = make_trainer(run_folder, TEXT, max_steps=3)
    for wanted in (True, str(run_folder / "checkpoint-3")):
        with pytest.raises(ValueError, match="checkpoint-3 lacks optimizer.pt.* model_name_or_path="):
            trainer.train(resume_from_checkpoint=wanted)
    for checkpoint in run_folder.glob("checkpoint-*"):  # as if the run had been killed while it wrote them
        spoil(checkpoint / "trainer_state.json", "missing")
    assert last_checkpoint(run_folder) is None
    with pytest.raises(ValueError, match="holds no checkpoint that was written to its end"):
        trainer.train(resume_from_checkpoint=True)


def test_shards_and_processes_are_counted(run_folder):
    checkpoint = run_folder / "checkpoint-1"
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    (checkpoint / "rng_state_2.pth").symlink_to(checkpoint / "rng_state_0.pth")
    assert flaw_of(checkpoint) == "lacks rng_state_1.pth"
    (checkpoint / "rng_state_1.pth").symlink_to(checkpoint / "rng_state_0.pth")
    assert flaw_of(checkpoint) is None
    assert flaw_of(checkpoint, memory=True) == "lacks segment_memory_1.pt, segment_memory_2.pt"
    assert flaw_of(checkpoint, scaler=True) == "lacks scaler.pt"
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    shards = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (checkpoint / "model.safetensors.index.json").write_text(shards)
    assert flaw_of(checkpoint) == "lacks model-00002-of-00002.safetensors"


def test_a_checkpoint_that_cannot_be_written_is_removed_and_named(tmp_path, monkeypatch):
    """torch reports a full disk as a RuntimeError, safetensors as an error of its own."""
    trainer = make_trainer(tmp_path, TEXT, **SAVES | {"save_total_limit": None})
    write = torch.save

    def full(value, file, *args, **kwargs):
        if str(file).endswith("checkpoint-2/scheduler.pt"):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
        write(value, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="checkpoint-2 could not be written and was removed: .*enforce fail"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


# ---- memory


def test_a_save_before_the_first_step(tmp_path):
    class Saving(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.trainer._save_checkpoint(self.trainer.model, None)

    whole = make_trainer(tmp_path, TEXT, max_steps=3)
    callback = Saving()
    callback.trainer = whole
    whole.add_callback(callback)
    whole.train()
    resumed = make_trainer(tmp_path, TEXT, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-0"))
    assert resumed.costs == whole.costs and len(whole.costs) == 3


def test_another_memory_length_between_two_calls(tmp_path):
    """With 0 each segment is read on its own."""
    model, table = make_model(), make_table(make_documents(64), 8)
    trainer = make_trainer(tmp_path, TEXT, table, model, max_steps=2, save_strategy="steps", save_steps=2)
    with_memory = trainer.evaluate()["eval_loss"]
    model.set_memory_length(0)
    with torch.no_grad():
        logits = model(input_ids=table[:]["input_ids"]).logits
    alone = torch.nn.functional.cross_entropy(logits.flatten(0, 1), table[:]["shift_labels"].flatten()).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(alone, abs=1e-6)
    trainer.train()
    assert len(trainer.costs) == 2 and trainer._memories == {0: None}
    model.set_memory_length(3)
    assert trainer.evaluate()["eval_loss"] != with_memory != pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize("part", PARTS)
def test_one_changed_bit_of_a_checkpoint_is_noticed(run_folder, part):
    path = run_folder / "checkpoint-3" / part
    whole = bytearray(path.read_bytes())
    whole[-40] ^= 2  # numbers of the last tensor, a name in a pickle, a digit or a letter of JSON
    path.unlink()
    path.write_bytes(whole)
    flaw = flaw_of(run_folder / "checkpoint-3", memory=True)
    assert flaw and part in flaw
    assert last_checkpoint(run_folder, memory=True) == str(run_folder / "checkpoint-2")
    if "changed" in flaw:
        (run_folder / "checkpoint-3" / DIGESTS).unlink()  # as the message says, and as the stock Trainer leaves it
        assert flaw_of(run_folder / "checkpoint-3", memory=True) is None


def test_digests_leave_out_what_other_processes_write(run_folder):
    folder = run_folder / "checkpoint-3"
    (folder / "rng_state_1.pth").write_bytes(b"half")
    (folder / DIGESTS).unlink()
    write_digests(folder)
    assert set(PARTS) <= json.loads((folder / DIGESTS).read_text()).keys()
    assert not {"rng_state_1.pth", DIGESTS} & json.loads((folder / DIGESTS).read_text()).keys()


class Dying(list):
    """Rows whose fifth ends the process that reads it."""

    def __getitem__(self, index):
        if index == 4 and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_reading_process_that_dies_ends_a_run_with_one_line(tmp_path):
    rows = Dying({"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(8))
    trainer = make_trainer(tmp_path, rows, trainer=CheckedTrainer, dataloader_num_workers=1, max_steps=8)
    with pytest.raises(ChildProcessError, match="a process that reads batches died, .* fewer than dataloader_num_workers=1"):
        trainer.train()
