"""Adaptive embeddings and softmax, and other options that converted checkpoints need, as fields of a configuration."""

import pathlib
from typing import Any

import pytest
import torch
from matrix import ids_of

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosDecoderForSequenceClassification
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderModel

SIZES = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CUTOFFS = {"cutoffs": [10, 25], "div_val": 2}


@pytest.mark.parametrize(
    "fields",
    [
        CUTOFFS,
        {"cutoffs": [10, 25]},
        {**CUTOFFS, "embedding_size": 12, "lm_head_bias": True},
        {**CUTOFFS, "tie_word_embeddings": False, "lm_head_dense": True},
    ],
)
def test_probabilities_and_losses(fields: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Probabilities sum to one; training scores the targets alone and has the same loss and gradients."""
    model = RelPosDecoderForCausalLM(RelPosDecoderConfig(**SIZES, **fields, mem_len=4)).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    labels = ids_of().masked_fill(ids_of() % 4 == 0, -100)
    kept = labels[:, 1:] >= 0
    logits = model.eval()(ids_of()).logits
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones_like(logits[..., 0]), rtol=0, atol=1e-12)
    wanted = torch.nn.functional.nll_loss(logits[:, :-1][kept], labels[:, 1:][kept])
    output = model.train()(ids_of(), labels=labels)
    assert output.logits is None and output.memory is not None
    torch.testing.assert_close(output.loss, wanted, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in (output.loss, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    counted = model(ids_of(), labels=labels, shift_labels=shifted, num_items_in_batch=50).loss
    torch.testing.assert_close(counted, wanted * kept.sum() / 50, rtol=1e-12, atol=0)
    assert float(model(ids_of(), labels=torch.full_like(labels, -100)).loss) == 0.0
    tied = model.lm_head.tables[1].weight is model.model.embed_tokens.tables[1].weight
    assert tied == model.config.tie_word_embeddings
    model.float().save_pretrained(tmp_path)
    again = RelPosDecoderForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (again.lm_head.tables[1].weight is again.model.embed_tokens.tables[1].weight) == tied


def test_other_heads_and_inputs() -> None:
    """A classifier reads the same embeddings, and `inputs_embeds` are what they give."""
    model = RelPosDecoderForSequenceClassification(RelPosDecoderConfig(**SIZES, **CUTOFFS)).eval()
    embeds = model.get_input_embeddings()(ids_of())
    assert embeds.shape == (*ids_of().shape, SIZES["hidden_size"])
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(ids_of()).logits, rtol=0, atol=0)


def test_beams_and_compilation() -> None:
    model = RelPosDecoderForCausalLM(RelPosDecoderConfig(**SIZES, **CUTOFFS)).eval()
    assert model.generate(ids_of(), max_new_tokens=3, num_beams=2, do_sample=False, pad_token_id=0).shape[1] > 11
    whole = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(ids_of()).logits, model(ids_of()).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"cutoffs": []}, r"cutoffs=\[\] must rise, from above 0 to below vocab_size=37"),
        ({"cutoffs": [5, 5]}, r"cutoffs=\[5, 5\] must rise"),
        ({"cutoffs": [0, 5]}, r"cutoffs=\[0, 5\] must rise"),
        ({"cutoffs": [37]}, r"cutoffs=\[37\] must rise"),
        ({"div_val": 2}, "div_val=2 must be at least 1, and 1 without cutoffs"),
        ({"cutoffs": [5], "div_val": 0}, "div_val=0 must be at least 1"),
        ({"cutoffs": [5], "div_val": 32}, r"div_val=32 leaves tables of the widths \[24, 0\]"),
    ],
)
def test_refused_clusters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelPosDecoderConfig(**SIZES, **fields)


def test_adaptive_embeddings_are_not_resized() -> None:
    model = RelPosDecoderForCausalLM(RelPosDecoderConfig(**SIZES, **CUTOFFS))
    with pytest.raises(ValueError, match=r"embeddings with cutoffs=\[10, 25\] cannot be resized"):
        model.resize_token_embeddings(40)
    plain = RelPosDecoderForCausalLM(RelPosDecoderConfig(**SIZES, lm_head_bias=True))
    plain.resize_token_embeddings(40)
    assert plain.lm_head.bias.shape == (40,) and plain(ids_of()).logits.shape[-1] == 40


@pytest.mark.parametrize("size", [None, 12])
def test_norm_before_the_projection(size: int | None) -> None:
    """It has the width of the embeddings, and the projection, where there is one, a bias."""
    config = RelPosEncoderConfig(**SIZES, embedding_size=size, embedding_norm="before_projection")
    model = RelPosEncoderModel(config).eval()
    assert model.embed_norm.normalized_shape == (size or 24,)
    hidden = model.embed_norm(model.embed_tokens(ids_of()))
    hidden = hidden if size is None else model.embed_projection(hidden)
    assert size is None or model.embed_projection.bias is not None
    found = model(ids_of(), output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(found, hidden, rtol=0, atol=1e-6)
