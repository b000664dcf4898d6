"""Tag the words of English sentences: python examples/tag_words.py --data ud_english_ewt --position_scheme rope"""

from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, EarlyStoppingCallback, Trainer

from hf_relpos.data.labelled import read_treebank
from hf_relpos.metrics import score_labels
from hf_relpos.training.tasks import parse_task, start_task, take_rows, train_and_test


def main(argv: list[str] | None = None) -> dict[str, float]:
    task, args = parse_task(argv, output_dir="runs/tag_words", metric_for_best_model="accuracy", max_length=128)
    tables = take_rows(read_treebank(task.data), task)
    names = sorted({tag for part in tables.values() for row in part["tags"] for tag in row})
    texts = (" ".join(words) for words in tables["train"]["words"])
    tokenizer, model = start_task(AutoModelForTokenClassification, task, args.seed, texts, names)

    def encode(row):  # the first token of each word has its tag, the others have none
        inputs = tokenizer(row["words"], is_split_into_words=True, truncation=True)
        places = inputs.word_ids()
        first = [word != before for word, before in zip(places, [None, *places])]
        return {**inputs, "labels": [names.index(row["tags"][word]) if new else -100 for word, new in zip(places, first)]}

    tables = tables.map(encode)
    parts = {"train_dataset": tables["train"], "eval_dataset": tables["validation"], "processing_class": tokenizer}
    collator, stop = DataCollatorForTokenClassification(tokenizer), EarlyStoppingCallback(task.early_stopping_patience)
    trainer = Trainer(model, args, collator, compute_metrics=score_labels, callbacks=[stop], **parts)
    return train_and_test(trainer, tables["test"])


if __name__ == "__main__":
    main()
