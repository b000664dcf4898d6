"""Llama, and Mistral, which adds a sliding window."""

from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.plan import rotary_parameters
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel

RULES = [
    rename(r"embed_tokens\.weight", "embed_tokens.weight"),
    rename(r"layers\.(\d+)\.self_attn\.(\w)_proj\.(\w+)", r"layers.\1.attention.\2_proj.\3"),
    rename(r"layers\.(\d+)\.mlp\.(\w+)_proj\.(\w+)", r"layers.\1.mlp.\2_proj.\3"),
    rename(r"layers\.(\d+)\.input_layernorm\.weight", r"layers.\1.attention_norm.weight"),
    rename(r"layers\.(\d+)\.post_attention_layernorm\.weight", r"layers.\1.mlp_norm.weight"),
    rename(r"norm\.weight", "norm.weight"),
    skip(r".*rotary_emb\.inv_freq", "follows from the configuration"),
]


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan RoPE in halves, grouped heads, a gated feed-forward and RMS norms."""
    config = RelPosDecoderConfig(
        **settings.common(),
        intermediate_size=settings("intermediate_size"),
        num_key_value_heads=settings("num_key_value_heads", None),
        head_dim=settings("head_dim", None),
        hidden_act=settings("hidden_act"),
        gated_mlp=True,
        norm_type="rms_norm",
        layer_norm_eps=settings("rms_norm_eps"),
        attention_bias=settings("attention_bias", False),
        mlp_bias=settings("mlp_bias", False),
        attention_dropout=settings("attention_dropout", 0.0),
        sliding_window=settings("sliding_window", None),
        position_scheme="rope",
        position_parameters=rotary_parameters(settings),
    )
    return Plan(config, RelPosDecoderModel, "model.", RULES, decoder_heads(rename(r"lm_head\.weight", "lm_head.weight")))
