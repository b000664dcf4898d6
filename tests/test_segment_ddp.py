"""SegmentTrainer in two processes (torchrun, gloo): the same text, the same numbers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import segment_script
from segments import logged

HERE = Path(__file__).parent
SPLIT = {"accelerator_config": {"split_batches": True}}
STEPS = {"max_steps": 12}
SAVES = {"save_strategy": "steps", "save_steps": 4}
RUNS = {
    "plain": STEPS | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 3},
    "accumulated": STEPS | SAVES | {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 1},
    "split": STEPS | {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8} | SPLIT,
    "smoothed": STEPS | {"per_device_train_batch_size": 4, "label_smoothing_factor": 0.1},
    "saved": STEPS | SAVES | {"gradient_accumulation_steps": 2, "dropout": True},
    "streamed": STEPS | SAVES | {"gradient_accumulation_steps": 2, "shards": 8},
    "taken_over": STEPS | {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "shards": 8},
    "resumed": STEPS | {"gradient_accumulation_steps": 2, "dropout": True, "dataloader_num_workers": 2},
}


def start(folder, runs, *launcher):
    """Run `segment_script.py` in new processes."""
    folder.joinpath("runs.json").write_text(json.dumps(runs))
    command = [sys.executable, *launcher, str(HERE / "segment_script.py"), str(folder / "runs.json")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of the two processes read and computed in each run."""
    folder = tmp_path_factory.mktemp("two_processes")
    runs = [{"folder": str(folder / name), "fields": dict(fields)} for name, fields in RUNS.items()]
    runs[-1]["resume"] = str(folder / "saved" / "checkpoint-8")
    alone = STEPS | SAVES | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "shards": 8}
    segment_script.run(folder / "streamed_alone", alone)
    runs[-2]["resume"] = str(folder / "streamed_alone" / "checkpoint-4")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    finished = start(folder, runs, *torchrun)
    assert finished.returncode == 0, finished.stderr[-3000:]
    ranks = {name: [json.loads((folder / name / f"rank_{rank}.json").read_text()) for rank in (0, 1)] for name in RUNS}
    return ranks | {"folder": folder}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The same text in one process with all rows in one batch."""
    folder = tmp_path_factory.mktemp("one_process")

    def run(**fields):
        segment_script.run(folder, STEPS | {"per_device_train_batch_size": 8} | fields)
        return json.loads((folder / "rank_0.json").read_text())

    return run


@pytest.mark.parametrize("name", ["plain", "accumulated", "split"])
def test_two_processes_read_and_learn_what_one_does(results, single, name):
    alone, ranks = single(), results[name]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-6)
    halves = [ids for step in range(len(ranks[0]["ids"])) for ids in (ranks[0]["ids"][step], ranks[1]["ids"][step])]
    assert sum(halves, []) == sum(alone["ids"], [])


@pytest.mark.parametrize("name", ["plain", "accumulated", "split"])
def test_each_row_of_each_process_reads_on_where_it_stopped(results, name):
    text = sum(segment_script.TRAINING, [])
    batches = RUNS[name].get("gradient_accumulation_steps", 1)
    for rank in results[name]:
        for row in range(len(rank["ids"][0])):
            for batch in range(batches):
                steps = rank["ids"][batch::batches][:9]  # the first epoch: 72 blocks in 8 lanes
                stream = sum((step[row] for step in steps), [])
                starts = [72 * lane for lane in range(8) if text[72 * lane : 72 * lane + 72] == stream]
                assert len(starts) == 1


@pytest.mark.parametrize("name", ["plain", "accumulated", "split"])
def test_evaluation_gives_the_same_numbers(results, single, name):
    alone = single()["evaluation"]
    for rank in results[name]:
        assert rank["evaluation"]["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-6)
        assert rank["evaluation"]["eval_perplexity"] == pytest.approx(alone["eval_perplexity"], rel=1e-6)
        assert rank["evaluation"]["eval_tokens"] == alone["eval_tokens"] == 150


def test_smoothing_weighs_the_tokens_of_both_processes(results, single):
    assert results["smoothed"][0]["losses"] == pytest.approx(single(label_smoothing_factor=0.1)["losses"], abs=1e-6)


def test_resumed_processes_compute_the_same_bits(results):
    for rank in (0, 1):
        assert results["resumed"][rank]["costs"] == results["saved"][rank]["costs"][16:]
        assert results["resumed"][rank]["ids"] == results["saved"][rank]["ids"][16:]
        assert results["resumed"][rank]["evaluation"]["eval_loss"] == results["saved"][rank]["evaluation"]["eval_loss"]


def test_a_stream_is_read_and_learned_as_a_table_is(results):
    for rank in (0, 1):
        assert results["streamed"][rank]["ids"] == results["accumulated"][rank]["ids"]
        assert results["streamed"][rank]["costs"] == results["accumulated"][rank]["costs"]


def test_a_stream_goes_on_in_two_processes_after_one_and_in_one_after_two(results, tmp_path):
    wanted = json.loads((results["folder"] / "streamed_alone" / "rank_0.json").read_text())
    ranks = results["taken_over"]
    steps = zip(*(rank["ids"] for rank in ranks), strict=True)
    assert [row for step in steps for ids in step for row in ids] == sum(wanted["ids"][16:], [])
    for rank in ranks:
        assert rank["losses"] == pytest.approx(wanted["losses"], abs=1e-6)
    fields = STEPS | {"per_device_train_batch_size": 8, "shards": 8}
    one = segment_script.run(tmp_path, fields, resume=str(results["folder"] / "streamed" / "checkpoint-4"))
    assert sum(one.ids, []) == sum(wanted["ids"][16:], [])
    assert logged(one) == pytest.approx(wanted["losses"], abs=1e-6)


@pytest.mark.parametrize(("batch_size", "batches"), [(8, 1), (4, 2), (2, 4)])
def test_one_process_takes_over_from_two(results, tmp_path, batch_size, batches):
    fields = STEPS | {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": batches}
    checkpoint = results["folder"] / "accumulated" / "checkpoint-4"
    trainer = segment_script.run(tmp_path, fields, resume=str(checkpoint))
    assert logged(trainer) == pytest.approx(results["accumulated"][0]["losses"], abs=1e-6)
    assert len(trainer.ids) == 8 * batches


def test_another_number_of_lanes_and_missing_ranks_are_refused(results, tmp_path):
    checkpoint = Path(shutil.copytree(results["folder"] / "accumulated" / "checkpoint-4", tmp_path / "checkpoint-4"))
    with pytest.raises(ValueError, match="with lanes 8 instead of 6, steps 9 instead of 12"):
        segment_script.run(tmp_path, STEPS | {"per_device_train_batch_size": 6}, resume=str(checkpoint))
    (checkpoint / "segment_memory_1.pt").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-4 lacks segment_memory_1.pt: start afresh"):
        segment_script.run(tmp_path, STEPS | {"per_device_train_batch_size": 8}, resume=str(checkpoint))
