"""Predict tokens of verses in a random order, as XLNet does: python examples/permute_verses.py --data ."""

from transformers import AutoModelForPreTraining, DataCollatorForPermutationLanguageModeling, EarlyStoppingCallback, Trainer

from hf_relpos.data.labelled import read_verses
from hf_relpos.evaluation.language_model import language_model_metrics, score_rows
from hf_relpos.training.tasks import parse_task, start_task, take_rows, train_and_test


def main(argv: list[str] | None = None) -> dict[str, float]:
    defaults = {"output_dir": "runs/permute_verses", "metric_for_best_model": "accuracy", "position_scheme": "xlnet"}
    task, args = parse_task(argv, **defaults)
    tables = read_verses(task.data)
    tokenizer, model = start_task(AutoModelForPreTraining, task, args.seed, tables["train"]["text"])

    def cut(part):  # all blocks have the same length, an even one: the collator takes no others
        ids = [token for verse in tokenizer(list(part["text"])).input_ids for token in verse]
        size = task.max_length // 2 * 2
        return [{"input_ids": ids[at : at + size]} for at in range(0, len(ids) - size + 1, size)]

    tables = take_rows({name: cut(part) for name, part in tables.items()}, task)
    trainer = Trainer(
        model,
        args,
        data_collator=DataCollatorForPermutationLanguageModeling(tokenizer),
        train_dataset=tables["train"],
        eval_dataset=tables["validation"],
        processing_class=tokenizer,
        compute_metrics=language_model_metrics,  # loss, perplexity and accuracy of all targets
        preprocess_logits_for_metrics=score_rows,
        callbacks=[EarlyStoppingCallback(task.early_stopping_patience)],
    )
    return train_and_test(trainer, tables["test"])


if __name__ == "__main__":
    main()
