"""The tasks of a comparison: train one cell, evaluate it at several lengths, and measure what a step costs."""

import hashlib
import json
import platform
import tempfile
import time
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
from hf_relpos.evaluation.cost import step_cost
from hf_relpos.evaluation.language_model import evaluating
from hf_relpos.evaluation.lengths import effective_context
from hf_relpos.evaluation.lengths import evaluate_lengths
from hf_relpos.evaluation.lengths import loss_by_context
from hf_relpos.evaluation.lengths import why_not
from hf_relpos.evaluation.masked import evaluate_masked
from hf_relpos.evaluation.probe_trainer import ProbeTrainer
from hf_relpos.evaluation.probe_trainer import probe_targets
from hf_relpos.evaluation.probe_trainer import read_in_segments
from hf_relpos.evaluation.windows import take_windows
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.model_setup import is_masked
from hf_relpos.training.optimizer import optimizer_by_kind
from hf_relpos.training.run import prepare

Rows = list[dict[str, Any]]
Output = tuple[dict[str, Any], dict[str, Any]]
"""What a cell gives: its result, and its cost."""


def run_cell(cell: Cell) -> Output:
    """Train and evaluate a cell.

    Returns:
        `{"rows": [{"length", "metric", "value", "reason"}], "curves": {name: [...]}, "notes": [...], "data": digest}`, the same
        whenever and wherever the cell is run with the same code; and what it cost, which is not.
    """
    began, used = time.perf_counter(), time.process_time()
    with _settings_file(cell) as file:
        result, cost = {"language_modelling": run_text, "masked_lm": run_text, "probe": run_probe}[cell.kind](cell, file)
    cost |= {"machine": f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads"}
    cost |= {"seconds": time.perf_counter() - began, "all_process_seconds": time.process_time() - used}
    return result, cost


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
    curves = training_curves(job.trainer.state.log_history)
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
    data = hashlib.sha256(ids.numpy().tobytes() + windows.inputs.numpy().tobytes()).hexdigest()
    result = {"rows": rows, "curves": curves, "notes": windows.notes, "data": data}
    cost = _cost(cell, model, {"input_ids": ids.long(), "labels": ids.long()})
    return result, cost | {"train_seconds": trained.metrics["train_runtime"]}


def _length_rows(found: dict[str, Any]) -> Rows:
    """Return the rows of one length; a metric without meaning has a reason in the place of its value."""
    length = found["length"]
    if reason := found.get("not_applicable"):
        return [{"length": length, "metric": name, "value": None, "reason": reason} for name in ("bits_per_byte", "loss")]
    rows = [{"length": length, "metric": "loss", "value": found["loss"]}]
    if "bits_per_byte" in found:
        return [{"length": length, "metric": "bits_per_byte", "value": found["bits_per_byte"]}, *rows]
    return rows


def training_curves(history: Rows) -> dict[str, Rows]:
    """Return the losses that Trainer logged: of training batches, and of the validation blocks."""
    keep = {"training": ("loss",), "validation": ("eval_loss", "eval_bits_per_byte")}
    return {
        curve: [
            {"step": one["step"]} | {name: one[name] for name in names if name in one} for one in history if names[0] in one
        ]
        for curve, names in keep.items()
    }


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
        "curves": training_curves(trainer.state.log_history),
        "notes": [],
        "data": hashlib.sha256(train[:]["input_ids"].numpy().tobytes()).hexdigest(),
        "chance": {str(size): probe.chance(size) for size in probe.sizes[: options["sizes"]]},
    }
    return result, _cost(cell, model, dict(batch)) | {"train_seconds": trained.metrics["train_runtime"]}


def ask(model: PreTrainedModel, examples: Any, size: int, segment: int | None, batch_size: int) -> Rows:
    """Return the exact accuracy over asked tokens and over whole examples."""
    metrics = ("accuracy", "exact_match")
    table = examples.with_format("torch")[:]
    if reason := why_not(model, table["input_ids"].shape[1]):
        return [{"length": size, "metric": name, "value": None, "reason": reason} for name in metrics]
    right = asked = whole = 0
    with evaluating(model):
        for ids, labels in zip(table["input_ids"].split(batch_size), table["labels"].split(batch_size), strict=True):
            targets = probe_targets(model, labels.to(model.device))
            hits = read_in_segments(model, ids.to(model.device), segment).argmax(-1) == targets
            wanted = targets != IGNORED
            right, asked = right + int((hits & wanted).sum()), asked + int(wanted.sum())
            whole += int((hits | ~wanted).all(1).sum())
    values = right / asked, whole / len(table["labels"])
    return [{"length": size, "metric": name, "value": value} for name, value in zip(metrics, values, strict=True)]


def _cost(cell: Cell, model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Measure a step beside one of the baseline, which has no memory."""
    fields = model.config.to_dict() | {"position_parameters": {}} | cell.options["baseline"]
    if "mem_len" in fields:
        fields |= {"mem_len": 0, "sliding_window": None}
    auto = AutoModelForMaskedLM if is_masked(model.config) else AutoModelForCausalLM
    baseline = auto.from_config(type(model.config).from_dict(fields)).to(model.device)  # pyright: ignore[reportArgumentType]
    return step_cost(model.train(), baseline.train(), batch)
