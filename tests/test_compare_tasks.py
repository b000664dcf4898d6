"""What a cell of a comparison measures: answers of probes, masked and permuted tokens, classes, and the cost of a step."""

import json
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import DataCollatorForTokenClassification

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForPermutationLM
from hf_relpos.data.labelled_files import LabelledSource
from hf_relpos.data.labelled_files import describe_labelled
from hf_relpos.data.labelled_files import read_labelled
from hf_relpos.data.permuting import PermutationCollator
from hf_relpos.data.probes import PROBES
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.evaluation import permuted
from hf_relpos.evaluation.cost import peak_memory
from hf_relpos.evaluation.cost import step_cost
from hf_relpos.evaluation.labelled_tasks import encode_row
from hf_relpos.evaluation.labelled_tasks import majority
from hf_relpos.evaluation.labelled_tasks import score_classes
from hf_relpos.evaluation.learned_bias import bias_by_distance
from hf_relpos.evaluation.masked import evaluate_masked
from hf_relpos.evaluation.permuted import evaluate_permuted
from hf_relpos.evaluation.tasks import ask
from hf_relpos.evaluation.windows import take_windows

TOKENIZER = build_byte_tokenizer()
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
COPY, ADJACENCY = PROBES["copy"], PROBES["adjacency_marked"]


class Answers(nn.Module):
    """A model that gives the answers it is told to."""

    device = torch.device("cpu")

    def __init__(self, config, answer):
        super().__init__()
        self.config, self.answer = config, answer

    def forward(self, input_ids, **others):
        return SimpleNamespace(logits=nn.functional.one_hot(self.answer(input_ids), self.config.vocab_size).float())


def rows_of(rows):
    return {(row["length"], row["metric"]): row["value"] for row in rows}


def test_a_decoder_answers_at_the_token_before():
    examples = COPY.examples(20, 10, 3)
    config = RelPosDecoderConfig(vocab_size=COPY.vocab_size, **SIZES)
    knowing = ask(Answers(config, lambda ids: ids.roll(-1, 1)), examples, 20, None, 4)
    assert rows_of(knowing) == {(20, "accuracy"): 1.0, (20, "exact_match"): 1.0}
    repeating = rows_of(ask(Answers(config, lambda ids: ids), examples, 20, None, 4))
    assert repeating[20, "accuracy"] < 0.2


def test_an_encoder_answers_where_it_is_asked():
    examples = ADJACENCY.examples(8, 50, 3)
    yes = max(max(labels) for labels in examples["labels"])
    share = sum(yes in labels for labels in examples["labels"]) / 50
    config = RelPosEncoderConfig(vocab_size=ADJACENCY.vocab_size, position_scheme="rope", **SIZES)
    found = rows_of(ask(Answers(config, lambda ids: torch.full_like(ids, yes)), examples, 8, None, 16))
    assert found == {(8, "accuracy"): pytest.approx(share), (8, "exact_match"): pytest.approx(share)}


def test_half_of_an_answer_is_no_exact_match():
    examples = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 3]], "labels": [[-100, 2, 3], [-100, 2, 9]]})
    config = RelPosDecoderConfig(vocab_size=10, **SIZES)
    found = rows_of(ask(Answers(config, lambda ids: ids.roll(-1, 1)), examples, 3, None, 2))
    assert found == {(3, "accuracy"): 0.75, (3, "exact_match"): 0.5}


def test_the_same_tokens_are_masked_at_every_length():
    windows = take_windows(Dataset.from_dict({"text": ["the quick brown fox " * 20]}), TOKENIZER, 32, 256)
    config = RelPosEncoderConfig(vocab_size=len(TOKENIZER), position_scheme="rope", **SIZES)
    model: Any = Answers(config, lambda ids: torch.full_like(ids, ord(" ")))
    found = rows_of(evaluate_masked(model, TOKENIZER, windows, [8, 32], 4))
    assert found[8, "accuracy"] == found[32, "accuracy"] > 0
    assert found[8, "loss"] == pytest.approx(found[32, "loss"])
    bounded = RelPosEncoderConfig(
        vocab_size=len(TOKENIZER), position_scheme="learned_absolute", max_position_embeddings=8, **SIZES
    )
    model.config = bounded
    last = evaluate_masked(model, TOKENIZER, windows, [8, 32], 4)[-1]
    assert last["value"] is None and "the model has learned 8" in last["reason"]


def test_the_same_targets_are_asked_in_every_length_of_a_permutation():
    windows = take_windows(Dataset.from_dict({"text": ["the quick brown fox " * 20]}), TOKENIZER, 32, 256)
    config = RelPosEncoderConfig(vocab_size=len(TOKENIZER), position_scheme="rope", **SIZES)
    model: Any = Answers(config, lambda ids: torch.full_like(ids, ord(" ")))
    found = rows_of(evaluate_permuted(model, TOKENIZER, windows, [8, 32], 4))
    assert 0 < found[8, "accuracy"] == found[32, "accuracy"] < 1
    assert found[8, "loss"] == pytest.approx(found[32, "loss"])


def test_orders_are_those_of_one_seed_and_are_not_kept(monkeypatch):
    """However many windows there are, few masks live at the same time."""
    living, drawn, most, read = WeakSet(), [], [], []

    class Counted(PermutationCollator):
        def torch_call(self, examples):
            batch = super().torch_call(examples)
            living.add(batch["perm_mask"])
            drawn.append(1)
            return batch

    class Read(Answers):
        def forward(self, input_ids, perm_mask, **others):
            most.append(len(living))
            read.append(perm_mask)
            return super().forward(input_ids)

    monkeypatch.setattr(permuted, "PermutationCollator", Counted)
    windows = take_windows(Dataset.from_dict({"text": ["the quick brown fox " * 20]}), TOKENIZER, 32, 320)
    config = RelPosEncoderConfig(vocab_size=len(TOKENIZER), position_scheme="rope", **SIZES)
    state = torch.get_rng_state()
    evaluate_permuted(Read(config, lambda ids: ids), TOKENIZER, windows, [8, 32], 4)  # pyright: ignore[reportArgumentType]
    assert len(windows.inputs) == 10 and len(drawn) == 20 and max(most) <= 2
    assert torch.equal(state, torch.get_rng_state())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wanted = [PermutationCollator(TOKENIZER)([{"input_ids": row}])["perm_mask"] for row in windows.inputs]
    assert torch.equal(torch.cat(read[-10:]), torch.cat(wanted))
    assert torch.equal(torch.cat(read[:-10])[1::4], torch.cat(wanted)[:, 8:16, 8:16])


def test_a_longer_length_shows_a_target_more_of_the_order():
    windows = take_windows(Dataset.from_dict({"text": ["the quick brown fox " * 20]}), TOKENIZER, 32, 32)
    config = RelPosEncoderConfig(vocab_size=len(TOKENIZER), position_scheme="rope", **SIZES)
    model = RelPosEncoderForPermutationLM(config)
    found = rows_of(evaluate_permuted(model, TOKENIZER, windows, [8, 32], 4))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        batch = PermutationCollator(TOKENIZER)([{"input_ids": windows.inputs[0]}])
        whole = model.eval()(**batch).loss
        block = torch.arange(32) // 8
        hidden = (block[:, None] != block).float()
        parts = model(**batch | {"perm_mask": torch.maximum(batch["perm_mask"], hidden)}).loss
    assert found[32, "loss"] == pytest.approx(float(whole), rel=1e-6)
    assert found[8, "loss"] == pytest.approx(float(parts), rel=1e-6) != found[32, "loss"]


def test_words_are_kept_apart_and_the_first_token_of_each_has_its_tag():
    row = {"text": ["The", "dog", "sat"], "label": ["DET", "NOUN", "VERB"]}
    found = encode_row(row, TOKENIZER, ["DET", "NOUN", "VERB"])
    assert bytes(found["input_ids"]) == b"The dog sat"
    assert found["labels"] == [0, -100, -100, 1, -100, -100, -100, 2, -100, -100, -100]
    assert encode_row({"text": "a dog", "label": "b"}, TOKENIZER, ["a", "b"])["labels"] == 1


def test_classes_are_scored_where_there_is_a_label():
    rows = [{"input_ids": [7, 8], "labels": [1, -100]}, {"input_ids": [9], "labels": [2]}, {"input_ids": [5], "labels": [1]}]
    model: Any = Answers(SimpleNamespace(vocab_size=3), lambda ids: (ids == 7) + 2 * (ids == 9))
    collator = DataCollatorForTokenClassification(TOKENIZER)
    found = score_classes(model, rows, collator, 2)
    assert found == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx((0 + 2 / 3 + 1) / 3)}
    most = majority({"train": [{"labels": [1, 1, -100, -100, -100]}, {"labels": [2]}], "validation": rows})
    assert most == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx((4 / 5 + 0) / 2)}


def source(path, validation=None, columns=("text", "label"), before=None):
    return LabelledSource(str(path), validation and str(validation), *columns, before)


def test_labelled_rows_come_from_tables_and_treebanks(tmp_path):
    table, plain, words = tmp_path / "rows.jsonl", tmp_path / "plain.tsv", tmp_path / "words.conllu"
    table.write_text("".join(json.dumps({"text": f"text {i}", "label": f"{i % 2}"}) + "\n" for i in range(40)))
    plain.write_text("noun.animal\tcat\ta small animal\n")
    words.write_text("".join(f"# newdoc id = {i}\n1\tDogs\tdog\tNOUN\t_\t_\t0\troot\t_\t_\n\n" for i in range(40)))
    found = read_labelled(source(table))
    assert len(found["train"]) + len(found["validation"]) == 40 and len(found["train"]) > len(found["validation"]) > 0
    assert not {row["text"] for row in found["train"]} & {row["text"] for row in found["validation"]}
    given = read_labelled(source(plain, plain, columns=(3, 1), before="."))
    assert given["train"] == given["validation"] == [{"text": "a small animal", "label": "noun"}]
    assert read_labelled(source(words, columns=("words", "tags")))["train"][0] == {"text": ["Dogs"], "label": ["NOUN"]}
    for wrong, message in [
        (source(tmp_path / "absent.tsv"), "there is no labelled file .*absent.tsv"),
        (source(plain, columns=(3, 4)), "line 1 has 3 columns with tabs between, but column 4 is asked for; .* may be 1 to 3"),
        (source(words, columns=("words", "tag")), "has no column 'tag'; one of words, lemmas, tags"),
        (source(plain, columns=(3, 1)), "no labelled row is for"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_labelled(wrong)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a", "tag": "b"}\n',
            r"a.jsonl has no column 'label'; label_column may be one of \['text', 'tag'\]",
        ),
        ("a.csv", b"body,label\nb,a\n", r"a.csv has no column 'text'; text_column may be one of \['body', 'label'\]"),
        ("a.jsonl", b'{"text": "a", "label": "b"}\n{"text": "c"}\n', "a.jsonl, row 2 has no value in the column 'label'"),
        ("a.csv", b"", "a.csv is empty"),
        ("a.csv", b"text,label\n", "a.csv holds no labelled row"),
        (
            "a.csv",
            b"text,label\na,same\nb,same\n",
            "a.csv: all 3 rows .* class 'same' in the column 'label'; .* two classes or more",
        ),
        ("a.conllu", b"1\tDogs\n", r"a.conllu, line 1 has 2 columns, not the 10 of CoNLL-U: '1\\tDogs'"),
        ("a.conllu", b"# one\n# caf\xe9\n", "a.conllu, line 2 is not in UTF-8 .byte 0xe9.: convert"),
    ],
)
def test_an_error_of_a_labelled_file_names_it(tmp_path, name, content, message):
    """It is the file to evaluate on here; the other one is in order."""
    path, columns = tmp_path / name, ("words", "tags") if name.endswith("conllu") else ("text", "label")
    path.write_bytes(content)
    right = tmp_path / ("right.conllu" if name.endswith("conllu") else "right.csv")
    right.write_text("1\tDogs\tdog\tNOUN\t_\t_\t0\troot\t_\t_\n" if right.suffix == ".conllu" else "text,label\nx,same\n")
    with pytest.raises(ValueError, match=message):
        describe_labelled(source(right, path, columns))


@pytest.mark.parametrize("name", ["numbers.jsonl", "numbers.json", "numbers.parquet"])
def test_whole_numbers_are_classes_by_their_text(tmp_path, name):
    path, columns = tmp_path / name, {"text": ["a", "b", "c"], "label": [7, -12, 7], "share": [0.5, 1.0, 1.5]}
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    assert [row["label"] for row in read_labelled(source(path, path))["train"]] == ["7", "-12", "7"]
    for wrong in [("text", "share"), ("label", "text")]:  # neither are other numbers classes, nor numbers texts
        with pytest.raises(ValueError, match=f"{name}: column '.*' holds .*, not text"):
            read_labelled(source(path, path, wrong))


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        (
            "a.csv",
            "text,label\na,b\nc,\n",
            ("text", "label"),
            "a.csv, row 2: the column 'label' holds '', which names no class;",
        ),
        ("a.jsonl", '{"text": "a", "label": " "}', ("text", "label"), "a.jsonl, row 1: the column 'label' holds ' '"),
        (
            "a.tsv",
            "noun.act\ta\n.act\tb\n",
            (2, 1),
            "a.tsv, line 2: the column 1 holds '.act', which names no class before '.'",
        ),
        (
            "a.conllu",
            "1\tDogs\t_\t\t_\t_\t0\troot\t_\t_\n",
            ("words", "tags"),
            "a.conllu, the sentence 'Dogs': .*'tags' holds ''",
        ),
    ],
)
def test_an_empty_label_is_no_class(tmp_path, name, content, columns, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_labelled(source(path, path, columns, "."))


def test_the_bias_of_a_trained_scheme_is_kept_by_distance():
    def biases(**fields):
        sizes: Any = {**SIZES, "num_hidden_layers": 2, "vocab_size": 20} | fields
        return bias_by_distance(RelPosDecoderForCausalLM(RelPosDecoderConfig(**sizes)), 12)

    found = biases(position_scheme="alibi")
    assert [row["distance"] for row in found] == [1, 2, 4, 8]
    assert found[3]["heads"] == pytest.approx([-8 * 2.0**-4, -8 * 2.0**-8]) and found[3]["bias"] == pytest.approx(-0.265625)
    model = RelPosDecoderForCausalLM(RelPosDecoderConfig(position_scheme="learned_bias", vocab_size=20, **SIZES))
    with torch.no_grad():
        table = model.model.position_schemes[0].bias.normal_()  # the entry of distance 0 is the last
        wanted = (table - table[:, -1:])[:, [-2, -3, -5, -9]].T
    torch.testing.assert_close(torch.tensor([row["heads"] for row in bias_by_distance(model, 12)]), wanted)
    assert biases(position_scheme="rope") == biases(position_scheme="transformer_xl") == biases(position_scheme="fox") == []
    assert biases(position_scheme="rope+alibi") == found and len(biases(position_scheme="fire")) == 4


def test_peak_memory_is_what_a_call_holds_at_once():
    def work():
        for _ in range(3):
            torch.ones(2**18)  # one MiB, given back each time
        kept = torch.ones(2**18), torch.ones(2**18)
        del kept

    assert 2 * 2**20 <= peak_memory(work, torch.device("cpu")) < 2.5 * 2**20


def test_the_cost_of_a_step_counts_memory_and_its_batch():
    def cost(rows, **fields):
        model = RelPosDecoderForCausalLM(RelPosDecoderConfig(vocab_size=20, position_scheme="nope", **SIZES, **fields))
        ids = torch.randint(20, (rows, 16))
        found = step_cost(model, None, {"input_ids": ids, "labels": ids})
        assert found["parameters"] == sum(weight.numel() for weight in model.parameters())
        assert model.config._attn_implementation != "eager" and "ratio_to_baseline" not in found
        return found

    one, two, memory = cost(1), cost(2), cost(1, mem_len=16)
    assert two["flops"] == 2 * one["flops"] and memory["flops"] > one["flops"]
    assert two["peak_memory"] > one["peak_memory"] > 0
