"""Heads: their losses in plain words, what padding must not change, and what they refuse."""

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


@pytest.mark.parametrize("family, name", [("encoder", "MaskedLM"), ("decoder", "CausalLM")])
def test_no_target_gives_no_loss_and_no_nan(family: str, name: str) -> None:
    model, ids = head(family, name), ids_of()
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0 and all(weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize(
    "family, name", [("decoder", "CausalLM"), ("encoder", "MaskedLM"), ("encoder", "TokenClassification")]
)
def test_labels_that_do_not_fit_are_refused(family: str, name: str) -> None:
    model, ids = head(family, name), ids_of()
    for labels in (ids[:, 1:], ids[0], ids[:1], ids.double()):
        with pytest.raises(ValueError, match=r"labels of shape .* are refused: expected whole numbers of shape \(2, 11\)"):
            model(ids, labels=labels)


@pytest.mark.parametrize("name", [name for name in dir(hf_relpos) if name.startswith("RelPos") and "Config" not in name])
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


def test_question_answering() -> None:
    """The mean of two losses, over the first and the last token of the answer."""
    model, ids = head("encoder", "QuestionAnswering"), ids_of()
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
