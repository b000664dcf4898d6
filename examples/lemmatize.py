"""Write the lemma of a word, letter by letter: python examples/lemmatize.py --data ud_english_ewt --position_scheme t5"""

import numpy as np
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, EarlyStoppingCallback, Seq2SeqTrainer
from transformers import Seq2SeqTrainingArguments as Arguments

from hf_relpos.data.labelled import read_treebank
from hf_relpos.metrics import load_metric
from hf_relpos.training.tasks import parse_task, start_task, take_rows, train_and_test


def main(argv: list[str] | None = None) -> dict[str, float]:
    defaults = {"model_type": "relpos_seq2seq", "tokenizer_name": "byte", "metric_for_best_model": "exact_match"}
    task, args = parse_task(argv, Arguments, output_dir="runs/lemmatize", predict_with_generate=True, **defaults)
    seen, splits, columns = set(), {}, ("words", "tags", "features", "lemmas")
    for name, part in read_treebank(task.data).items():  # each word once, and none in two splits
        rows = (row for sentence in part for row in zip(*map(sentence.get, columns)) if row[0] not in seen)
        found = {" ".join(row[:3]): row[3] for row in rows}
        splits[name] = [{"source": source, "lemma": lemma} for source, lemma in found.items()]
        seen |= {source.split(" ")[0] for source in found}
    tables = take_rows(splits, task)
    tokenizer, model = start_task(AutoModelForSeq2SeqLM, task, args.seed, tables["train"]["source"])
    args.generation_max_length, model.generation_config.max_new_tokens = 32, None

    def encode(row):
        return tokenizer(row["source"], text_target=row["lemma"] + tokenizer.eos_token, truncation=True)

    def metrics(prediction):
        ids = [np.where(rows < 0, tokenizer.pad_token_id, rows) for rows in (prediction.predictions, prediction.label_ids)]
        guesses, lemmas = (tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in ids)
        return load_metric("text_match").compute(predictions=guesses, references=lemmas)

    tables = tables.map(encode)
    parts = {"train_dataset": tables["train"], "eval_dataset": tables["validation"], "processing_class": tokenizer}
    parts |= {"compute_metrics": metrics, "callbacks": [EarlyStoppingCallback(task.early_stopping_patience)]}
    return train_and_test(Seq2SeqTrainer(model, args, DataCollatorForSeq2Seq(tokenizer), **parts), tables["test"])


if __name__ == "__main__":
    main()
