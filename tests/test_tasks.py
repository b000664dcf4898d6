"""Tasks on labelled text: the examples run on a few rows, their data are read and split, their metrics are exact."""

import importlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score
from sklearn.metrics import f1_score
from transformers import AutoModelForSeq2SeqLM
from transformers import AutoTokenizer

from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForSequenceClassification
from hf_relpos.data.labelled import read_glosses
from hf_relpos.data.labelled import read_treebank
from hf_relpos.data.labelled import read_verses
from hf_relpos.metrics import compute_metric
from hf_relpos.metrics import score_labels
from hf_relpos.training.tasks import parse_task
from hf_relpos.training.tasks import start_task
from hf_relpos.training.tasks import take_rows

EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS = ["small", "dog", "house", "tree", "river", "stone", "light", "bird", "cold", "warm", "run", "walk", "sing"]
METRICS = {
    "classify_glosses": {"accuracy", "macro_f1"},
    "tag_words": {"accuracy", "macro_f1"},
    "find_subjects": {"exact_match", "f1"},
    "choose_gloss": {"accuracy", "macro_f1"},
    "pair_verses": {"accuracy", "macro_f1"},
    "permute_verses": {"accuracy", "perplexity", "tokens"},
    "lemmatize": {"exact_match", "character_error_rate"},
}
TINY = ["--config_overrides", "hidden_size=16,num_hidden_layers=1,num_attention_heads=2", "--vocab_size", "300"]
TINY += ["--max_steps", "2", "--eval_steps", "1", "--disable_tqdm", "true", "--use_cpu", "true"]


def sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=5))


def conllu(documents: int, chance: random.Random) -> str:
    """Sentences of a subject, a verb and an object, one a document; with a contraction and an elided word, which are no words."""
    found = []
    for number in range(documents):
        subject, object_ = f"{chance.choice(WORDS)}{number}", chance.choice(WORDS)
        words = [
            (subject + "s", subject, "NOUN", 2, "nsubj"),
            ("saw", "see", "VERB", 0, "root"),
            (object_, object_, "NOUN", 2, "obj"),
        ]
        rows = [
            f"{at}\t{w}\t{lemma}\t{tag}\t_\tF=1\t{head}\t{name}\t_\t_"
            for at, (w, lemma, tag, head, name) in enumerate(words, 1)
        ]
        other = ["\t".join([at, *"_" * 9]) for at in ("1-2", "2.1")]
        found += [f"# newdoc id = {number}", "# text = ...", other[0], *rows[:2], other[1], *rows[2:], ""]
    return "\n".join(found)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with made-up files of every source."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    glosses = [
        f"{kind}\t{chance.choice(WORDS)}\t{sentence(chance)}" for _ in range(60) for kind in ("noun.animal", "verb.motion")
    ]
    (folder / "glosses.tsv").write_text("\n".join(glosses) + "\n", encoding="utf-8")
    verses = [f"Ge{chapter}:{verse} {sentence(chance)}." for chapter in range(1, 40) for verse in range(1, 5)]
    (folder / "kjv.txt").write_text("\n".join(verses) + "\n", encoding="utf-8")
    (folder / "en_ewt-ud-dev.conllu").write_text(conllu(60, chance), encoding="utf-8")
    (folder / "en_ewt-ud-test.conllu").write_text(conllu(9, chance).replace("saw\tsee", "hid\thide"), encoding="utf-8")
    return folder


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.parametrize("name", METRICS)
def test_example_trains_keeps_the_best_model_and_tests_it(name: str, data: Path, tmp_path: Path, example: Any) -> None:
    found = example(name).main(["--data", str(data), "--output_dir", str(tmp_path), *TINY])
    assert {f"test_{metric}" for metric in METRICS[name]} | {"test_loss"} <= set(found)
    assert all(np.isfinite(value) for value in found.values())
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "modeling_relpos.py", "tokenizer.json", "test_results.json"} <= names
    assert 1 <= len(list(tmp_path.glob("checkpoint-*"))) <= 2  # the best one, and the last
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length in (64, 128)


def test_examples_are_short_and_all_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(METRICS)
    for path in EXAMPLES.glob("*.py"):
        assert path.read_text(encoding="utf-8").count("\n") <= 40, path.name


def test_what_an_example_cannot_do_is_refused_with_the_reason(data: Path, tmp_path: Path, example: Any) -> None:
    classify, given = example("classify_glosses"), ["--output_dir", str(tmp_path / "run"), *TINY]
    with pytest.raises(ValueError, match=r"kjv.txt is missing: it comes from the Debian package .*--data names the folder"):
        example("pair_verses").main(["--data", str(tmp_path), *given])
    with pytest.raises(ValueError, match=r"data.noun is missing: it comes from https://wordnetcode"):
        classify.main(["--data", str(tmp_path), *given])
    with pytest.raises(KeyError, match="'eval_bleu', which is not found.*eval_macro_f1"):
        classify.main(["--data", str(data), *given, "--metric_for_best_model", "bleu"])
    other, argv = tmp_path / "other", [*TINY[2:], "--output_dir", str(tmp_path / "run")]
    RelPosEncoderForSequenceClassification(
        RelPosEncoderConfig(
            vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, id2label={0: "code", 1: "prose"}
        )
    ).save_pretrained(other)
    for run in (classify, example("tag_words")):
        with pytest.raises(ValueError, match=r"tells 2 classes apart, \['code', 'prose'\], but the data have 2, \["):
            run.main(["--data", str(data), *argv, "--model_name_or_path", str(other)])
    with pytest.raises(ValueError, match="no field 'hiden_size'; did you mean 'hidden_size'"):
        classify.main(["--data", str(data), *given, "--config_overrides", "hiden_size=8"])


def test_equal_texts_are_in_one_split(data: Path, tmp_path: Path) -> None:
    lines = (data / "glosses.tsv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "glosses.tsv").write_text("\n".join(reversed(lines + lines)), encoding="utf-8")
    first, again = read_glosses(data), read_glosses(tmp_path)
    for name in first:
        assert set(first[name]["gloss"]) == set(again[name]["gloss"]) and 2 * len(first[name]) == len(again[name])
    assert sum(len(part) for part in first.values()) == len(lines)
    assert not set(first["train"]["gloss"]) & set(first["test"]["gloss"])
    assert {row["part_of_speech"] for row in first["train"]} == {"noun", "verb"}
    chapters = [set(part["chapter"]) for part in read_verses(data).values()]
    assert sum(map(len, chapters)) == len(set.union(*chapters)) == 39


def test_wordnets_own_files(tmp_path: Path) -> None:
    chance, licence = random.Random(0), "  1 This software and database is being provided to you\n"
    for name in ("noun", "adj"):
        rows = [f'0000174{at} 03 n 01 living_{name} 0 001 ~ 00001930 n 0000 | {sentence(chance)}; "so"  ' for at in range(60)]
        (tmp_path / f"data.{name}").write_text(licence + "\n".join(rows) + "\n", encoding="utf-8")
    rows = [row for part in read_glosses(tmp_path).values() for row in part]
    assert len(rows) == 120 and {(row["lemma"], row["part_of_speech"]) for row in rows} == {
        ("living noun", "noun"),
        ("living adj", "adj"),
    }
    assert all(len(row["gloss"].split()) == 5 and ";" not in row["gloss"] for row in rows)


def test_a_treebank_has_words_and_three_splits(data: Path, tmp_path: Path) -> None:
    found = read_treebank(data)
    assert len(found["train"]) + len(found["validation"]) == 60 and len(found["test"]) == 9
    row = found["test"][0]
    assert row["words"][0] == row["lemmas"][0] + "s" and row["words"][1] == "hid" and row["tags"] == ["NOUN", "VERB", "NOUN"]
    assert (row["heads"], row["relations"]) == (["2", "0", "2"], ["nsubj", "root", "obj"])
    for name, size in {"train": 4, "dev": 3, "test": 2}.items():
        (tmp_path / f"xx-{name}.conllu").write_text(conllu(size, random.Random(1)), encoding="utf-8")
    assert [len(part) for part in read_treebank(tmp_path, "xx").values()] == [4, 3, 2]


def test_bad_rows_are_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "glosses.tsv").write_text("noun.act\trun\ta race\nnoun.act\trun\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 has 2 columns, not class, lemma and gloss"):
        read_glosses(tmp_path)
    (tmp_path / "glosses.tsv").write_text("noun.act\trun\ta race\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no row is in the split '.*': the files have too few rows"):
        read_glosses(tmp_path)
    for name in ("dev", "test"):
        (tmp_path / f"en_ewt-ud-{name}.conllu").write_text("# newdoc\n1\tword\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 has 2 columns, not the 10 of CoNLL-U"):
        read_treebank(tmp_path)


def test_rows_are_taken_from_the_whole_split_and_always_the_same(data: Path) -> None:
    task, args = parse_task(["--max_train_samples", "20", "--max_eval_samples", "4", "--output_dir", "none"], seed=3)
    assert args.seed == 3 and args.load_best_model_at_end
    taken, again = take_rows(read_glosses(data), task), take_rows({"train": [{"a": 1}]}, task)
    assert {name: len(part) for name, part in taken.items()} == {"train": 20, "validation": 4, "test": 4}
    with pytest.raises(ValueError, match="no row is left for the split 'test'"):
        take_rows({"train": [{"a": 1}], "test": []}, task)
    assert list(taken["train"]["gloss"]) == list(take_rows(read_glosses(data), task)["train"]["gloss"])
    assert set(taken["train"]["part_of_speech"]) == {"noun", "verb"} and again["train"][0] == {"a": 1}


def test_a_new_encoder_decoder_begins_with_the_padding_of_its_tokenizer() -> None:
    argv = ["--model_type", "relpos_seq2seq", "--tokenizer_name", "byte", *TINY]
    task, args = parse_task([*argv, "--output_dir", "none"])
    tokenizer, model = start_task(AutoModelForSeq2SeqLM, task, args.seed, [])
    assert model.config.decoder_start_token_id == tokenizer.pad_token_id == model.config.pad_token_id


def test_scores_of_labels_are_those_of_scikit_learn() -> None:
    guesses, labels = np.random.default_rng(0).integers(0, 5, (2, 200))
    found = compute_metric("label_scores", predictions=guesses, references=labels)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, guesses))
    assert found["macro_f1"] == pytest.approx(f1_score(labels, guesses, average="macro"))
    labels[::3] = -100
    kept: Any = SimpleNamespace(predictions=np.eye(5)[guesses].reshape(20, 10, 5), label_ids=labels.reshape(20, 10))
    found, known = score_labels(kept), labels != -100
    assert found["macro_f1"] == pytest.approx(f1_score(labels[known], guesses[known], average="macro"))
    with pytest.raises(ValueError, match="every reference is -100"):
        compute_metric("label_scores", predictions=[1], references=[-100])


def test_scores_of_answers_and_texts() -> None:
    spans = compute_metric("answer_scores", predictions=[[2, 4], [5, 3], [1, 2]], references=[[2, 4], [3, 5], [2, 5]])
    assert spans == {"exact_match": pytest.approx(1 / 3), "f1": pytest.approx((1 + 0 + 2 / 6) / 3)}
    texts = compute_metric("text_match", predictions=["go", "kitten", ""], references=["go", "sitting", "be"])
    assert texts == {"exact_match": pytest.approx(1 / 3), "character_error_rate": pytest.approx(5 / 11)}


def test_the_page_of_the_table_shows_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "tests" / "benchmarks"))
    report, folder = importlib.import_module("tasks_table"), EXAMPLES.parent / "docs" / "benchmarks"
    results = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    assert report.table(results) in (folder / "tasks.md").read_text(encoding="utf-8")
    left, right = report.draw(results).axes
    schemes = {scheme for scheme, _ in report.cells_of(results, "tag_words")}
    assert {label.get_text() for label in left.get_yticklabels()} == schemes and len(schemes) >= 4
    assert right.get_legend_handles_labels()[1] == ["scratch", "pretrained", "most frequent tag of each word"]
    assert report.spread([0.5, 0.7]) == "60.0 ± 14.1"
