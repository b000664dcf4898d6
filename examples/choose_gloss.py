"""Choose which of four glosses belongs to a word: python examples/choose_gloss.py --data wordnet"""

from datasets import DatasetDict
from transformers import AutoModelForMultipleChoice, DataCollatorForMultipleChoice, EarlyStoppingCallback, Trainer

from hf_relpos.data.labelled import read_glosses
from hf_relpos.metrics import score_labels
from hf_relpos.training.tasks import parse_task, start_task, take_rows, train_and_test


def main(argv: list[str] | None = None) -> dict[str, float]:
    task, args = parse_task(argv, output_dir="runs/choose_gloss", metric_for_best_model="accuracy")
    tables = take_rows(read_glosses(task.data).shuffle(seed=0), task)
    texts = (f"{row['lemma']} {row['gloss']}" for row in tables["train"])
    tokenizer, model = start_task(AutoModelForMultipleChoice, task, args.seed, texts)

    def offer(rows):  # beside the right gloss, those of three other rows
        glosses = list(rows["gloss"])

        def encode(row, number):
            choices = [glosses[(number + other) % len(glosses)] for other in (1, 2, 3)]
            choices.insert(number % 4, row["gloss"])
            inputs = tokenizer([row["lemma"]] * 4, choices, truncation=True)
            return {**inputs, "labels": number % 4}

        return rows.map(encode, with_indices=True)

    tables = DatasetDict({name: offer(rows) for name, rows in tables.items()})
    parts = {"train_dataset": tables["train"], "eval_dataset": tables["validation"], "processing_class": tokenizer}
    collator, stop = DataCollatorForMultipleChoice(tokenizer), EarlyStoppingCallback(task.early_stopping_patience)
    trainer = Trainer(model, args, collator, compute_metrics=score_labels, callbacks=[stop], **parts)
    return train_and_test(trainer, tables["test"])


if __name__ == "__main__":
    main()
