"""What do encoders reach on two tasks of real text, from scratch and after masked-LM pretraining?

    python tests/benchmarks/tasks_table.py --wordnet FOLDER --treebank FOLDER --verses FOLDER --output_dir runs/tasks

The tasks are examples/classify_glosses.py and examples/tag_words.py, run as they are. Every scheme and seed is pretrained once, by
train_lm.py, on rows of WordNet's glosses, the verses and the treebank that are neither for validation nor for the test.
Beside them stand baselines without a network. Finished cells are kept in results.json and not run again, so other settings need another folder.
`--report FOLDER` only writes the table and the plot from the results of that folder.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections import Counter
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
SIZES = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4"
QUIET = ["--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--per_device_eval_batch_size", "64"]
PRETRAIN = ["--model_type", "relpos_encoder", "--block_size", "64", "--per_device_train_batch_size", "32", *QUIET]
PRETRAIN += ["--lr_scheduler_type", "cosine", "--learning_rate", "4e-3", "--muon_learning_rate", "0.02"]
PRETRAIN += ["--save_strategy", "no", "--eval_strategy", "no", "--max_eval_samples", "200", "--do_train", "--do_eval"]
TRAIN = ["--per_device_train_batch_size", "32", "--learning_rate", "2e-3", *QUIET]
ROWS = ["--max_train_samples", "4000", "--max_eval_samples", "1000"]
VOCABULARY = 1024  # small, because the head of the masked language model is most of its cost
TASKS = {"classify_glosses": "macro_f1", "tag_words": "accuracy"}
"""The example of each task, and the metric of the plot."""
BEGINNINGS = ("scratch", "pretrained")


def write_texts(folder: Path, given: argparse.Namespace) -> None:
    """Write the text of each split, once, and the tokenizer that all models share."""
    from hf_relpos.data.labelled import read_glosses
    from hf_relpos.data.labelled import read_treebank
    from hf_relpos.data.labelled import read_verses
    from hf_relpos.data.tokenizers import train_bpe_tokenizer

    if (folder / "tokenizer").is_dir():
        return
    glosses, verses, sentences = read_glosses(given.wordnet), read_verses(given.verses), read_treebank(given.treebank)
    for split in ("validation", "train"):
        words = (" ".join(words) for words in sentences[split]["words"])
        texts = [
            *glosses[split]["gloss"][::3],
            *verses[split]["text"][::4],
            *words,
        ]  # what the steps of pretraining read about once
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    train_bpe_tokenizer(texts, VOCABULARY).save_pretrained(folder / "tokenizer")


def pretrain(scheme: str, seed: int, folder: Path, steps: int) -> dict[str, float]:
    """Pretrain one model by masked language modelling; return what it reached on text for validation."""
    from hf_relpos.training.run import main

    output = folder / f"pretrained-{scheme}-{seed}"
    argv = ["--position_scheme", scheme, "--seed", str(seed), "--config_overrides", SIZES, "--output_dir", str(output)]
    argv += ["--train_file", str(folder / "train.jsonl"), "--validation_file", str(folder / "validation.jsonl")]
    argv += ["--tokenizer_name", str(folder / "tokenizer"), "--max_steps", str(steps), "--overwrite_output_dir", "true"]
    main([*PRETRAIN, *argv])
    return json.loads((output / "all_results.json").read_text(encoding="utf-8"))


def fine_tune(task: str, scheme: str, seed: int, begin: str, folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Run the example of a task; return its metrics on the test rows."""
    data = {"classify_glosses": given.wordnet, "tag_words": given.treebank}[task]
    argv = ["--data", data, "--seed", str(seed), *TRAIN, *ROWS]
    argv += ["--output_dir", str(folder / "run"), "--max_steps", str(given.steps), "--eval_steps", str(given.steps // 2)]
    if begin == "pretrained":
        argv += ["--model_name_or_path", str(folder / f"pretrained-{scheme}-{seed}")]
    else:
        argv += ["--position_scheme", scheme, "--config_overrides", SIZES, "--tokenizer_name", str(folder / "tokenizer")]
    return importlib.import_module(task).main(argv)


def baselines(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Score what needs no network, on the rows that the examples train and test on."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    from hf_relpos.data.labelled import read_glosses
    from hf_relpos.data.labelled import read_treebank
    from hf_relpos.metrics import compute_metric
    from hf_relpos.training.tasks import parse_task
    from hf_relpos.training.tasks import take_rows

    task, _ = parse_task([*ROWS, "--output_dir", "none"])
    glosses, sentences = take_rows(read_glosses(given.wordnet), task), take_rows(read_treebank(given.treebank), task)
    texts, labels = ({split: list(glosses[split][name]) for split in glosses} for name in ("gloss", "part_of_speech"))
    majority = Counter(labels["train"]).most_common(1)[0][0]
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = LogisticRegression(C=10, max_iter=1000, class_weight="balanced").fit(
        words.fit_transform(texts["train"]), labels["train"]
    )
    seen: dict[str, Counter] = defaultdict(Counter)
    for row in sentences["train"]:
        for word, tag in zip(row["words"], row["tags"], strict=True):
            seen[word.lower()][tag] += 1
            seen[""][tag] += 1
    tagged = [(word.lower(), tag) for row in sentences["test"] for word, tag in zip(row["words"], row["tags"], strict=True)]
    right = [tag for _, tag in tagged]
    guessed = {
        "classify_glosses, majority class": ([majority] * len(labels["test"]), labels["test"]),
        "classify_glosses, TF-IDF and logistic regression": (
            list(model.predict(words.transform(texts["test"]))),
            labels["test"],
        ),
        "tag_words, most frequent tag": ([seen[""].most_common(1)[0][0]] * len(right), right),
        "tag_words, most frequent tag of each word": (
            [(seen.get(word) or seen[""]).most_common(1)[0][0] for word, _ in tagged],
            right,
        ),
    }
    found = {}
    for name, pair in guessed.items():
        number = {label: at for at, label in enumerate(sorted({str(label) for part in pair for label in part}))}
        guesses, references = ([number[str(label)] for label in part] for part in pair)
        found[name] = compute_metric("label_scores", predictions=guesses, references=references)
    return found


def measure(given: argparse.Namespace) -> None:
    """Run every cell that has no result, the first seed first, and write the results after each."""
    folder = given.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "examples"))
    path = folder / "results.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def cell(name: str, work: Any) -> None:
        if name not in results:
            start = time.process_time()
            results[name] = work() | {"cpu_seconds": round(time.process_time() - start, 1)}
            path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            print(name, results[name], flush=True)

    write_texts(folder, given)
    for name, scores in baselines(given).items() if not any("majority" in name for name in results) else ():
        cell(name, scores.copy)
    for seed in given.seeds:
        for scheme in given.schemes:
            cell(
                f"pretraining, {scheme}, {seed}",
                lambda scheme=scheme, seed=seed: pretrain(scheme, seed, folder, given.pretraining_steps),
            )
            for task in TASKS:
                for begin in BEGINNINGS:
                    key = task, scheme, seed, begin
                    cell(", ".join(map(str, key)), lambda key=key: fine_tune(*key, folder, given))


def cells_of(results: dict[str, Any], task: str) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Return the metrics of all seeds by scheme and beginning."""
    found = defaultdict(list)
    for name, metrics in results.items():
        parts = name.split(", ")
        if parts[0] == task and len(parts) == 4:
            found[parts[1], parts[3]].append(metrics)
    return dict(found)


def spread(values: list[float]) -> str:
    """Return mean and standard deviation, as percent."""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{deviation}"


def table(results: dict[str, Any]) -> str:
    """Return the tables of both tasks in Markdown."""
    lines = []
    for task in TASKS:
        lines += ["", f"`{task}`", "", "| model | begins | seeds | accuracy, % | macro-F1, % |", "|---|---|---|---|---|"]
        for name, metrics in results.items():
            if name.startswith(f"{task}, ") and name.count(", ") == 1:
                lines.append(
                    f"| {name.split(', ')[1]} |  |  | {100 * metrics['accuracy']:.1f} | {100 * metrics['macro_f1']:.1f} |"
                )
        for (scheme, begin), runs in sorted(
            cells_of(results, task).items(), key=lambda item: (item[0][1] != "scratch", item[0][0])
        ):
            scores = [spread([run[f"test_{metric}"] for run in runs]) for metric in ("accuracy", "macro_f1")]
            lines.append(f"| `{scheme}` | {begin} | {len(runs)} | {' | '.join(scores)} |")
    lines += [
        "",
        "masked language modelling",
        "",
        "| scheme | seeds | validation loss, nats | accuracy, % |",
        "|---|---|---|---|",
    ]
    pretrained = defaultdict(list)
    for name, metrics in results.items():
        if name.startswith("pretraining, "):
            pretrained[name.split(", ")[1]].append(metrics)
    for scheme, runs in sorted(pretrained.items()):
        loss = statistics.mean(run["eval_loss"] for run in runs)
        lines.append(f"| `{scheme}` | {len(runs)} | {loss:.3f} | {spread([run['eval_accuracy'] for run in runs])} |")
    return "\n".join(lines[1:])


def draw(results: dict[str, Any]) -> Figure:
    """Draw a dot a seed, from scratch and pretrained, and the baselines as lines."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, (task, metric) in zip(figure.subplots(1, 2), TASKS.items(), strict=True):
        found = cells_of(results, task)
        schemes = sorted({scheme for scheme, _ in found})
        for shift, begin in zip((-0.12, 0.12), BEGINNINGS, strict=True):
            points = [
                (row + shift, run[f"test_{metric}"])
                for row, scheme in enumerate(schemes)
                for run in found.get((scheme, begin), ())
            ]
            axes.plot([100 * value for _, value in points], [row for row, _ in points], "o", alpha=0.7, label=begin)
        for at, (name, scores) in enumerate((name, scores) for name, scores in results.items() if name.count(", ") == 1):
            if name.startswith(task) and "majority" not in name and name != "tag_words, most frequent tag":
                axes.axvline(100 * scores[metric], color=f"C{at + 2}", linestyle="--", label=name.split(", ")[1])
        axes.set_yticks(range(len(schemes)), schemes)
        axes.set_xlabel(f"{task}: {metric.replace('_', ' ')}, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def main() -> None:
    """Measure, or only report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", default="data", help="folder of glosses.tsv")
    parser.add_argument("--treebank", default="data", help="folder of en_ewt-ud-*.conllu")
    parser.add_argument("--verses", default="data", help="folder of kjv.txt")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--schemes", nargs="+", default=["sinusoidal", "rope", "t5", "shaw"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pretraining_steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=150, help="of training on a task; it is evaluated twice")
    parser.add_argument(
        "--report", type=Path, help="write the plot into this folder, which holds tasks.json, and print the table"
    )
    given = parser.parse_args()
    if given.report is None:
        measure(given)
    results = json.loads((given.report / "tasks.json" if given.report else given.output_dir / "results.json").read_text())
    print(table(results))
    draw(results).savefig((given.report or given.output_dir) / "tasks.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
