"""Tell nouns from verbs by their WordNet glosses: python examples/classify_glosses.py --data wordnet --position_scheme t5"""

from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback, Trainer

from hf_relpos.data.labelled import read_glosses
from hf_relpos.metrics import score_labels
from hf_relpos.training.tasks import parse_task, start_task, take_rows, train_and_test


def main(argv: list[str] | None = None) -> dict[str, float]:
    task, args = parse_task(argv, output_dir="runs/classify_glosses", metric_for_best_model="macro_f1")
    tables = take_rows(read_glosses(task.data), task)
    names = sorted({name for part in tables.values() for name in part["part_of_speech"]})
    auto = AutoModelForSequenceClassification
    tokenizer, model = start_task(auto, task, args.seed, tables["train"]["gloss"], names)

    def encode(row):
        inputs = tokenizer(row["gloss"], truncation=True)
        return {**inputs, "labels": names.index(row["part_of_speech"])}

    tables = tables.map(encode)
    parts = {"train_dataset": tables["train"], "eval_dataset": tables["validation"], "processing_class": tokenizer}
    stop = EarlyStoppingCallback(task.early_stopping_patience)
    trainer = Trainer(model, args, compute_metrics=score_labels, callbacks=[stop], **parts)
    return train_and_test(trainer, tables["test"])


if __name__ == "__main__":
    main()
