"""SegmentTrainer in one process: memory from batch to batch, exact evaluation, and what it refuses."""

import math
from pathlib import Path

import pytest
import torch
from segments import END
from segments import MEMORY_SCHEMES
from segments import VOCABULARY
from segments import logged
from segments import make_arguments
from segments import make_documents
from segments import make_model
from segments import make_table
from segments import make_trainer
from segments import reference
from transformers import Trainer
from transformers import TrainerCallback

from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForMaskedLM
from hf_relpos.data.packing import IGNORED
from hf_relpos.training import checked_trainer
from hf_relpos.training import segment_trainer
from hf_relpos.training.segment_trainer import SegmentTrainer

DOCUMENTS = make_documents(50, 3, 17, 40, 9, 1, 30)
TEXT = make_table(make_documents(9, 200, 70, 300))  # 72 blocks of 8


def train(folder, **options):
    trainer = make_trainer(folder, options.pop("table", TEXT), **{"max_steps": 9} | options)
    trainer.train()
    return trainer


# Evaluation


@pytest.mark.parametrize("block_size", [5, 8, 64])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_is_one_full_pass_a_document(tmp_path, block_size, batch_size):
    model = make_model()
    loss, tokens = reference(model, DOCUMENTS)
    table = make_table(DOCUMENTS, block_size, padding=0)
    trainer = make_trainer(tmp_path, evaluation=table, model=model, per_device_eval_batch_size=batch_size)
    for _ in range(2):  # from an empty memory each time
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
        assert metrics["eval_tokens"] == tokens == sum(map(len, DOCUMENTS))
    assert trainer._eval_memory is None


@pytest.mark.parametrize("scheme", MEMORY_SCHEMES)
def test_every_scheme_is_evaluated_exactly(tmp_path, scheme):
    model = make_model(scheme)
    trainer = make_trainer(tmp_path, evaluation=make_table(DOCUMENTS, 8, padding=0), model=model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(reference(model, DOCUMENTS)[0], abs=1e-5)


def test_the_stock_trainer_gives_another_number_for_each_batch_size(tmp_path):
    """The reason for this class: without memory and with means of means, the loss is an accident of the layout."""
    table = make_table(DOCUMENTS, 8, padding=0)
    losses = []
    for size in (1, 3, 8):
        stock = make_trainer(tmp_path, evaluation=table, trainer=Trainer, per_device_eval_batch_size=size)
        losses.append(stock.evaluate()["eval_loss"])
    assert max(losses) - min(losses) > 1e-4


def test_evaluation_with_workers_names_and_other_metrics(tmp_path):
    model, table = make_model(), make_table(DOCUMENTS, 8, padding=0)
    loss, tokens = reference(model, DOCUMENTS)
    seen = {}

    def metrics(prediction):
        seen["shape"] = prediction.predictions.shape
        seen["targets"] = int((prediction.label_ids != IGNORED).sum())
        return {"loss": 0.0, "accuracy": 2.0}

    trainer = make_trainer(
        tmp_path,
        evaluation={"a": table, "b": make_table(DOCUMENTS[:2], 8, padding=0)},
        model=model,
        options={"compute_metrics": metrics},
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
    )
    found = trainer.evaluate()
    assert found["eval_a_loss"] == pytest.approx(loss, abs=1e-6) and found["eval_a_tokens"] == tokens
    assert found["eval_b_loss"] == pytest.approx(reference(model, DOCUMENTS[:2])[0], abs=1e-6)
    assert found["eval_a_accuracy"] == 2.0
    predicted = trainer.predict(table)
    assert seen == {"shape": predicted.predictions.shape, "targets": tokens}
    assert predicted.predictions.shape[1:] == (8, VOCABULARY) and predicted.label_ids.shape[1:] == (8,)
    assert predicted.metrics["test_loss"] == pytest.approx(loss, abs=1e-6)


def test_a_fixed_number_of_streams(tmp_path):
    text, losses = make_documents(100), []
    for block_size in (4, 7):
        table = make_table(text, block_size, padding=0)
        for batch_size in (1, 3, 8):
            fields = {"per_device_eval_batch_size": batch_size, "options": {"eval_streams": 5}}
            losses.append(make_trainer(tmp_path, evaluation=table, **fields).evaluate())
    assert {found["eval_tokens"] for found in losses} == {100}
    assert max(found["eval_loss"] for found in losses) - min(found["eval_loss"] for found in losses) < 1e-6
    whole = make_trainer(tmp_path, evaluation=table).evaluate()
    assert abs(whole["eval_loss"] - losses[0]["eval_loss"]) > 1e-6


# Training


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_rows_read_on_where_they_stopped(tmp_path, workers, drop_last):
    trainer = train(
        tmp_path,
        table=make_table(make_documents(8 * 26 + 3)),  # a block and some tokens more than 5 lanes take
        per_device_train_batch_size=5,
        max_steps=5,
        dataloader_num_workers=workers,
        dataloader_drop_last=drop_last,
    )
    lanes = [sum((batch[row] for batch in trainer.ids), []) for row in range(5)]
    assert sum(lanes, []) == make_documents(8 * 26 + 3)[0][: 8 * 25]


@pytest.mark.parametrize("scheme", MEMORY_SCHEMES)
def test_training_losses_are_those_of_one_long_pass(tmp_path, scheme):
    """With a learning rate of 0 the losses of an epoch are those of each lane read at once with the window."""
    fields = {"learning_rate": 0.0, "num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 4}
    trainer = train(tmp_path, model=make_model(scheme), **fields)
    ids, marks, targets = (
        torch.cat([block[name] for block in TEXT]).view(4, -1) for name in ("input_ids", "reset_mask", "shift_labels")
    )
    marks[:, 0] = 1
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids, reset_mask=marks, use_cache=False).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="none")
    assert logged(trainer) == pytest.approx(nll.view(4, 18, 8).mean((0, 2)).tolist() * 2, abs=5e-6)


@pytest.mark.parametrize("batches", [1, 2])
def test_groups_of_lanes_take_turns(tmp_path, batches):
    """With a learning rate of 0 the losses of the turns are those of their lanes, each read with its own memory."""
    fields = {"learning_rate": 0.0, "max_steps": 36, "per_device_train_batch_size": 2 // batches}
    fields["gradient_accumulation_steps"] = batches
    alone = train(tmp_path, **fields | {"per_device_train_batch_size": 4 // batches, "max_steps": 18})
    trainer = train(tmp_path, options={"lane_groups": 2}, **fields)
    lanes = [torch.tensor(watched.ids).view(18, 4, 8) for watched in (alone, trainer)]
    assert torch.equal(*lanes)
    in_turn = torch.tensor(logged(trainer)).view(18, 2).mean(1)
    assert in_turn.tolist() == pytest.approx(logged(alone), abs=5e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_is_a_larger_batch(tmp_path, smoothing):
    losses = []
    for batch_size, batches in ((8, 1), (4, 2), (1, 8)):
        fields = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": batches}
        losses.append(logged(train(tmp_path, label_smoothing_factor=smoothing, **fields)))
    assert losses[1] == pytest.approx(losses[0], abs=2e-6) and losses[2] == pytest.approx(losses[0], abs=2e-6)


def test_smoothing_is_for_training_and_scores_the_next_token(tmp_path):
    evaluation = make_table(DOCUMENTS, 8, padding=0)
    plain, faint, strong = (
        make_trainer(tmp_path, TEXT, evaluation, max_steps=2, label_smoothing_factor=factor) for factor in (0, 1e-9, 0.3)
    )
    assert plain.evaluate()["eval_loss"] == strong.evaluate()["eval_loss"]
    for trainer in (plain, faint, strong):
        trainer.train()
    assert logged(faint) == pytest.approx(logged(plain), abs=1e-6)
    assert abs(logged(strong)[0] - logged(plain)[0]) > 1e-3


def test_a_loss_function_of_ones_own_is_handed_aligned_labels(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / num_items_in_batch

    own = train(tmp_path, options={"compute_loss_func": loss})
    assert logged(own) == pytest.approx(logged(train(tmp_path)), abs=1e-6)


def test_no_target_is_lost_at_the_ends_of_segments(tmp_path):
    counts = []

    class Counting(SegmentTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            counts.append(int(num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    train(tmp_path, trainer=Counting, per_device_train_batch_size=4)
    assert counts == [4 * 8] * 9


@pytest.mark.parametrize("remove", [True, False])
def test_a_table_of_nothing_but_input_ids(tmp_path, remove):
    ids = torch.tensor(make_documents(8 * 18)[0]).view(-1, 8)
    mine = [{"input_ids": row, "text": "left out"} for row in ids]
    trainer = train(tmp_path, table=mine, max_steps=3, remove_unused_columns=remove)
    assert logged(trainer) == pytest.approx(logged(train(tmp_path, table=make_table(make_documents(8 * 18)), max_steps=3)))


class Evaluating(TrainerCallback):
    """Things that must not disturb the memory of training."""

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        self.trainer.evaluate()
        next(iter(self.trainer.get_train_dataloader()))


def test_evaluation_and_a_look_at_the_data_leave_the_memory_of_training_alone(tmp_path):
    model, fields = make_model(hidden_dropout=0.2), {"gradient_accumulation_steps": 2, "max_steps": 9}
    disturbed = make_trainer(tmp_path, TEXT, make_table(DOCUMENTS), model, **fields)
    callback = Evaluating()
    callback.trainer = disturbed
    disturbed.add_callback(callback)
    disturbed.train()
    assert disturbed.costs == train(tmp_path, model=make_model(hidden_dropout=0.2), **fields).costs


def test_each_epoch_and_each_call_begins_without_memory(tmp_path):
    trainer = make_trainer(tmp_path, TEXT, num_train_epochs=2, learning_rate=0.0, per_device_train_batch_size=8)
    trainer.train()
    trainer.train()
    losses = logged(trainer)
    assert len(losses) == 18  # the log of the second call
    assert losses[:9] == pytest.approx(losses[9:], abs=1e-6)


def test_a_batch_size_that_does_not_fit_is_made_smaller_and_the_lanes_anew(tmp_path, monkeypatch):
    table = make_table(make_documents(8 * 8 * 7))
    trainer = make_trainer(tmp_path, table, per_device_train_batch_size=8, max_steps=4, auto_find_batch_size=True)
    step, failures = trainer.training_step, []

    def out_of_memory(*args, **kwargs):
        result = step(*args, **kwargs)
        if len(trainer.ids) == 2 and not failures:
            failures.append(trainer.ids.copy())
            trainer.ids.clear()
            raise RuntimeError("CUDA out of memory.")
        return result

    monkeypatch.setattr(trainer, "training_step", out_of_memory)
    trainer.train()
    assert failures and [len(batch) for batch in failures[0]] == [8, 8]
    assert [len(batch) for batch in trainer.ids] == [7] * 4
    stream = make_documents(8 * 8 * 7)[0]
    for row in range(7):
        assert sum((batch[row] for batch in trainer.ids), []) == stream[64 * row : 64 * row + 32]
    assert trainer._memories[0].length.tolist() == [6] * 7


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(tmp_path, reentrant):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    assert logged(train(tmp_path, **options)) == pytest.approx(
        logged(train(tmp_path)), rel=2e-6
    )  # float32 losses of nine steps


def test_memory_keeps_the_dtype_of_the_model(tmp_path):
    mixed = train(tmp_path, bf16=True)
    assert mixed._memories[0].hidden.dtype == torch.float32
    pure = train(tmp_path, model=make_model(dtype=torch.bfloat16), bf16=True)
    assert pure._memories[0].hidden.dtype == torch.bfloat16
    exact = logged(train(tmp_path))
    for trainer in (mixed, pure):
        assert logged(trainer) == pytest.approx(exact, rel=0.05)


@pytest.mark.slow
def test_compiled(tmp_path):
    compiled = train(tmp_path, torch_compile=True, torch_compile_backend="aot_eager", gradient_accumulation_steps=2)
    assert logged(compiled) == pytest.approx(logged(train(tmp_path, gradient_accumulation_steps=2)), abs=1e-5)


def test_a_memory_with_gradients_is_still_cut_between_steps(tmp_path):
    trainer = train(tmp_path, model=make_model(detach_memory=False))
    assert trainer.costs == train(tmp_path).costs
    assert not trainer._memories[0].hidden.requires_grad


def test_the_original_window_is_carried_like_by_hand(tmp_path):
    model = make_model(sliding_window=None)
    trainer = train(tmp_path, model=model, learning_rate=0.0)
    lanes, memory, losses = trainer.get_train_dataloader().dataset, None, []
    for step in range(9):
        batch = {name: torch.stack([lanes[2 * step][name], lanes[2 * step + 1][name]]) for name in lanes[0]}
        with torch.no_grad():
            output = model(**batch, memory=memory)
        memory = output.memory
        losses.append(output.loss.item())
    assert logged(trainer) == pytest.approx(losses, abs=1e-6)


# Refusals


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "'group_by_length' shuffles blocks"),
        ({"train_sampling_strategy": "batch_rebalance"}, "'batch_rebalance' shuffles blocks"),
        ({"dataloader_in_order": False, "dataloader_num_workers": 1}, "dataloader_in_order=False"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
        ({"per_device_train_batch_size": 100}, "72 blocks cannot fill 100 lanes"),
        ({"per_device_train_batch_size": 10, "options": {"lane_groups": 10}}, "72 blocks cannot fill 100 lanes"),
        ({"options": {"lane_groups": 0}}, "lane_groups=0 must be a whole number, at least 1"),
        ({"options": {"lane_groups": 2.5}}, "lane_groups=2.5 must be a whole number"),
        ({"model": make_model(mem_len=0)}, "mem_len=0 has no memory"),
        ({"model": RelPosEncoderForMaskedLM(RelPosEncoderConfig(mem_len=4))}, "it trains causal models"),
        ({"train": TEXT.to_iterable_dataset(), "max_steps": 1}, "IterableDataset of 1 shards cannot fill 2 lanes"),
    ],
)
def test_what_would_break_the_lanes_is_refused_before_training(tmp_path, fields, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path, **{"train": TEXT} | fields)


def test_evaluation_needs_a_text(tmp_path):
    with pytest.raises(ValueError, match="needs an eval_dataset"):
        make_trainer(tmp_path, TEXT).evaluate()


def test_evaluation_needs_a_target(tmp_path):
    text = [{"input_ids": [1, 2, 3], "labels": [IGNORED] * 3}]
    with pytest.raises(ValueError, match="no token is a target"):
        make_trainer(tmp_path, TEXT, text).evaluate()


def test_absolute_schemes_are_refused_with_memory():
    for scheme in ("sinusoidal", "learned_absolute"):
        with pytest.raises(ValueError, match=f"'{scheme}' is refused for mem_len=6"):
            make_model(scheme)


@pytest.mark.parametrize("module", [segment_trainer, checked_trainer], ids=lambda module: module.__name__)
def test_the_private_methods_of_trainer_that_are_used_exist(module):
    assert [name for name in module.TRAINER_INTERNALS if not callable(getattr(Trainer, name, None))] == []
    source = Path(module.__file__).read_text()
    private = [name for name in dir(Trainer) if name.startswith("_") and not name.startswith("__")]
    assert {name for name in private if f".{name}(" in source} == set(module.TRAINER_INTERNALS)


def test_five_lines_are_enough(tmp_path):
    blocks = [{"input_ids": [(step + token) % END for token in range(8)]} for step in range(20)]
    trainer = SegmentTrainer(make_model(), make_arguments(tmp_path, max_steps=3), train_dataset=blocks, eval_dataset=blocks)
    trainer.train()
    assert trainer.evaluate()["eval_tokens"] == 159  # the last token of the text has no next one


@pytest.mark.slow
def test_twenty_thousand_steps_take_no_more_memory(tmp_path):
    import psutil

    process, sizes = psutil.Process(), []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % 2000 == 0:
                sizes.append(process.memory_info().rss)

    model = make_model(hidden_size=8, num_hidden_layers=1, mem_len=4)
    fields = {"max_steps": 20_000, "logging_steps": 20_000, "options": {"callbacks": [Watch()]}}
    make_trainer(tmp_path, make_table(make_documents(400), 4), model=model, trainer=SegmentTrainer, **fields).train()
    assert len(sizes) == 10
    assert max(sizes) - sizes[1] < 4 << 20
