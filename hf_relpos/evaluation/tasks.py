"""The tasks of a comparison: train one cell, evaluate it at several lengths, and measure what a step costs."""

import json
import platform
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers import AutoModelForMaskedLM
from transformers import PreTrainedModel
from transformers import default_data_collator
from transformers import set_seed

from hf_relpos.data.packing import IGNORED
from hf_relpos.data.probes import EVALUATION_SEED
from hf_relpos.data.probes import PROBES
from hf_relpos.evaluation.cells import Cell
from hf_relpos.evaluation.labelled_tasks import run_labelled
from hf_relpos.evaluation.language_model import evaluating
from hf_relpos.evaluation.lengths import effective_context
from hf_relpos.evaluation.lengths import evaluate_lengths
from hf_relpos.evaluation.lengths import loss_by_context
from hf_relpos.evaluation.lengths import why_not
from hf_relpos.evaluation.masked import evaluate_masked
from hf_relpos.evaluation.outcome import Output
from hf_relpos.evaluation.outcome import Rows
from hf_relpos.evaluation.outcome import cost_beside_baseline
from hf_relpos.evaluation.outcome import data_digest
from hf_relpos.evaluation.outcome import kept_curves
from hf_relpos.evaluation.outcome import metric_rows
from hf_relpos.evaluation.outcome import missing_rows
from hf_relpos.evaluation.permuted import run_permuted
from hf_relpos.evaluation.probe_trainer import ProbeTrainer
from hf_relpos.evaluation.probe_trainer import probe_targets
from hf_relpos.evaluation.probe_trainer import read_in_segments
from hf_relpos.evaluation.windows import take_windows
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.model_setup import is_masked
from hf_relpos.training.optimizer import optimizer_by_kind
from hf_relpos.training.run import prepare


def run_cell(cell: Cell) -> Output:
    """Train and evaluate a cell.

    Returns:
        `{"rows": [{"length", "metric", "value", "reason"}], "curves": {name: [...]}, "notes": [...], "data": digest}` and, where
        guessing has a value, the same rows of it under `chance`: the same whenever and wherever the cell is run with the same code;
        and what it cost, which is not.
    """
    began, used = time.perf_counter(), time.process_time()
    with _one_thread(), _settings_file(cell) as file:
        result, cost = RUNS[cell.kind](cell, file)
    cost |= {"machine": f"{platform.machine()}, {platform.system()}, 1 thread"}
    cost |= {"seconds": time.perf_counter() - began, "all_process_seconds": time.process_time() - used}
    return result, cost


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: numbers do not depend on how many cores there are, and processes side by side do not take turns."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _settings_file(cell: Cell) -> Iterator[str]:
    """Write the settings as a file of `train_lm.py`, whose run stays in a folder that is then removed."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "settings.yaml")
        file.write_text(json.dumps({**cell.settings, "output_dir": str(Path(scratch, "run"))}), encoding="utf-8")
        yield str(file)


def run_text(cell: Cell, file: str) -> Output:
    """Train a language model on text, and score the same tokens at multiples of the trained length."""
    job = prepare([file])
    trained = job.trainer.train()
    model, options = job.model, cell.options
    block = cell.settings["block_size"]
    lengths = [block * times for times in options["lengths"]]
    assert job.validation is not None, "a comparison evaluates on validation text"
    windows = take_windows(job.validation, job.tokenizer, max(lengths), options["tokens"])
    curves = kept_curves(job.trainer, block)
    if cell.kind == "masked_lm":
        rows = evaluate_masked(model, job.tokenizer, windows, lengths, options["batch_size"])
    else:
        found = evaluate_lengths(model, windows, lengths, options["batch_size"])
        rows = [row for one in found for row in _length_rows(one)]
        curves["loss_by_position"] = [one for one in found if "by_position" in one]
        curves["loss_by_context"] = context = loss_by_context(model, windows, options["batch_size"])
        rows.append({"length": max(lengths), "metric": "effective_context", "value": effective_context(context)})
    blocks: Any = job.trainer.train_dataset
    ids = torch.stack([blocks[row]["input_ids"] for row in range(job.args.per_device_train_batch_size)])
    data = data_digest(ids, windows.inputs)
    result = {"rows": rows, "curves": curves, "notes": windows.notes, "data": data}
    cost = cost_beside_baseline(cell, model, {"input_ids": ids.long(), "labels": ids.long()})
    return result, cost | {"train_seconds": trained.metrics["train_runtime"]}


def _length_rows(found: dict[str, Any]) -> Rows:
    """Return the rows of one length; a metric without meaning has a reason in the place of its value."""
    length = found["length"]
    if reason := found.get("not_applicable"):
        return missing_rows(length, reason, "bits_per_byte", "loss")
    return metric_rows(length, **{name: found[name] for name in ("bits_per_byte", "loss") if name in found})


def run_probe(cell: Cell, file: str) -> Output:
    """Train a model on a probe at its trained size, and ask it at all sizes."""
    arguments, _, args = parse_arguments([file])
    options = cell.options
    probe, segment = PROBES[options["probe"]], options["segment"]
    count = options["train_examples"] or args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
    train = probe.examples(probe.trained_size, count, cell.seed).with_format("torch")
    set_seed(args.seed)
    config = build_config(arguments, len(train[0]["input_ids"]))
    auto = AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM
    model = auto.from_config(config)
    trainer = ProbeTrainer(
        model=model,
        args=args,
        train_dataset=train,
        data_collator=default_data_collator,
        optimizer_cls_and_kwargs=optimizer_by_kind(args),
        segment=segment,
    )
    trained = trainer.train()
    rows: Rows = []
    for size in probe.sizes[: options["sizes"]]:
        rows += ask(model, probe.examples(size, options["examples"], EVALUATION_SEED), size, segment, options["batch_size"])
    batch = train[: args.per_device_train_batch_size]
    result = {
        "rows": rows,
        "curves": kept_curves(trainer, cell.settings["block_size"]),
        "notes": [],
        "data": data_digest(train[:]["input_ids"]),
        "chance": [row for size in probe.sizes[: options["sizes"]] for row in metric_rows(size, accuracy=probe.chance(size))],
    }
    return result, cost_beside_baseline(cell, model, dict(batch)) | {"train_seconds": trained.metrics["train_runtime"]}


def ask(model: PreTrainedModel, examples: Any, size: int, segment: int | None, batch_size: int) -> Rows:
    """Return the exact accuracy over asked tokens and over whole examples."""
    table = examples.with_format("torch")[:]
    if reason := why_not(model, table["input_ids"].shape[1]):
        return missing_rows(size, reason, "accuracy", "exact_match")
    right = asked = whole = 0
    with evaluating(model):
        for ids, labels in zip(table["input_ids"].split(batch_size), table["labels"].split(batch_size), strict=True):
            targets = probe_targets(model, labels.to(model.device))
            hits = read_in_segments(model, ids.to(model.device), segment).argmax(-1) == targets
            wanted = targets != IGNORED
            right, asked = right + int((hits & wanted).sum()), asked + int(wanted.sum())
            whole += int((hits | ~wanted).all(1).sum())
    return metric_rows(size, accuracy=right / asked, exact_match=whole / len(table["labels"]))


RUNS: dict[str, Callable[[Cell, str], Output]] = {
    "language_modelling": run_text,
    "masked_lm": run_text,
    "permutation_lm": run_permuted,
    "classification": run_labelled,
    "tagging": run_labelled,
    "probe": run_probe,
}
"""What runs a cell of each kind, given its settings as a file of `train_lm.py`."""
