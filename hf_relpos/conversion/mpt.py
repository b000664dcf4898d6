"""MPT with ALiBi."""

from typing import Any

from hf_relpos.conversion.fused_layers import FUSED
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import split_heads
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel


def plan(settings: Settings, weights: Weights) -> Plan:
    """Return the plan: ALiBi with the slopes of the released code, and no bias anywhere."""
    settings.require("no_bias", [True], "its layers have no biases")
    settings.require("logit_scale", [None], "logits are not scaled here")
    found: Any = settings("attn_config", {})
    attention = Settings("mpt attn_config", found if isinstance(found, dict) else found.to_dict())
    attention.require("attn_type", ["multihead_attention"], "its keys are not shared")
    attention.require("alibi", [True], "without ALiBi it has no positions that transformers loads")
    attention.require("alibi_bias_max", [8], "its slopes are 2^(-8h/H)")
    attention.require("clip_qkv", [None], "queries, keys and values are not clipped here")
    attention.require("qk_ln", [False], "queries and keys are not normalised here")
    attention.require("prefix_lm", [False], "a decoder sees no later tokens")
    attention.require(
        "softmax_scale", [None, settings("hidden_size") ** -0.5], "scores are divided by the root of the head size"
    )
    dropout = float(attention("attn_pdrop", 0.0))
    config = RelPosDecoderConfig(
        **settings.common(),
        intermediate_size=settings("hidden_size") * settings("expansion_ratio", 4),
        layer_norm_eps=settings("layer_norm_epsilon"),
        norm_bias=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        position_scheme="alibi",
    )
    rules = [
        rename(r"wte\.weight", "embed_tokens.weight"),
        rename(r"blocks\.(\d+)\.attn\.Wqkv\.(\w+)", *FUSED, change=split_heads(config.num_attention_heads, by_head=False)),
        rename(r"blocks\.(\d+)\.attn\.out_proj\.(\w+)", r"layers.\1.attention.o_proj.\2"),
        rename(r"blocks\.(\d+)\.norm_1\.(\w+)", r"layers.\1.attention_norm.\2"),
        rename(r"blocks\.(\d+)\.norm_2\.(\w+)", r"layers.\1.mlp_norm.\2"),
        rename(r"blocks\.(\d+)\.ffn\.(up|down)_proj\.(\w+)", r"layers.\1.mlp.\2_proj.\3"),
        rename(r"norm_f\.(\w+)", r"norm.\1"),
    ]
    head = rename(r"lm_head\.weight", "lm_head.weight")
    return Plan(config, RelPosDecoderModel, "transformer.", rules, decoder_heads(head))
