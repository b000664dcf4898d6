"""Small models of transformers with random weights, one or more for each source that can be converted."""

import re
from functools import partial
from typing import Any

import pytest
import transformers
from parity import SIZES
from parity import randomised

import hf_relpos
from hf_relpos.conversion.api import convert_checkpoint
from hf_relpos.conversion.folder import build_model

WIDE = {**SIZES, "intermediate_size": 60}
BERT = {**WIDE, "max_position_embeddings": 16}
T5 = {
    "vocab_size": 37, "d_model": 48, "d_kv": 8, "d_ff": 60, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 6,
    "decoder_start_token_id": 0,
}  # fmt: skip
XLNET = {"vocab_size": 37, "d_model": 48, "n_layer": 2, "n_head": 6, "d_inner": 60}
DEBERTA = {**BERT, "relative_attention": True, "position_biased_input": False, "position_buckets": 8}
BOTH = {"pos_att_type": "c2p|p2c", "share_att_key": True, "norm_rel_ebd": "layer_norm"}
OWN = {"share_att_key": False, "norm_rel_ebd": "none"}
GPT2 = {"vocab_size": 37, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 6}
MPT = {"vocab_size": 37, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 32}
FALCON = {"vocab_size": 37, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
SCALED = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


def scaled(kind: str) -> dict[str, Any]:
    """Fields for a kind of RoPE scaling, at work from the ninth token on."""
    return {
        "max_position_embeddings": 8,
        "rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **SCALED[kind]},
    }


BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
SEQUENTIAL = {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}

ORIGINALS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaForCausalLM", {**WIDE, "num_key_value_heads": 2}),
    ("llama", "LlamaForCausalLM biased", {**WIDE, **BIASES}),
    *(("llama", f"LlamaForCausalLM {kind}", {**WIDE, **scaled(kind)}) for kind in SCALED),
    ("llama", "LlamaModel", WIDE),
    ("llama", "LlamaForSequenceClassification", {**WIDE, "num_labels": 3, "pad_token_id": 0}),
    ("llama", "LlamaForTokenClassification", {**WIDE, "num_labels": 3}),
    ("mistral", "MistralForCausalLM", {**WIDE, "num_key_value_heads": 2, "sliding_window": 4}),
    ("gpt_neox", "GPTNeoXForCausalLM", {**WIDE, "rope_parameters": PARTIAL}),
    ("gpt_neox", "GPTNeoXForCausalLM sequential", {**WIDE, **SEQUENTIAL}),
    ("bloom", "BloomForCausalLM", {"vocab_size": 37, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    ("gpt2", "GPT2LMHeadModel", GPT2),
    ("mpt", "MptForCausalLM", MPT),
    ("falcon", "FalconForCausalLM", FALCON),
    ("falcon", "FalconForCausalLM many", {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("falcon", "FalconForCausalLM grouped", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    (
        "falcon",
        "FalconForCausalLM one-norm",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    ("roberta", "RobertaForMaskedLM", {**BERT, "pad_token_id": 1}),
    ("roberta", "RobertaForQuestionAnswering", {**BERT, "pad_token_id": 1}),
    ("electra", "ElectraForMaskedLM", {**BERT, "embedding_size": 48}),
    ("electra", "ElectraForTokenClassification", {**BERT, "embedding_size": 48, "num_labels": 3}),
    ("bert", "BertForMaskedLM", BERT),
    ("bert", "BertForTokenClassification", {**BERT, "num_labels": 3}),
    ("bert", "BertForQuestionAnswering", BERT),
    ("bert", "BertLMHeadModel", {**BERT, "is_decoder": True}),
    ("roformer", "RoFormerForMaskedLM", WIDE),
    ("roformer", "RoFormerForMaskedLM narrow", {**WIDE, "embedding_size": 24}),
    ("roformer", "RoFormerForCausalLM", {**WIDE, "embedding_size": 24, "is_decoder": True}),
    ("roformer", "RoFormerModel", WIDE),
    ("t5", "T5EncoderModel", T5),
    ("t5", "T5ForTokenClassification", {**T5, "num_labels": 3}),
    ("t5", "T5ForConditionalGeneration", T5),
    ("t5", "T5ForConditionalGeneration 1.1", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("t5", "T5ForConditionalGeneration even", {**T5, "num_decoder_layers": 2}),
    ("t5", "T5Model", T5),
    ("mt5", "MT5ForConditionalGeneration", T5),
    ("umt5", "UMT5EncoderModel", T5),
    ("umt5", "UMT5ForConditionalGeneration", T5),
    ("deberta-v2", "DebertaV2ForMaskedLM", {**DEBERTA, **BOTH}),
    ("deberta-v2", "DebertaV2ForMaskedLM new", {**DEBERTA, **BOTH, "legacy": False}),
    ("deberta-v2", "DebertaV2ForMaskedLM c2p", {**DEBERTA, **OWN, "pos_att_type": "c2p"}),
    ("deberta-v2", "DebertaV2ForMaskedLM p2c", {**DEBERTA, **OWN, "pos_att_type": "p2c", "embedding_size": 24}),
    ("deberta-v2", "DebertaV2Model", {**DEBERTA, **BOTH, "position_buckets": -1}),
    ("xlnet", "XLNetModel", {**XLNET, "mem_len": None, "clamp_len": 4}),
    ("xlnet", "XLNetForTokenClassification", {**XLNET, "num_labels": 3}),
    ("xlnet", "XLNetForQuestionAnsweringSimple", XLNET),
    ("xlnet", "XLNetLMHeadModel", {**XLNET, "attn_type": "uni", "mem_len": 5}),
    ("xlnet", "XLNetLMHeadModel both ways", {**XLNET, "mem_len": 7, "reuse_len": 5}),
]
"""Kind of checkpoint, class and perhaps what is special, and fields of the configuration."""


def originals(pattern: str = "") -> list[Any]:
    """The originals whose names fit, as parameters of a test: kind of checkpoint, and what makes the model."""
    return [
        pytest.param(source, partial(original, name.split()[0], **fields), id=name.replace(" ", "-"))
        for source, name, fields in ORIGINALS
        if re.search(pattern, name)
    ]


def original(kind: str, **fields: Any) -> Any:
    """A model of transformers in float64 with random weights, and what is fixed in it as it should be."""
    model_class = getattr(transformers, kind)
    model = randomised(model_class(model_class.config_class(**fields)))
    for module in model.modules():
        if hasattr(module, "create_weight"):  # the sinusoids of RoFormer
            module.weight.data = module.create_weight().to(module.weight)
    if model.config.model_type == "t5" and fields.get("feed_forward_proj"):
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.flip(0))  # T5 1.1 has its own
    return model


def converted(source: str, config: Any, weights: Any) -> tuple[Any, Any]:
    """The model that a checkpoint becomes, in float64, and the report."""
    ours, state, report = convert_checkpoint(source, config, weights)
    return build_model(getattr(hf_relpos, ours.architectures[0])(ours), state).double(), report
