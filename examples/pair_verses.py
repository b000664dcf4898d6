"""Tell whether one verse follows another: python examples/pair_verses.py --data . --position_scheme rope"""

from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback, Trainer

from hf_relpos.data.labelled import read_verses
from hf_relpos.metrics import score_labels
from hf_relpos.training.tasks import parse_task, start_task, take_rows, train_and_test


def pair(verses):  # every second verse stands beside the next one, the others beside one of another chapter
    texts, chapters = list(verses["text"]), list(verses["chapter"])
    seconds = [texts[(at + (1 if at % 2 else len(texts) // 2)) % len(texts)] for at in range(len(texts))]
    rows = [{"first": text, "second": seconds[at], "labels": at % 2} for at, text in enumerate(texts)]
    return [row for at, row in enumerate(rows[:-1]) if chapters[at] == chapters[at + 1]]


def main(argv: list[str] | None = None) -> dict[str, float]:
    task, args = parse_task(argv, output_dir="runs/pair_verses", metric_for_best_model="accuracy", max_length=128)
    tables = take_rows({name: pair(part) for name, part in read_verses(task.data).items()}, task)
    auto, names = AutoModelForSequenceClassification, ["elsewhere", "follows"]
    tokenizer, model = start_task(auto, task, args.seed, tables["train"]["first"], names)

    def encode(row):  # the longer of both is cut
        return tokenizer(row["first"], row["second"], truncation=True)

    tables = tables.map(encode)
    parts = {"train_dataset": tables["train"], "eval_dataset": tables["validation"], "processing_class": tokenizer}
    stop = EarlyStoppingCallback(task.early_stopping_patience)
    trainer = Trainer(model, args, compute_metrics=score_labels, callbacks=[stop], **parts)
    return train_and_test(trainer, tables["test"])


if __name__ == "__main__":
    main()
