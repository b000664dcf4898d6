"""T5, mT5 and UMT5: encoders alone, and encoder-decoders."""

from typing import Any

from hf_relpos.conversion.plan import Head
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import encoder_heads
from hf_relpos.conversion.rules import Rule
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.rules import with_prefix
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.configuration_relpos_seq2seq import RelPosSeq2SeqConfig
from hf_relpos.model.modeling_relpos import RelPosEncoderModel
from hf_relpos.model.modeling_relpos_seq2seq import RelPosSeq2SeqForConditionalGeneration
from hf_relpos.model.modeling_relpos_seq2seq import RelPosSeq2SeqModel

HEADS = skip(r"(classifier|classification_head|qa_outputs|lm_head)\..*", "a head that the converted model does not have")


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan RMS norms, unscaled scores and buckets of distances; those of the first block serve all, except in UMT5."""
    fields = _fields(settings)
    owner = r"\1" if fields["share_positions"] == "layer" else "shared"
    if not any(".decoder.block." in f".{name}" for name in weights):
        rules = [rename(r"shared\.weight", "embed_tokens.weight"), *_stack_rules("encoder", owner, ""), HEADS]
        return Plan(RelPosEncoderConfig(**fields), RelPosEncoderModel, "transformer.", rules, encoder_heads()[1:2])
    config = RelPosSeq2SeqConfig(
        **fields,
        num_decoder_layers=settings("num_decoder_layers", None),
        decoder_start_token_id=settings("decoder_start_token_id", None),
        scale_head=settings("scale_decoder_outputs", False),
    )
    rules = [
        rename(r"shared\.weight", "encoder.embed_tokens.weight"),
        *_stack_rules("encoder", owner),
        *_stack_rules("decoder", owner),
    ]
    architectures = ("ForConditionalGeneration", "WithLMHeadModel")
    head = Head(RelPosSeq2SeqForConditionalGeneration, architectures, (rename(r"lm_head\.weight", "lm_head.weight"),))
    return Plan(config, RelPosSeq2SeqModel, "transformer.", [*rules, HEADS], [head])


def _fields(settings: Settings) -> dict[str, Any]:
    """Return the fields that both stacks share."""
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


def _stack_rules(stack: str, owner: str, target: str | None = None) -> list[Rule]:
    """Return the rules of one stack, whose `owner` has the buckets, to names in it or, by default, in an encoder-decoder."""
    layer, last = rf"{stack}\.block\.(\d+)\.layer\.0\.", rf"{stack}\.block\.(\d+)\.layer\.{1 + (stack == 'decoder')}\."
    cross = rf"{stack}\.block\.(\d+)\.layer\.1\."
    here = f"{stack}." if target is None else target
    rules = [
        rename(rf"{stack}\.embed_tokens\.weight", "embed_tokens.weight"),
        rename(layer + r"SelfAttention\.([qkvo])\.weight", r"layers.\1.attention.\2_proj.weight"),
        rename(
            layer + r"SelfAttention\.relative_attention_bias\.weight",
            f"position_schemes.{owner}.t5.bias",
            change=lambda table: table.T,
        ),
        rename(layer + r"layer_norm\.weight", r"layers.\1.attention_norm.weight"),
        rename(cross + r"EncDecAttention\.([qkvo])\.weight", r"layers.\1.cross_attention.\2_proj.weight"),
        rename(last + r"layer_norm\.weight", r"layers.\1.mlp_norm.weight"),
        rename(cross + r"layer_norm\.weight", r"layers.\1.cross_norm.weight"),
        rename(last + r"DenseReluDense\.wi(?:_1)?\.weight", r"layers.\1.mlp.up_proj.weight"),
        rename(last + r"DenseReluDense\.wi_0\.weight", r"layers.\1.mlp.gate_proj.weight"),
        rename(last + r"DenseReluDense\.wo\.weight", r"layers.\1.mlp.down_proj.weight"),
        rename(rf"{stack}\.final_layer_norm\.weight", "norm.weight"),
    ]
    return [with_prefix(here, rule) for rule in rules]
