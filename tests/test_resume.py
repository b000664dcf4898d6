"""Segment memory in checkpoints: a run that was stopped at any moment goes on as if it had not been."""

import random
import signal

import pytest
import segment_script
import torch
from segments import logged
from segments import make_model
from segments import make_table
from segments import make_trainer
from test_segment_ddp import start
from transformers import Trainer

from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.checkpoints import DIGESTS
from hf_relpos.training.run_folder import find_checkpoint
from hf_relpos.training.segment_trainer import memory_file

TEXT = make_table(segment_script.TRAINING)  # 72 blocks: 9 steps an epoch in 8 lanes
FIELDS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 14}
SAVES = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dataloader_num_workers": 1}, marks=pytest.mark.slow),
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"eval_strategy": "steps", "eval_steps": 1},
        pytest.param({"bf16": True}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_resumed_run_computes_the_same_bits(tmp_path, options):
    def trainer(**fields):
        model = make_model(hidden_dropout=0.1, attention_dropout=0.1)
        return make_trainer(tmp_path, TEXT, make_table(segment_script.EVALUATION), model, **FIELDS | options | fields)

    whole = trainer(**SAVES)
    whole.train()
    for step in (3, 9, 12):  # within an epoch, at its end, in the second
        resumed = trainer()
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.ids == whole.ids[2 * step :]
        assert resumed.costs == whole.costs[2 * step :]
        assert len(resumed.costs) == 2 * (14 - step)


def test_groups_of_lanes_go_on_where_they_stopped(tmp_path):
    """Within the first round, when some groups have no memory yet, and within later ones."""
    fields = FIELDS | {"per_device_train_batch_size": 1}

    def trainer(**more):
        return make_trainer(tmp_path, TEXT, options={"lane_groups": 4}, **fields | more)

    whole = trainer(**SAVES)
    whole.train()
    for step in (1, 6, 9, 12):
        resumed = trainer()
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.ids == whole.ids[2 * step :] and len(resumed.costs) == 2 * (14 - step)
        assert resumed.costs == whole.costs[2 * step :]


def test_without_the_memory_the_losses_differ(tmp_path):
    """The control: what the other tests compare does depend on the memory in the checkpoint."""
    whole = make_trainer(tmp_path, TEXT, **FIELDS | SAVES)
    whole.train()
    file = memory_file(tmp_path / "checkpoint-3", 0)
    state = torch.load(file)
    state["memories"] = [[hidden, torch.zeros_like(length)] for hidden, length in state["memories"]]
    torch.save(state, file)
    (tmp_path / "checkpoint-3" / DIGESTS).unlink()
    resumed = make_trainer(tmp_path, TEXT, **FIELDS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.ids == whole.ids[6:] and resumed.costs[0] != whole.costs[6]


@pytest.mark.parametrize(
    ("kill", "text"),
    [
        (["training_step", 11], {}),
        (["_save_scaler", 7], {}),
        (["_save_rng_state", 10], {}),
        (["training_step", 11], {"shards": 8}),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "stream" if given else "table",
)
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, kill, text):
    """SIGKILL within an accumulation window; in a checkpoint before and after the memory is written."""
    fields = FIELDS | SAVES | {"dropout": True} | text
    folder = tmp_path / "killed"
    killed = start(tmp_path, [{"folder": str(folder), "fields": fields, "kill": kill}])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    last = {"training_step": 5, "_save_scaler": 6, "_save_rng_state": 9}[kill[0]]
    checkpoint = find_checkpoint(RunArguments(output_dir=str(folder), resume_from_checkpoint="auto", report_to="none"))
    assert checkpoint == str(folder / f"checkpoint-{last}")
    resumed = segment_script.run(folder, fields, resume=checkpoint)
    whole = segment_script.run(tmp_path / "whole", fields)
    before = (folder / "costs.txt").read_text().split()
    assert before == whole.costs[: len(before)] and len(before) >= 2 * last
    assert resumed.costs == whole.costs[2 * last :]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_stream_that_is_killed_again_and_again_computes_the_same_bits(tmp_path, seed):
    """SIGKILL at places drawn at random, four times, each time in another process."""
    draw, folder, last = random.Random(seed), tmp_path / "killed", None
    fields = FIELDS | SAVES | {"dropout": True, "shards": 8, "max_steps": 40}
    for _ in range(4):
        kill = [draw.choice(["training_step", "_save_scaler", "_save_rng_state"]), draw.randint(3, 9)]
        killed = start(tmp_path, [{"folder": str(folder), "fields": fields, "resume": last, "kill": kill}])
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        last = find_checkpoint(RunArguments(output_dir=str(folder), resume_from_checkpoint="auto", report_to="none"))
    assert last is not None
    resumed, whole = segment_script.run(folder, fields, last), segment_script.run(tmp_path / "whole", fields)
    assert resumed.costs == whole.costs[-len(resumed.costs) :] and len(resumed.costs) == 2 * (40 - int(last.split("-")[-1]))
    assert resumed.ids == whole.ids[-len(resumed.ids) :]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


@pytest.mark.parametrize(("batch_size", "batches"), [(8, 1), (2, 4), (1, 8)])
def test_other_divisions_of_the_lanes_go_on(tmp_path, batch_size, batches):
    whole = make_trainer(tmp_path, TEXT, **FIELDS | SAVES)
    whole.train()
    fields = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": batches, "max_steps": 14}
    resumed = make_trainer(tmp_path, TEXT, **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert logged(resumed) == pytest.approx(logged(whole), abs=1e-6)


def test_what_cannot_be_resumed_is_refused_before_a_step(tmp_path):
    def resumed(table=TEXT, **fields):
        trainer = make_trainer(tmp_path, table, **FIELDS | fields)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        return trainer

    make_trainer(tmp_path, TEXT, **FIELDS | SAVES | {"max_steps": 3}).train()
    with pytest.raises(ValueError, match="was reading a text with steps 9 instead of 5, as this run would read it"):
        resumed(TEXT.take(40))
    with pytest.raises(ValueError, match="with lanes 8 instead of 4, steps 9 instead of 18"):
        resumed(per_device_train_batch_size=2)
    with pytest.raises(ValueError, match=r"with lane_groups 1 instead of 2, as"):  # as many lanes, in another order
        resumed(gradient_accumulation_steps=1, options={"lane_groups": 2})
    with pytest.raises(ValueError, match=r"with mem_len \d instead of 3, as"):
        resumed(model=make_model(mem_len=3))
    memory_file(tmp_path / "checkpoint-3", 0).unlink()
    with pytest.raises(ValueError, match="lacks segment_memory_0.pt: use .*checkpoint-2 instead"):
        resumed()
    anew = resumed(ignore_data_skip=True)
    assert anew.ids[0][0] == TEXT[0]["input_ids"].tolist()


@pytest.mark.parametrize("cut", ["missing", "empty", "half"])
def test_the_last_checkpoint_is_one_that_was_written_to_its_end(tmp_path, cut):
    """Whatever a run leaves that is killed while it writes its state."""
    whole = make_trainer(tmp_path, TEXT, **FIELDS | SAVES | {"max_steps": 4})
    whole.train()
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.unlink() if cut == "missing" else state.write_text("" if cut == "empty" else state.read_text()[:50])
    resumed = make_trainer(tmp_path, TEXT, **FIELDS | {"max_steps": 4})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.costs == whole.costs[6:]
    file = memory_file(tmp_path / "checkpoint-3", 0)
    file.write_bytes(file.read_bytes()[:100])
    resumed = make_trainer(tmp_path, TEXT, **FIELDS | {"max_steps": 4})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.costs == whole.costs[4:]


@pytest.mark.parametrize("made_by", ["stock", "save_only_model"])
def test_a_checkpoint_without_memory_is_refused(tmp_path, made_by):
    options = {"trainer": Trainer} if made_by == "stock" else {"save_only_model": True}
    make_trainer(tmp_path, TEXT, **FIELDS | SAVES | {"max_steps": 3} | options).train()
    trainer = make_trainer(tmp_path, TEXT, **FIELDS)
    with pytest.raises(ValueError, match="checkpoint-3 lacks .*segment_memory_0.pt: start afresh"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.costs == []
