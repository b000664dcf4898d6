"""Tasks of a comparison with labelled text: the class of a text, the tag of each word, by an encoder trained from scratch."""

import hashlib
import json
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers import AutoModelForTokenClassification
from transformers import DataCollatorForTokenClassification
from transformers import DataCollatorWithPadding
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.labelled_files import LabelledSource
from hf_relpos.data.labelled_files import class_names
from hf_relpos.data.labelled_files import read_labelled
from hf_relpos.data.packing import IGNORED
from hf_relpos.evaluation.cells import Cell
from hf_relpos.evaluation.language_model import evaluating
from hf_relpos.evaluation.outcome import Output
from hf_relpos.evaluation.outcome import Rows
from hf_relpos.evaluation.outcome import cost_beside_baseline
from hf_relpos.evaluation.outcome import kept_curves
from hf_relpos.evaluation.outcome import metric_rows
from hf_relpos.metrics import compute_metric
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.checked_trainer import CheckedTrainer
from hf_relpos.training.optimizer import optimizer_by_kind
from hf_relpos.training.tasks import TaskArguments
from hf_relpos.training.tasks import start_task
from hf_relpos.training.tasks import take_rows

HEADS: dict[str, tuple[Any, Any]] = {
    "classification": (AutoModelForSequenceClassification, DataCollatorWithPadding),
    "tagging": (AutoModelForTokenClassification, DataCollatorForTokenClassification),
}
"""The class of the head of each kind, and the collator of its rows."""


def run_labelled(cell: Cell, file: str) -> Output:
    """Train a classifier of texts or of words, and score it on rows that it has not read."""
    arguments, data, args = parse_arguments([file])
    options, length = cell.options, cell.settings["block_size"]
    task = TaskArguments(
        **vars(arguments),
        tokenizer_name=data.tokenizer_name or "byte",
        vocab_size=data.vocab_size,
        max_length=length,
        max_train_samples=options["train_examples"],
        max_eval_samples=options["examples"],
    )
    source = LabelledSource(**options["source"])
    taken = take_rows(read_labelled(source), task)
    tables: dict[str, Rows] = {str(split): list(rows) for split, rows in taken.items()}  # pyright: ignore[reportAssignmentType]
    names = class_names(tables, source)
    auto, collate = HEADS[cell.kind]
    texts = (row["text"] if isinstance(row["text"], str) else " ".join(row["text"]) for row in tables["train"])
    tokenizer, model = start_task(auto, task, args.seed, texts, names)
    encoded = {split: [encode_row(row, tokenizer, names) for row in rows] for split, rows in tables.items()}
    collator = collate(tokenizer)
    trainer = CheckedTrainer(
        model=model,
        args=args,
        train_dataset=encoded["train"],  # pyright: ignore[reportArgumentType] (a list is one, too)
        data_collator=collator,
        optimizer_cls_and_kwargs=optimizer_by_kind(args),
    )
    trained = trainer.train()
    rows = metric_rows(length, **score_classes(model, encoded["validation"], collator, options["batch_size"]))
    result = {
        "rows": rows,
        "curves": kept_curves(trainer, length),
        "notes": [_describe(encoded, tables, names, length)],
        "data": hashlib.sha256(json.dumps(encoded, sort_keys=True).encode()).hexdigest(),
        "chance": metric_rows(length, **majority(encoded)),
    }
    batch = dict(collator([dict(row) for row in encoded["train"][: args.per_device_train_batch_size]]))
    return result, cost_beside_baseline(cell, model, batch) | {"train_seconds": trained.metrics["train_runtime"]}


def encode_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, names: list[str]) -> dict[str, Any]:
    """Return the tokens of a row and its label; of words, the first token of each has its tag, and the others have none."""
    if isinstance(row["text"], str):
        return {**tokenizer(row["text"], truncation=True), "labels": names.index(row["label"])}
    inputs = tokenizer(row["text"], is_split_into_words=True, truncation=True)
    words = inputs.word_ids()
    labels = [
        names.index(row["label"][word]) if word is not None and word != before else IGNORED
        for word, before in zip(words, [None, *words], strict=False)
    ]
    return {**inputs, "labels": labels}


def score_classes(model: PreTrainedModel, rows: Rows, collator: Any, batch_size: int) -> dict[str, float]:
    """Return accuracy and macro-F1 over all rows or words that have a label.

    Args:
        model: a classifier of rows or of tokens.
        rows: encoded rows.
        collator: makes a batch of them.
        batch_size: rows that are read at a time.
    """
    guesses: list[int] = []
    references: list[int] = []
    with evaluating(model):
        for at in range(0, len(rows), batch_size):
            batch = {name: values.to(model.device) for name, values in collator(rows[at : at + batch_size]).items()}
            guesses += model(**batch).logits.argmax(-1).flatten().tolist()
            references += batch["labels"].flatten().tolist()
    return _scores(guesses, references)


def majority(encoded: dict[str, Rows]) -> dict[str, float]:
    """Return what always saying the most frequent class of the training rows reaches on the others."""
    train, validation = (
        torch.cat([torch.tensor(row["labels"]).flatten() for row in encoded[split]]).tolist()
        for split in ("train", "validation")
    )
    most = Counter(label for label in train if label != IGNORED).most_common(1)[0][0]
    return _scores([most] * len(validation), validation)


def _scores(guesses: list[int], references: list[int]) -> dict[str, float]:
    found = compute_metric("label_scores", predictions=guesses, references=references)
    return {name: float(found[name]) for name in ("macro_f1", "accuracy")}


def _describe(encoded: dict[str, Rows], tables: dict[str, Rows], names: list[str], length: int) -> str:
    """Say how many rows and classes there are, and what truncation cuts off."""
    cut = sum(len(row["input_ids"]) == length for row in encoded["train"]) / len(encoded["train"])
    return (
        f"{len(tables['train'])} rows to train, {len(tables['validation'])} to evaluate on, {len(names)} classes; "
        f"{cut:.0%} of the rows fill or exceed the {length} tokens of a row, and what exceeds them is cut off"
    )
