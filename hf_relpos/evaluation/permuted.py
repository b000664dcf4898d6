"""Permutation language models in a comparison: two streams, tokens in a random order, the same targets at every length."""

from collections.abc import Iterator
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from transformers import AutoModelForPreTraining
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase
from transformers import set_seed

from hf_relpos.data.permuting import PermutationCollator
from hf_relpos.evaluation.cells import Cell
from hf_relpos.evaluation.language_model import evaluating
from hf_relpos.evaluation.language_model import score_rows
from hf_relpos.evaluation.lengths import why_not
from hf_relpos.evaluation.outcome import Output
from hf_relpos.evaluation.outcome import Rows
from hf_relpos.evaluation.outcome import cost_beside_baseline
from hf_relpos.evaluation.outcome import data_digest
from hf_relpos.evaluation.outcome import kept_curves
from hf_relpos.evaluation.outcome import metric_rows
from hf_relpos.evaluation.outcome import missing_rows
from hf_relpos.evaluation.windows import Windows
from hf_relpos.evaluation.windows import take_windows
from hf_relpos.training.checked_trainer import CheckedTrainer
from hf_relpos.training.model_setup import build_model
from hf_relpos.training.optimizer import optimizer_by_kind
from hf_relpos.training.run import plan_run
from hf_relpos.training.texts import choose_tokenizer
from hf_relpos.training.texts import training_blocks

# What the orders and targets of the evaluation are drawn from: the same for all models.
ORDER_SEED = 0


def run_permuted(cell: Cell, file: str) -> Output:
    """Train a permutation language model, and score the same targets at multiples of the trained length."""
    plan = plan_run([file])
    assert plan.documents.train is not None and plan.documents.validation is not None, "a comparison trains and evaluates"
    tokenizer = choose_tokenizer(plan.arguments, plan.data, plan.documents)
    set_seed(plan.args.seed)
    model = build_model(plan.arguments, plan.config, tokenizer, AutoModelForPreTraining)
    blocks: Any = training_blocks(plan.documents.train, model, tokenizer, plan.data, plan.args.seed)
    collator = PermutationCollator(tokenizer)
    trainer = CheckedTrainer(
        model=model,
        args=plan.args,
        train_dataset=blocks,
        data_collator=collator,
        optimizer_cls_and_kwargs=optimizer_by_kind(plan.args),
    )
    trained = trainer.train()
    lengths = [cell.settings["block_size"] * times for times in cell.options["lengths"]]
    windows = take_windows(plan.documents.validation, tokenizer, max(lengths), cell.options["tokens"])
    first = [blocks[row] for row in range(plan.args.per_device_train_batch_size)]
    ids = torch.stack([row["input_ids"] for row in first])
    result = {
        "rows": evaluate_permuted(model, tokenizer, windows, lengths, cell.options["batch_size"]),
        "curves": kept_curves(trainer, cell.settings["block_size"]),
        "notes": [note for note in windows.notes if not note.startswith("no bits per byte")],
        "data": data_digest(ids, windows.inputs),
    }
    return result, cost_beside_baseline(cell, model, collator(first)) | {"train_seconds": trained.metrics["train_runtime"]}


def evaluate_permuted(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: Windows, lengths: Sequence[int], batch_size: int
) -> Rows:
    """Score targets in a random order, both drawn once for all lengths and models.

    A target reads what stands before it in the order, as far as it is within its length. Orders are drawn for the longest length, whose
    halves share one: cut to a shorter length they are as random, but no longer the same in both halves, as they are in training.

    Args:
        model: a permutation language model.
        tokenizer: its tokenizer.
        windows: the text.
        lengths: tokens that are read at a time.
        batch_size: rows of the shortest length that are read at the same time.

    Returns:
        Rows `length`, `metric` (`loss` in nats a target, `accuracy`), `value`, and `reason` where there is none.
    """
    rows: Rows = []
    for length in lengths:
        if reason := why_not(model, length):
            rows += missing_rows(length, reason, "loss", "accuracy")
            continue
        starts = range(0, windows.inputs.shape[1], length)
        parts = (_cut(batch, at, length) for batch in _in_order(windows, tokenizer) for at in starts)
        size = max(1, batch_size * min(lengths) // length)
        sums = torch.zeros(3, dtype=torch.float64)
        with evaluating(model):
            while some := list(islice(parts, size)):
                batch = {name: torch.cat([part[name] for part in some]).to(model.device) for name in some[0]}
                labels = batch.pop("labels")
                sums += score_rows(model(**batch).logits, labels).double().sum(0).cpu()
        nll, correct, count = sums.tolist()
        rows += metric_rows(length, loss=nll / count, accuracy=correct / count)
    return rows


def _in_order(windows: Windows, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a batch of each window with the order of its tokens, the same ones at each call; all masks at once would fill the memory."""
    collator, state = PermutationCollator(tokenizer), torch.Generator().manual_seed(ORDER_SEED).get_state()
    for row in windows.inputs:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            batch = collator([{"input_ids": row}])
            state = torch.get_rng_state()
        yield batch


def _cut(batch: dict[str, torch.Tensor], at: int, length: int) -> dict[str, torch.Tensor]:
    """Return some neighbouring tokens of a batch, with their part of the order."""
    kept = slice(at, at + length)
    found = {name: batch[name][:, kept] for name in ("input_ids", "labels")}
    return found | {name: batch[name][:, kept, kept] for name in ("perm_mask", "target_mapping")}
