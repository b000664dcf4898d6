"""Heads: their losses in plain words, what padding must not change, and what they refuse."""

import inspect
import re
from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import SIZES
from matrix import Case
from matrix import ids_of
from matrix import sharpen
from torch.nn.functional import cross_entropy

import hf_relpos

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
LOSS = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}
"""transformers computes losses in float32."""
FAMILIES = ["encoder", "decoder"]
HEADS = [name for name in hf_relpos.__all__ if "For" in name]


def head(family: str, name: str, **fields: Any) -> Any:
    """A model of a family with the named head, in float64."""
    kind = getattr(hf_relpos, f"RelPos{family.capitalize()}For{name}")
    return sharpen(kind(Case(family, "t5", {}).config(**fields))).double().eval()


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch whose first row has four tokens of padding, its mask, and the first row without them."""
    ids, mask = ids_of(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    place = slice(0, 4) if side == "left" else slice(7, 11)
    ids[0, place], mask[0, place] = 0, 0
    return ids, mask, ids[:1, mask[0].bool()]


@pytest.mark.parametrize("name", HEADS)
def test_every_forward_names_what_its_model_names(name: str) -> None:
    """`Trainer` drops a column that a forward takes without naming it."""
    kind = getattr(hf_relpos, name)
    base = getattr(hf_relpos, name.split("For")[0] + "Model")
    missing = inspect.signature(base.forward).parameters.keys() - inspect.signature(kind.forward).parameters.keys()
    assert missing <= {"target_mapping", "cache", "use_cache"}, "a query stream or a cache, which the head has no use for"


@pytest.mark.parametrize("name", HEADS)
def test_the_configuration_stays_the_callers(name: str) -> None:
    """A head that needs other fields than the configuration has takes a copy."""
    kind = getattr(hf_relpos, name)
    for fields in ({}, {"query_stream": True}) if "Encoder" in name else ({},):
        config = kind.config_class(position_scheme="alibi", **{**SIZES, **fields})
        before = config.to_dict()
        model = kind(config)
        assert config.to_dict() == before
        assert getattr(model.config, "query_stream", False) == ("Permutation" in name)


@pytest.mark.parametrize(
    "family, name, kind",
    [("decoder", "CausalLM", "labels"), ("decoder", "CausalLM", "shift_labels"), ("encoder", "MaskedLM", "labels"),
     ("seq2seq", "ConditionalGeneration", "labels")],
)  # fmt: skip
def test_labels_may_be_a_slice_of_a_wider_table(family: str, name: str, kind: str) -> None:
    """A slice does not lie in one piece, which `view` in transformers' losses needs."""
    if family == "seq2seq":
        config = hf_relpos.RelPosSeq2SeqConfig(position_scheme="t5", **SIZES)
        model = hf_relpos.RelPosSeq2SeqForConditionalGeneration(config).double().eval()
    else:
        model = head(family, name)
    ids = ids_of()
    part = torch.cat([ids, ids], 1)[:, 3 : 3 + LENGTH]
    assert not part.is_contiguous()
    found = model(ids, **{kind: part}).loss
    torch.testing.assert_close(found, model(ids, **{kind: part.clone(memory_format=torch.contiguous_format)}).loss)


def test_causal_loss() -> None:
    """The mean over targets that are not -100, shifted by one; a given number of items divides the sum instead."""
    model, ids = head("decoder", "CausalLM"), ids_of()
    labels = ids.masked_fill(ids % 5 == 0, -100)
    output = model(ids, labels=labels)
    total = cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum()
    assert 0 < count < labels[:, 1:].numel()
    torch.testing.assert_close(output.loss, total / count, **LOSS)
    for items in (40, torch.tensor(40)):
        torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=items).loss, total / 40, **LOSS)
    shifted = torch.cat([labels[:, 1:], ids[:, :1]], 1)
    found = model(ids, labels=labels, shift_labels=shifted).loss
    torch.testing.assert_close(found, cross_entropy(output.logits.flatten(0, 1), shifted.flatten()), **LOSS)


NONE = torch.full((BATCH, LENGTH), -100)
NO_TARGETS = {
    "encoder-MaskedLM": {"labels": NONE},
    "decoder-CausalLM": {"labels": NONE},
    "decoder-TokenClassification": {"labels": NONE},
    "decoder-SequenceClassification": {"labels": NONE[:, 0]},
    "encoder-SequenceClassification": {"labels": NONE[:, :2].double()},
    "encoder-MultipleChoice": {"labels": NONE[:, 0]},
    "encoder-QuestionAnswering": {"start_positions": NONE[:, 0], "end_positions": torch.tensor([LENGTH, LENGTH + 5])},
}


@pytest.mark.parametrize("name, labels", NO_TARGETS.items(), ids=NO_TARGETS)
def test_no_target_gives_no_loss_and_no_nan(name: str, labels: dict[str, Any]) -> None:
    model, ids = head(*name.split("-")), ids_of()
    loss = model(torch.stack([ids, ids], 1) if "Choice" in name else ids, **labels).loss
    loss.backward()
    assert loss == 0 and all(weight.grad.isfinite().all() for weight in model.parameters())


def test_labels_that_are_missing_among_several() -> None:
    """-100 marks them, and `Trainer` counts the others alone."""
    model, ids = head("encoder", "SequenceClassification", num_labels=3), ids_of()
    labels = torch.tensor([[1.0, -100.0, 1.0], [0.0, 0.0, -100.0]], dtype=torch.float64)
    output, known = model(ids, labels=labels), labels != -100
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(output.logits[known], labels[known])
    torch.testing.assert_close(output.loss, wanted, **LOSS)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=8).loss, wanted / 2, **LOSS)


BEYOND = {
    "decoder-CausalLM": {"labels": torch.full((BATCH, LENGTH), 37)},
    "encoder-MaskedLM": {"labels": torch.full((BATCH, LENGTH), -1)},
    "encoder-TokenClassification": {"labels": torch.full((BATCH, LENGTH), 2)},
    "decoder-SequenceClassification": {"labels": torch.tensor([0, 5])},
    "encoder-SequenceClassification": {"labels": torch.tensor([[0.0, 1.0], [3.0, 1.0]])},
    "encoder-MultipleChoice": {"labels": torch.tensor([0, 2])},
    "decoder-QuestionAnswering": {"start_positions": torch.tensor([0, -1]), "end_positions": torch.tensor([1, 1])},
}


@pytest.mark.parametrize("name, labels", BEYOND.items(), ids=BEYOND)
def test_labels_out_of_range_are_refused(name: str, labels: dict[str, Any]) -> None:
    model, ids = head(*name.split("-")), ids_of()
    with pytest.raises(ValueError, match=r"^label (37|-1|2|5|3) is refused"):
        model(torch.stack([ids, ids], 1) if "Choice" in name else ids, **labels)


def test_labels_of_a_sequence_have_its_shape() -> None:
    """A number a row for several numbers a row would be spread over them without a word."""
    model, ids = head("decoder", "SequenceClassification", num_labels=3, problem_type="regression"), ids_of()
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) are refused for regression: expected \(2, 3\)"):
        model(ids, labels=torch.zeros(BATCH))


@pytest.mark.parametrize(
    "family, name", [("decoder", "CausalLM"), ("encoder", "MaskedLM"), ("encoder", "TokenClassification")]
)
def test_labels_that_do_not_fit_are_refused(family: str, name: str) -> None:
    model, ids = head(family, name), ids_of()
    for labels in (ids[:, 1:], ids[0], ids[:1], ids.double()):
        with pytest.raises(ValueError, match=r"labels of shape .* are refused: expected whole numbers of shape \(2, 11\)"):
            model(ids, labels=labels)


@pytest.mark.parametrize("name", [name for name in hf_relpos.__all__ if re.fullmatch(r"RelPos\w+(Model|For\w+)", name)])
def test_configuration_of_another_family_is_refused(name: str) -> None:
    """Also where its fields would do, and left as it was."""
    kind = getattr(hf_relpos, name)
    for given in (hf_relpos.RelPosDecoderConfig(), hf_relpos.RelPosEncoderConfig(), hf_relpos.RelPosSeq2SeqConfig.t5()):
        if type(given) is not kind.config_class:
            before = given.to_dict()
            with pytest.raises(
                ValueError, match=f"^{name} takes a {kind.config_class.__name__} .*, got {type(given).__name__}"
            ):
                kind(given)
            assert given.to_dict() == before


def test_masked_loss() -> None:
    """Not shifted: each label belongs to the token of its own place."""
    model, ids = head("encoder", "MaskedLM"), ids_of()
    labels = torch.full_like(ids, -100)
    labels[:, [2, 7]] = ids[:, [2, 7]]
    output = model(ids, labels=labels)
    wanted = cross_entropy(output.logits[:, [2, 7]].flatten(0, 1), ids[:, [2, 7]].flatten())
    torch.testing.assert_close(output.loss, wanted, **LOSS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family, name", [("encoder", "MaskedLM"), ("decoder", "CausalLM")])
def test_tied_embeddings(family: str, name: str, tied: bool) -> None:
    """One tensor or two; resizing the vocabulary keeps the tie, and the new tokens work."""
    model = head(family, name, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.resize_token_embeddings(50, mean_resizing=False)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert model(torch.full((1, 3), 49)).logits.shape == (1, 3, 50)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_sequence_classification(pooling: str, side: str) -> None:
    """The first token or the mean of an encoder, the last of a decoder: never padding, masked or found by its id."""
    fields = {} if pooling == "last" else {"classifier_pooling": pooling}
    model = head("decoder" if pooling == "last" else "encoder", "SequenceClassification", num_labels=3, **fields)
    ids, mask, alone = padded(side)
    labels = torch.tensor([2, 0])
    output = model(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.logits[:1], model(alone).logits, **CLOSE)
    torch.testing.assert_close(model(ids).logits, output.logits, **CLOSE)
    torch.testing.assert_close(output.loss, cross_entropy(output.logits, labels), **LOSS)


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_of_sequence_labels(family: str) -> None:
    """One number is regression; rows of zeros and ones are several labels at once."""
    ids = ids_of()
    numbers = torch.tensor([0.5, -1.0], dtype=torch.float64)
    output = head(family, "SequenceClassification", num_labels=1)(ids, labels=numbers)
    torch.testing.assert_close(output.loss, (output.logits[:, 0] - numbers).square().mean(), **LOSS)
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    output = head(family, "SequenceClassification", num_labels=3)(ids, labels=several)
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, several)
    torch.testing.assert_close(output.loss, wanted, **LOSS)


@pytest.mark.parametrize("family", FAMILIES)
def test_token_classification(family: str) -> None:
    model, ids = head(family, "TokenClassification", num_labels=5), ids_of()
    labels = (ids % 5).masked_fill(ids % 3 == 0, -100)
    output = model(ids, labels=labels)
    assert output.logits.shape == (BATCH, LENGTH, 5)
    torch.testing.assert_close(output.loss, cross_entropy(output.logits.flatten(0, 1), labels.flatten()), **LOSS)


@pytest.mark.parametrize("family", FAMILIES)
def test_question_answering(family: str) -> None:
    """The mean of two losses, over the first and the last token of the answer."""
    model, ids = head(family, "QuestionAnswering"), ids_of()
    start, end = torch.tensor([1, 4]), torch.tensor([3, 9])
    output = model(ids, start_positions=start, end_positions=end)
    assert output.start_logits.shape == output.end_logits.shape == (BATCH, LENGTH)
    wanted = (cross_entropy(output.start_logits, start) + cross_entropy(output.end_logits, end)) / 2
    torch.testing.assert_close(output.loss, wanted, **LOSS)


def test_multiple_choice() -> None:
    """Each choice is scored as it would be alone, its own padding left out."""
    model = head("encoder", "MultipleChoice")
    ids = torch.stack([ids_of(3, seed=row) for row in range(BATCH)])
    mask = torch.ones_like(ids)
    mask[0, 1, 6:] = 0
    output = model(ids, attention_mask=mask, labels=torch.tensor([2, 1]))
    assert output.logits.shape == (BATCH, 3)
    alone = model(ids[:1, 1:2, :6]).logits[0, 0]
    torch.testing.assert_close(output.logits[0, 1], alone, **CLOSE)
    torch.testing.assert_close(output.loss, cross_entropy(output.logits, torch.tensor([2, 1])), **LOSS)


def test_choices_have_a_dimension_of_their_own() -> None:
    model, ids = head("encoder", "MultipleChoice"), ids_of()
    with pytest.raises(
        ValueError, match=r"input_ids of shape \(2, 11\) are refused by .*: expected .* \(batch, choices, sequence\)"
    ):
        model(ids)
    embeds = model.get_input_embeddings()(torch.stack([ids, ids], 1))
    assert model(inputs_embeds=embeds).logits.shape == (BATCH, 2)
    with pytest.raises(ValueError, match=r"inputs_embeds of shape \(2, 11, 24\) are refused"):
        model(inputs_embeds=embeds[:, 0])


def test_encoder_decoder_classifies_what_both_stacks_read() -> None:
    """From the decoder's last token; the decoder begins where the row does, on whichever side the padding is."""
    config = hf_relpos.RelPosSeq2SeqConfig(position_scheme="alibi", num_labels=3, **SIZES)
    model = sharpen(hf_relpos.RelPosSeq2SeqForSequenceClassification(config)).double().eval()
    for side in ("left", "right"):
        ids, mask, alone = padded(side)
        output = model(ids, attention_mask=mask, labels=torch.tensor([2, 0]))
        torch.testing.assert_close(output.logits[:1], model(alone).logits, **CLOSE)
        torch.testing.assert_close(model(ids).logits, output.logits, **CLOSE)
        read = torch.cat([torch.zeros_like(alone[:, :1]), alone[:, :-1]], 1)
        states = model.model(alone, decoder_input_ids=read).last_hidden_state[:, -1]
        torch.testing.assert_close(output.logits[:1], model.classifier(states), **CLOSE)
    with pytest.raises(ValueError, match="the decoder has no input"):
        model(inputs_embeds=model.get_input_embeddings()(ids))


@pytest.mark.parametrize("family, name", [("encoder", "MaskedLM"), ("decoder", "CausalLM")])
def test_embeddings_of_another_width(family: str, name: str) -> None:
    """Narrow embeddings are widened on entry and narrowed before the tied head."""
    model, ids = head(family, name, embedding_size=10), ids_of()
    assert model.get_input_embeddings().weight.shape == (SIZES["vocab_size"], 10)
    output = model(ids, labels=ids)
    assert output.logits.shape[-1] == SIZES["vocab_size"]
    found = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(found, output.logits, **CLOSE)
    output.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("family, name", [("encoder", "MaskedLM"), ("decoder", "CausalLM")])
def test_tuples_are_the_outputs_in_order(family: str, name: str) -> None:
    model, ids = head(family, name), ids_of()
    named, plain = (model(ids, labels=ids, return_dict=choice) for choice in (True, False))
    assert torch.equal(plain[0], named.loss) and torch.equal(plain[1], named.logits)


@pytest.mark.parametrize("family, name", [("encoder", "MaskedLM"), ("decoder", "CausalLM")])
def test_dropout_only_in_training(family: str, name: str) -> None:
    model, ids = head(family, name, hidden_dropout=0.3, attention_dropout=0.3), ids_of()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
