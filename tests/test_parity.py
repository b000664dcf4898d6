"""Decoders of the installed transformers, and T5's stacks, loaded weight by weight: same logits, same gradients."""

import re

import pytest
import torch
import transformers
from matrix import ids_of
from parity import CLOSE
from parity import FLOAT32
from parity import SIZES
from parity import assert_same
from parity import left_padding
from parity import randomised
from parity import renamed
from parity import split_fused
from transformers.models.t5.modeling_t5 import T5Stack

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderModel

LLAMA_RULES = [
    (r"model\.embed_tokens\.weight", "model.embed_tokens.weight"),
    (r"model\.layers\.(\d+)\.self_attn\.(\w)_proj\.weight", r"model.layers.\1.attention.\2_proj.weight"),
    (r"model\.layers\.(\d+)\.mlp\.(\w+)_proj\.weight", r"model.layers.\1.mlp.\2_proj.weight"),
    (r"model\.layers\.(\d+)\.input_layernorm\.weight", r"model.layers.\1.attention_norm.weight"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.weight", r"model.layers.\1.mlp_norm.weight"),
    (r"model\.norm\.weight", "model.norm.weight"),
    (r"lm_head\.weight", "lm_head.weight"),
]
LLAMA_FIELDS = {"num_key_value_heads": 2, "intermediate_size": 60, "hidden_act": "silu", "tie_word_embeddings": False}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_llama_and_mistral(window: int | None, padded: bool) -> None:
    """RoPE in halves, grouped heads, gated feed-forward, RMS norms; Mistral adds the sliding window."""
    if window is None:
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA_FIELDS))
    else:
        config = transformers.MistralConfig(**SIZES, **LLAMA_FIELDS, sliding_window=window, head_dim=8)
        theirs = transformers.MistralForCausalLM(config)
    theirs = randomised(theirs)
    fields = {**SIZES, **LLAMA_FIELDS, "gated_mlp": True, "norm_type": "rms_norm", "layer_norm_eps": 1e-6}
    ours = RelPosDecoderForCausalLM(RelPosDecoderConfig(**fields, position_scheme="rope", sliding_window=window))
    inputs = {"attention_mask": left_padding()} if padded else {}
    assert_same(ours, theirs, renamed(theirs.state_dict(), *LLAMA_RULES), FLOAT32, **inputs)
    tokens = [model.float().generate(ids_of(), max_new_tokens=8, do_sample=False, pad_token_id=0) for model in (ours, theirs)]
    assert torch.equal(*tokens)


def test_gpt_neox() -> None:
    """Partial RoPE in halves, parallel residuals, biases, a fused projection head by head."""
    config = transformers.GPTNeoXConfig(
        **SIZES,
        intermediate_size=60,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    )
    theirs = randomised(transformers.GPTNeoXForCausalLM(config))
    weights = renamed(
        split_fused(theirs.state_dict(), "query_key_value", 6, by_head=True),
        (r"gpt_neox\.embed_in\.weight", "model.embed_tokens.weight"),
        (r"gpt_neox\.layers\.(\d+)\.attention\.dense\.(\w+)", r"model.layers.\1.attention.o_proj.\2"),
        (r"gpt_neox\.layers\.(\d+)\.attention\.(\w_proj\.\w+)", r"model.layers.\1.attention.\2"),
        (r"gpt_neox\.layers\.(\d+)\.input_layernorm\.(\w+)", r"model.layers.\1.attention_norm.\2"),
        (r"gpt_neox\.layers\.(\d+)\.post_attention_layernorm\.(\w+)", r"model.layers.\1.mlp_norm.\2"),
        (r"gpt_neox\.layers\.(\d+)\.mlp\.dense_h_to_4h\.(\w+)", r"model.layers.\1.mlp.up_proj.\2"),
        (r"gpt_neox\.layers\.(\d+)\.mlp\.dense_4h_to_h\.(\w+)", r"model.layers.\1.mlp.down_proj.\2"),
        (r"gpt_neox\.final_layer_norm\.(\w+)", r"model.norm.\1"),
        (r"(embed_out|lm_head)\.weight", "lm_head.weight"),
    )
    parameters = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    fields = {"parallel_residual": True, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    config = RelPosDecoderConfig(
        **SIZES, **fields, intermediate_size=60, position_scheme="rope", position_parameters=parameters
    )
    assert_same(RelPosDecoderForCausalLM(config), theirs, weights, FLOAT32)


def test_gptj() -> None:
    """RoPE of neighbouring channels; one norm serves both parallel sub-layers."""
    config = transformers.GPTJConfig(vocab_size=37, n_embd=48, n_layer=2, n_head=6, n_inner=60, rotary_dim=4)
    theirs = randomised(transformers.GPTJModel(config))
    given = {name: weight for name, weight in theirs.state_dict().items() if "embed_positions" not in name}
    given |= {name.replace("ln_1", "ln_2"): weight for name, weight in given.items() if ".ln_1." in name}
    weights = renamed(
        given,
        (r"wte\.weight", "embed_tokens.weight"),
        (r"h\.(\d+)\.attn\.out_proj\.weight", r"layers.\1.attention.o_proj.weight"),
        (r"h\.(\d+)\.attn\.(\w_proj)\.weight", r"layers.\1.attention.\2.weight"),
        (r"h\.(\d+)\.ln_1\.(\w+)", r"layers.\1.attention_norm.\2"),
        (r"h\.(\d+)\.ln_2\.(\w+)", r"layers.\1.mlp_norm.\2"),
        (r"h\.(\d+)\.mlp\.fc_in\.(\w+)", r"layers.\1.mlp.up_proj.\2"),
        (r"h\.(\d+)\.mlp\.fc_out\.(\w+)", r"layers.\1.mlp.down_proj.\2"),
        (r"ln_f\.(\w+)", r"norm.\1"),
    )
    parameters = {"partial_rotary_factor": 0.5, "interleaved": True}
    fields = {"parallel_residual": True, "mlp_bias": True, "intermediate_size": 60, "hidden_act": "gelu_new"}
    config = RelPosDecoderConfig(**SIZES, **fields, position_scheme="rope", position_parameters=parameters)
    assert_same(RelPosDecoderModel(config), theirs, weights, FLOAT32, output="last_hidden_state")


@pytest.mark.parametrize("heads", [1, 3, 4, 6, 12])
def test_bloom(heads: int) -> None:
    """ALiBi with the slopes of the released code, normed embeddings, biases everywhere."""
    config = transformers.BloomConfig(vocab_size=37, hidden_size=48, n_layer=2, n_head=heads)
    theirs = randomised(transformers.BloomForCausalLM(config))
    weights = renamed(
        split_fused(theirs.state_dict(), "query_key_value", heads, by_head=True),
        (r"transformer\.word_embeddings\.weight", "model.embed_tokens.weight"),
        (r"transformer\.word_embeddings_layernorm\.(\w+)", r"model.embed_norm.\1"),
        (r"transformer\.h\.(\d+)\.self_attention\.dense\.(\w+)", r"model.layers.\1.attention.o_proj.\2"),
        (r"transformer\.h\.(\d+)\.self_attention\.(\w_proj\.\w+)", r"model.layers.\1.attention.\2"),
        (r"transformer\.h\.(\d+)\.input_layernorm\.(\w+)", r"model.layers.\1.attention_norm.\2"),
        (r"transformer\.h\.(\d+)\.post_attention_layernorm\.(\w+)", r"model.layers.\1.mlp_norm.\2"),
        (r"transformer\.h\.(\d+)\.mlp\.dense_h_to_4h\.(\w+)", r"model.layers.\1.mlp.up_proj.\2"),
        (r"transformer\.h\.(\d+)\.mlp\.dense_4h_to_h\.(\w+)", r"model.layers.\1.mlp.down_proj.\2"),
        (r"transformer\.ln_f\.(\w+)", r"model.norm.\1"),
        (r"lm_head\.weight", "lm_head.weight"),
    )
    fields = {"embedding_norm": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}
    config = RelPosDecoderConfig(**{**SIZES, "num_attention_heads": heads}, **fields, position_scheme="alibi")
    for inputs in ({}, {"attention_mask": left_padding().flip(1)}):
        assert_same(RelPosDecoderForCausalLM(config), theirs, weights, FLOAT32, **inputs)


@pytest.mark.parametrize("heads", [1, 3, 6, 8])
def test_mpt(heads: int) -> None:
    """ALiBi again, built by other code, without any bias."""
    config = transformers.MptConfig(vocab_size=37, d_model=48, n_layers=2, n_heads=heads, max_seq_len=16)
    theirs = randomised(transformers.MptForCausalLM(config))
    weights = renamed(
        split_fused(theirs.state_dict(), "Wqkv", heads, by_head=False),
        (r"transformer\.wte\.weight", "model.embed_tokens.weight"),
        (r"transformer\.blocks\.(\d+)\.attn\.out_proj\.weight", r"model.layers.\1.attention.o_proj.weight"),
        (r"transformer\.blocks\.(\d+)\.attn\.(\w_proj)\.weight", r"model.layers.\1.attention.\2.weight"),
        (r"transformer\.blocks\.(\d+)\.norm_1\.weight", r"model.layers.\1.attention_norm.weight"),
        (r"transformer\.blocks\.(\d+)\.norm_2\.weight", r"model.layers.\1.mlp_norm.weight"),
        (r"transformer\.blocks\.(\d+)\.ffn\.(\w+)_proj\.weight", r"model.layers.\1.mlp.\2_proj.weight"),
        (r"transformer\.norm_f\.weight", "model.norm.weight"),
        (r"lm_head\.weight", "lm_head.weight"),
    )
    config = RelPosDecoderConfig(**{**SIZES, "num_attention_heads": heads}, norm_bias=False, position_scheme="alibi")
    assert_same(RelPosDecoderForCausalLM(config), theirs, weights, FLOAT32)


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("buckets, furthest", [(32, 128), (8, 10)])
def test_t5(causal: bool, buckets: int, furthest: int) -> None:
    """Buckets of both directions; the bias of the first block serves all; scores are not scaled."""
    config = transformers.T5Config(
        vocab_size=37, d_model=48, d_kv=8, d_ff=60, num_layers=2, num_heads=6, is_decoder=causal, dropout_rate=0.0,
        relative_attention_num_buckets=buckets, relative_attention_max_distance=furthest, use_cache=False,
    )  # fmt: skip
    theirs = randomised(T5Stack(config))
    given = theirs.state_dict()
    bias = given.pop("block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    feed_forward = rf"block\.(\d+)\.layer\.{1 + causal}\."
    weights = renamed(
        given,
        (r"embed_tokens\.weight", "embed_tokens.weight"),
        (r"block\.(\d+)\.layer\.0\.SelfAttention\.(\w)\.weight", r"layers.\1.attention.\2_proj.weight"),
        (r"block\.(\d+)\.layer\.0\.layer_norm\.weight", r"layers.\1.attention_norm.weight"),
        (feed_forward + r"layer_norm\.weight", r"layers.\1.mlp_norm.weight"),
        (feed_forward + r"DenseReluDense\.wi\.weight", r"layers.\1.mlp.up_proj.weight"),
        (feed_forward + r"DenseReluDense\.wo\.weight", r"layers.\1.mlp.down_proj.weight"),
        (r"block\.\d+\.layer\.1\..*", ""),  # attention to an encoder
        (r"final_layer_norm\.weight", "norm.weight"),
    )
    weights["position_schemes.shared.t5.bias"] = bias.T
    kind, model = (RelPosDecoderConfig, RelPosDecoderModel) if causal else (RelPosEncoderConfig, RelPosEncoderModel)
    parameters = {"num_buckets": buckets, "max_distance": furthest}
    fields = {"norm_type": "rms_norm", "layer_norm_eps": 1e-6, "hidden_act": "relu", "share_positions": "model"}
    config = kind(**SIZES, **fields, intermediate_size=60, position_scheme="t5", position_parameters=parameters)
    for inputs in ({}, {"attention_mask": left_padding()}):
        assert_same(model(config), theirs, weights, FLOAT32, output="last_hidden_state", **inputs)


def test_gpt2() -> None:
    """Learned absolute positions of a decoder; linear layers stored the other way round."""
    config = transformers.GPT2Config(vocab_size=37, n_positions=16, n_embd=48, n_layer=2, n_head=6)
    theirs = randomised(transformers.GPT2LMHeadModel(config))
    given = {name: weight.T if re.search(r"c_\w+\.weight", name) else weight for name, weight in theirs.state_dict().items()}
    weights = renamed(
        split_fused(given, "c_attn", 6, by_head=False),
        (r"transformer\.wte\.weight", "model.embed_tokens.weight"),
        (r"transformer\.wpe\.weight", "model.position_schemes.shared.learned_absolute.position_embeddings"),
        (r"transformer\.h\.(\d+)\.attn\.c_proj\.(\w+)", r"model.layers.\1.attention.o_proj.\2"),
        (r"transformer\.h\.(\d+)\.attn\.(\w_proj\.\w+)", r"model.layers.\1.attention.\2"),
        (r"transformer\.h\.(\d+)\.ln_1\.(\w+)", r"model.layers.\1.attention_norm.\2"),
        (r"transformer\.h\.(\d+)\.ln_2\.(\w+)", r"model.layers.\1.mlp_norm.\2"),
        (r"transformer\.h\.(\d+)\.mlp\.c_fc\.(\w+)", r"model.layers.\1.mlp.up_proj.\2"),
        (r"transformer\.h\.(\d+)\.mlp\.c_proj\.(\w+)", r"model.layers.\1.mlp.down_proj.\2"),
        (r"transformer\.ln_f\.(\w+)", r"model.norm.\1"),
        (r"lm_head\.weight", "lm_head.weight"),
    )
    fields = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_new", "max_position_embeddings": 16}
    config = RelPosDecoderConfig(**SIZES, **fields, position_scheme="learned_absolute")
    assert_same(RelPosDecoderForCausalLM(config), theirs, weights, CLOSE)
