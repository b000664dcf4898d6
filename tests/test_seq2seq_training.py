"""Encoder-decoders in training: labels, losses, the stock collator and trainer, and a task that is learned."""

import pathlib
from typing import Any

import pytest
import torch
from matrix import SIZES
from matrix import ids_of
from pairs import EXACT
from pairs import TARGET
from pairs import Pair
from pairs import pairs
from tokenizers import Tokenizer
from tokenizers import models
from tokenizers import pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForSeq2Seq
from transformers import PreTrainedTokenizerFast
from transformers import Seq2SeqTrainer
from transformers import Seq2SeqTrainingArguments
from transformers import set_seed
from transformers.trainer_pt_utils import LabelSmoother

from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos import RelPosSeq2SeqForConditionalGeneration

ROPE = Pair("rope", "rope")
PAD, START, END = 0, 1, 2


def labels_of() -> torch.Tensor:
    labels = ids_of(length=TARGET, seed=3)
    labels[0, 4:] = -100
    return labels


@pytest.mark.parametrize("pair", pairs())
def test_labels(pair: Pair) -> None:
    """Labels are predicted where they stand, from those before them."""
    model, labels = pair.model(head=True), labels_of()
    shifted = torch.cat([torch.full((2, 1), model.config.decoder_start_token_id), labels[:, :-1]], 1)
    shifted = shifted.masked_fill(shifted == -100, model.config.pad_token_id)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), shifted)
    output, given = model(ids_of(), labels=labels), model(ids_of(), decoder_input_ids=shifted)
    torch.testing.assert_close(output.logits, given.logits, **EXACT)
    wanted = cross_entropy(output.logits.flatten(0, 1).float(), labels.flatten())
    torch.testing.assert_close(output.loss, wanted)


def test_start_in_the_place_of_missing_padding() -> None:
    model = ROPE.model(head=True, pad_token_id=None)
    shifted = model.prepare_decoder_input_ids_from_labels(labels_of())
    assert shifted[0].tolist() == [1, *labels_of()[0, :4].tolist(), 1] and model.config.decoder_start_token_id == 1


def test_losses() -> None:
    model, labels = ROPE.model(head=True), labels_of()
    plain = model(ids_of(), labels=labels)
    halved = model(ids_of(), labels=labels, num_items_in_batch=2 * (labels != -100).sum())
    torch.testing.assert_close(halved.loss, plain.loss / 2)
    assert model(ids_of(), labels=torch.full_like(labels, -100)).loss == 0
    own = ids_of(length=TARGET, seed=4)
    taught = model(ids_of(), labels=labels, decoder_input_ids=own)
    torch.testing.assert_close(taught.logits, model(ids_of(), decoder_input_ids=own).logits, **EXACT)
    with pytest.raises(ValueError, match="the decoder has no input: give decoder_input_ids, decoder_inputs_embeds or"):
        model(ids_of())


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    words = {letter: index for index, letter in enumerate(["<pad>", "<s>", "</s>", *"abcdefgh"])}
    fast = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_collator() -> None:
    """The stock collator makes the decoder's input by the model, and pads labels by -100."""
    model = ROPE.model(head=True)
    rows = [{"input_ids": [3, 4, 5], "labels": [6, 7]}, {"input_ids": [3, 4], "labels": [6, 7, 8, 9]}]
    batch = DataCollatorForSeq2Seq(tokenizer(), model)(rows)
    assert batch["labels"].tolist() == [[6, 7, -100, -100], [6, 7, 8, 9]]
    assert batch["decoder_input_ids"].tolist() == [[0, 6, 7, 0], [0, 6, 7, 8]]
    alone = [model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])) for row in rows]
    total = sum(output.loss * len(row["labels"]) for output, row in zip(alone, rows, strict=True))
    torch.testing.assert_close(model(**batch).loss, total / 6)


def reversals(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Words of letters, to be written backwards."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(2, 5, (), generator=generator))
        word = torch.randint(3, 11, (length,), generator=generator).tolist()
        rows.append({"input_ids": [*word, END], "labels": [*word[::-1], END]})
    return rows


def trainer_of(folder: pathlib.Path, model: Any, **arguments: Any) -> Seq2SeqTrainer:
    settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "seed": 0}
    given = Seq2SeqTrainingArguments(str(folder), **{**settings, **arguments})
    collator = DataCollatorForSeq2Seq(tokenizer(), model)
    return Seq2SeqTrainer(model, given, collator, reversals(2000, 1), reversals(40, 2), processing_class=tokenizer())


def small_model(**fields: Any) -> RelPosSeq2SeqForConditionalGeneration:
    set_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    tokens = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
    return RelPosSeq2SeqForConditionalGeneration(RelPosSeq2SeqConfig(**{**sizes, **tokens, **fields}))


@pytest.mark.parametrize("fields", [{"position_scheme": "t5"}, {"decoder_position_scheme": "nope"}], ids=str)
def test_a_task_is_learned(fields: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Words are reversed by the stock trainer, which generates to evaluate, and by the folder that it leaves."""
    trainer = trainer_of(
        tmp_path,
        small_model(**fields),
        max_steps=300,
        learning_rate=4e-3,
        per_device_train_batch_size=64,
        predict_with_generate=True,
        generation_max_length=8,
    )
    trainer.train()
    found = trainer.predict(trainer.eval_dataset)
    right = [
        [token for token in row if token > END] == [token for token in wanted if token > END]
        for row, wanted in zip(found.predictions.tolist(), found.label_ids.tolist(), strict=True)
    ]
    assert sum(right) >= 32, f"{sum(right)} of 40 words are reversed"
    assert found.metrics["test_loss"] < 0.3
    trainer.save_model(str(tmp_path / "model"))
    again = RelPosSeq2SeqForConditionalGeneration.from_pretrained(tmp_path / "model")
    source = torch.tensor([trainer.eval_dataset[0]["input_ids"]])
    assert torch.equal(again.generate(source, max_length=8), trainer.model.generate(source, max_length=8))


def test_predictions_are_logits(tmp_path: pathlib.Path) -> None:
    """Neither cache nor encoder states are gathered as predictions."""
    trainer = trainer_of(tmp_path, small_model(), per_device_eval_batch_size=16)
    found = trainer.predict(trainer.eval_dataset)
    assert found.predictions.shape == (40, 5, 11)


def test_accumulated_batches(tmp_path: pathlib.Path) -> None:
    """Four batches of two make the step of one batch of eight, though they hold different numbers of labels."""
    weights = []
    for batch, accumulation in ((8, 1), (2, 4)):
        settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        trainer = trainer_of(tmp_path, small_model(), max_steps=1, optim="sgd", learning_rate=1.0, **settings)
        trainer.train()
        weights.append(dict(trainer.model.named_parameters()))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_label_smoothing(tmp_path: pathlib.Path) -> None:
    """The labels leave the batch, so the loss is of the collator's decoder input, and nothing is shifted again."""
    model = small_model().eval()
    trainer = trainer_of(tmp_path, model, label_smoothing_factor=0.1)
    batch = dict(trainer.data_collator(reversals(4, 3)))
    labels = batch["labels"]
    found = trainer.compute_loss(model, dict(batch))
    chances = model(**batch).logits.log_softmax(-1)
    seen = labels != -100
    wanted = cross_entropy(chances[seen], labels[seen], label_smoothing=0.1)
    torch.testing.assert_close(found, wanted)
    assert isinstance(trainer.label_smoother, LabelSmoother)


def test_half_precision() -> None:
    model = ROPE.model(head=True, dtype=torch.bfloat16)
    output = model(ids_of(), labels=labels_of())
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16 and output.loss.isfinite()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    exact = ROPE.model(head=True)(ids_of(), labels=labels_of())
    assert abs(exact.loss.item() - output.loss.item()) < 0.1
    assert output.logits.shape[-1] == SIZES["vocab_size"]
