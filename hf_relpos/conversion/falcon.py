"""Falcon: RoPE or ALiBi, one or several heads of keys and values."""

from typing import Any

from hf_relpos.conversion.fused_layers import layer_rules
from hf_relpos.conversion.fused_layers import split_groups
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.plan import rotary_parameters
from hf_relpos.conversion.rules import Rule
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import split_heads
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel


def plan(settings: Settings, weights: Weights) -> Plan:
    """Return the plan: usually parallel residuals, and biases in no projection.

    ALiBi is refused: Falcon rounds its biases to bfloat16 before it scales them with the scores, which no slope says.
    """
    settings.require("alibi", [False], "its biases are rounded to bfloat16 and divided by the root of the head size")
    grouped, parallel = settings("new_decoder_architecture", False), settings("parallel_attn", True)
    heads = settings("num_attention_heads")
    groups = settings("num_kv_heads", heads) if grouped else 1 if settings("multi_query", True) else heads
    norms = settings("num_ln_in_parallel_attn", 2 if grouped else 1)
    fields: dict[str, Any] = settings.common() | {"num_key_value_heads": groups}
    config = RelPosDecoderConfig(
        **fields,
        intermediate_size=settings("ffn_hidden_size"),
        hidden_act=settings("activation", "gelu"),
        layer_norm_eps=settings("layer_norm_epsilon"),
        parallel_residual=parallel or grouped,
        attention_bias=settings("bias", False),
        mlp_bias=settings("bias", False),
        hidden_dropout=settings("hidden_dropout", 0.0),
        attention_dropout=settings("attention_dropout", 0.0),
        position_scheme="rope",
        position_parameters=rotary_parameters(settings),
    )
    if grouped and not parallel:
        raise ValueError("falcon: new_decoder_architecture=True needs parallel_attn=True: its layers have no second norm else")
    together = grouped or groups == 1
    change = split_groups(groups, fields["hidden_size"] // heads) if together else split_heads(heads, by_head=True)
    rules: list[Rule] = [rename(r"word_embeddings\.weight", "embed_tokens.weight"), rename(r"ln_f\.(\w+)", r"norm.\1")]
    if parallel and norms == 1:  # one norm serves both
        both = (r"layers.\1.attention_norm.\2", r"layers.\1.mlp_norm.\2")
        rules.append(rename(r"h\.(\d+)\.input_layernorm\.(\w+)", *both))
    rules += layer_rules("h", "self_attention", change)
    head = rename(r"lm_head\.weight", "lm_head.weight")
    return Plan(config, RelPosDecoderModel, "transformer.", rules, decoder_heads(head))
