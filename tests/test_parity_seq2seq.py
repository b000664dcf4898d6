"""T5 as a whole, gated and not: the same logits, loss, gradients and generated text, weight by weight."""

from typing import Any

import pytest
import torch
import transformers
from matrix import ids_of
from parity import FLOAT32
from parity import Weights
from parity import left_padding
from parity import randomised
from parity import renamed

from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos import RelPosSeq2SeqForConditionalGeneration

SIZES = {
    "vocab_size": 37,
    "num_attention_heads": 6,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_decoder_layers": 2,
}
STACK = r"(encoder|decoder)\."
BLOCK = STACK + r"block\.(\d+)\.layer\."
LAYER = r"model.\1.layers.\2."
T5_NAMES = (
    (r"shared\.weight", ""),  # the embeddings of each stack follow under their own names
    (STACK + r"embed_tokens\.weight", r"model.\1.embed_tokens.weight"),
    (STACK + r"final_layer_norm\.weight", r"model.\1.norm.weight"),
    (BLOCK + r"0\.SelfAttention\.(\w)\.weight", LAYER + r"attention.\3_proj.weight"),
    (BLOCK + r"0\.layer_norm\.weight", LAYER + "attention_norm.weight"),
    (BLOCK + r"1\.EncDecAttention\.(\w)\.weight", LAYER + r"cross_attention.\3_proj.weight"),
    (r"(decoder)\.block\.(\d+)\.layer\.1\.layer_norm\.weight", LAYER + "cross_norm.weight"),
    (BLOCK + r"\d\.layer_norm\.weight", LAYER + "mlp_norm.weight"),
    (BLOCK + r"\d\.DenseReluDense\.wi(_1)?\.weight", LAYER + "mlp.up_proj.weight"),
    (BLOCK + r"\d\.DenseReluDense\.wi_0\.weight", LAYER + "mlp.gate_proj.weight"),
    (BLOCK + r"\d\.DenseReluDense\.wo\.weight", LAYER + "mlp.down_proj.weight"),
    (r"lm_head\.weight", "lm_head.weight"),
)


def both(version: str) -> tuple[Any, Any]:
    """T5 with random weights, and the same weights in a model of this package."""
    gated = version == "1.1"
    config = transformers.T5Config(
        vocab_size=37, d_model=48, d_kv=10, d_ff=60, num_layers=3, num_decoder_layers=2, num_heads=6, dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=not gated, decoder_start_token_id=0,
        relative_attention_num_buckets=8, relative_attention_max_distance=20,
    )  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(config)
    if gated:  # what the released models have, though the configuration ties the head
        theirs.lm_head.weight = torch.nn.Parameter(torch.empty_like(theirs.lm_head.weight))
    theirs = randomised(theirs)
    with torch.no_grad():
        theirs.lm_head.weight.mul_(0.5 if gated else 1.0)
    weights = t5_weights(theirs.state_dict())
    scheme = {"position_parameters": {"num_buckets": 8, "max_distance": 20}, "head_dim": 10, "intermediate_size": 60}
    ours = RelPosSeq2SeqForConditionalGeneration(RelPosSeq2SeqConfig.t5(version, **SIZES, **scheme)).double().eval()
    ours.load_state_dict(weights)
    return ours, theirs


def t5_weights(given: Weights) -> Weights:
    """T5's weights under this package's names; the bias of the first layer serves the whole stack."""
    biases = {}
    for side in ("encoder", "decoder"):
        bias = given.pop(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
        biases[f"model.{side}.position_schemes.shared.t5.bias"] = bias.T
    return renamed(given, *T5_NAMES) | biases


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_t5(version: str, implementation: str) -> None:
    ours, theirs = both(version)
    ours.set_attn_implementation(implementation)
    labels = ids_of(length=7, seed=1)
    labels[1, 5:] = -100
    target_mask = torch.ones(2, 7, dtype=torch.long)
    target_mask[1, 6:] = 0
    for given in (
        {"labels": labels},
        {"labels": labels, "attention_mask": left_padding()},
        {"labels": labels, "attention_mask": left_padding().flip(1), "decoder_attention_mask": target_mask},
    ):
        found, wanted = (model(ids_of(), **given) for model in (ours, theirs))
        predicted = given.get("decoder_attention_mask", torch.ones(2, 7)).bool()
        torch.testing.assert_close(found.logits[predicted], wanted.logits[predicted], **FLOAT32)
        torch.testing.assert_close(found.loss.double(), wanted.loss.double(), **FLOAT32)
        real = given.get("attention_mask", torch.ones(2, 11)).bool()
        encoded = [output.encoder_last_hidden_state[real] for output in (found, wanted)]
        torch.testing.assert_close(*encoded, **FLOAT32)
        gradients = [
            torch.autograd.grad(output.loss, [model.get_input_embeddings().weight, model.get_output_embeddings().weight])
            for output, model in ((found, ours), (wanted, theirs))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_t5_generates(version: str, search: dict[str, int]) -> None:
    found, wanted = (
        model.generate(ids_of(), attention_mask=left_padding(), max_new_tokens=9, do_sample=False, **search)
        for model in both(version)
    )
    assert torch.equal(found, wanted)


def test_other_geometries_are_refused() -> None:
    with pytest.raises(ValueError, match="version='2' is not one of the released geometries: '1.0', '1.1'"):
        RelPosSeq2SeqConfig.t5("2")
