"""Encoders of T5, mT5 and UMT5."""

from hf_relpos.configuration_relpos import RelPosEncoderConfig
from hf_relpos.conversion.plan import Plan, encoder_heads
from hf_relpos.conversion.rules import Rule, Weights, leave, move
from hf_relpos.conversion.settings import Settings
from hf_relpos.modeling_relpos import RelPosEncoderModel


def block_rules(stack: str, feed_forward: int) -> list[Rule]:
    """Rules of one stack, to names within it; its feed-forward is that many-th of a block's sub-layers."""
    layer, last = rf"{stack}\.block\.(\d+)\.layer\.0\.", rf"{stack}\.block\.(\d+)\.layer\.{feed_forward}\."
    return [
        move(rf"{stack}\.embed_tokens\.weight", "embed_tokens.weight"),
        move(layer + r"SelfAttention\.([qkvo])\.weight", r"layers.\1.attention.\2_proj.weight"),
        move(
            layer + r"SelfAttention\.relative_attention_bias\.weight",
            r"position_schemes.\1.bias",
            change=lambda table: table.T,
        ),
        move(layer + r"layer_norm\.weight", r"layers.\1.attention_norm.weight"),
        move(last + r"layer_norm\.weight", r"layers.\1.mlp_norm.weight"),
        move(last + r"DenseReluDense\.wi(?:_1)?\.weight", r"layers.\1.mlp.up_proj.weight"),
        move(last + r"DenseReluDense\.wi_0\.weight", r"layers.\1.mlp.gate_proj.weight"),
        move(last + r"DenseReluDense\.wo\.weight", r"layers.\1.mlp.down_proj.weight"),
        move(rf"{stack}\.final_layer_norm\.weight", "norm.weight"),
    ]


def common_fields(settings: Settings) -> dict:
    """The fields of one stack."""
    return settings.common() | {
        "head_dim": settings("d_kv"),
        "intermediate_size": settings("d_ff"),
        "hidden_act": settings("dense_act_fn"),
        "gated_mlp": settings("is_gated_act"),
        "norm_type": "rms_norm",
        "layer_norm_eps": settings("layer_norm_epsilon"),
        "hidden_dropout": settings("dropout_rate"),
        "attention_dropout": settings("dropout_rate"),
        "classifier_dropout": settings("classifier_dropout", None),
        "position_scheme": "t5",
        "position_parameters": {
            "num_buckets": settings("relative_attention_num_buckets"),
            "max_distance": settings("relative_attention_max_distance"),
        },
        "share_positions": "layer" if settings.source == "umt5" else "model",
    }


def plan(settings: Settings, weights: Weights) -> Plan:
    """RMS norms, unscaled scores, buckets of distances; the first block's serve all, in UMT5 each block has its own."""
    if any(".decoder." in f".{name}" for name in weights):
        raise ValueError(f"{settings.source}: a decoder cannot be converted; save the encoder alone (T5EncoderModel)")
    config = RelPosEncoderConfig(**common_fields(settings))
    rules = [move(r"shared\.weight", "embed_tokens.weight"), *block_rules("encoder", 1)]
    rules.append(leave(r"classifier\..*", "a head that the converted model does not have"))
    return Plan(config, RelPosEncoderModel, "transformer.", rules, encoder_heads()[1:2])
