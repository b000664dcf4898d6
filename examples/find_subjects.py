"""Answer "who or what did it?" by a span of the sentence: python examples/find_subjects.py --data ud_english_ewt"""

import numpy as np
from transformers import AutoModelForQuestionAnswering, EarlyStoppingCallback, Trainer

from hf_relpos.data.labelled import read_treebank
from hf_relpos.metrics import load_metric
from hf_relpos.training.tasks import parse_task, start_task, take_rows, train_and_test


def ask(sentence):  # a question for each subject: the word that governs it
    words, subjects = sentence["words"], (at for at, name in enumerate(sentence["relations"]) if name.startswith("nsubj"))
    return [{"question": [words[int(sentence["heads"][at]) - 1]], "words": words, "answer": at} for at in subjects]


def main(argv: list[str] | None = None) -> dict[str, float]:
    task, args = parse_task(argv, output_dir="runs/find_subjects", metric_for_best_model="f1", max_length=128)
    tables = take_rows({name: sum(map(ask, part), []) for name, part in read_treebank(task.data).items()}, task)
    texts = map(" ".join, tables["train"]["words"])
    tokenizer, model = start_task(AutoModelForQuestionAnswering, task, args.seed, texts)

    def encode(row):  # the answer is all tokens of its word; -100 where they are cut off
        inputs = tokenizer(row["question"], row["words"], is_split_into_words=True, truncation="only_second")
        places = enumerate(zip(inputs.sequence_ids(), inputs.word_ids()))
        span = [at for at, place in places if place == (1, row["answer"])] or [-100]
        return {**inputs, "start_positions": span[0], "end_positions": span[-1]}

    def metrics(prediction):
        spans = np.stack([logits.argmax(-1) for logits in prediction.predictions], -1)
        return load_metric("answer_scores").compute(predictions=spans, references=np.stack(prediction.label_ids, -1))

    tables = tables.map(encode)
    parts = {"train_dataset": tables["train"], "eval_dataset": tables["validation"], "processing_class": tokenizer}
    parts |= {"compute_metrics": metrics, "callbacks": [EarlyStoppingCallback(task.early_stopping_patience)]}
    return train_and_test(Trainer(model, args, **parts), tables["test"])


if __name__ == "__main__":
    main()
