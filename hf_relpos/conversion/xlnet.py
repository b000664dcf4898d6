"""XLNet: both streams with memory in both directions, or the content stream in one direction."""

from dataclasses import replace

from hf_relpos.conversion.plan import Head
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.plan import encoder_heads
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel
from hf_relpos.model.modeling_relpos import RelPosEncoderForPermutationLM
from hf_relpos.model.modeling_relpos import RelPosEncoderModel

RULES = [
    rename(r"word_embedding\.weight", "embed_tokens.weight"),
    rename(
        r"layer\.(\d+)\.rel_attn\.([qkv])",
        r"layers.\1.attention.\2_proj.weight",
        change=lambda weight: weight.flatten(1).T,
    ),
    rename(
        r"layer\.(\d+)\.rel_attn\.r",
        r"position_schemes.\1.xlnet.distance_projection.weight",
        change=lambda weight: weight.flatten(1).T,
    ),
    rename(r"layer\.(\d+)\.rel_attn\.o", r"layers.\1.attention.o_proj.weight", change=lambda weight: weight.flatten(1)),
    rename(r"layer\.(\d+)\.rel_attn\.r_w_bias", r"position_schemes.\1.xlnet.key_offset"),
    rename(r"layer\.(\d+)\.rel_attn\.r_r_bias", r"position_schemes.\1.xlnet.distance_offset"),
    rename(r"layer\.(\d+)\.rel_attn\.layer_norm\.(\w+)", r"layers.\1.attention_norm.\2"),
    rename(r"layer\.(\d+)\.ff\.layer_1\.(\w+)", r"layers.\1.mlp.up_proj.\2"),
    rename(r"layer\.(\d+)\.ff\.layer_2\.(\w+)", r"layers.\1.mlp.down_proj.\2"),
    rename(r"layer\.(\d+)\.ff\.layer_norm\.(\w+)", r"layers.\1.mlp_norm.\2"),
]
QUERY_STREAM = rename(r"mask_emb", "mask_emb", change=lambda weight: weight.flatten())
NO_QUERY_STREAM = skip(r"mask_emb", "only the query stream of pretraining begins with it")
SEGMENTS = [
    rename(r"layer\.(\d+)\.rel_attn\.r_s_bias", r"position_schemes.\1.xlnet.segment_offset"),
    rename(r"layer\.(\d+)\.rel_attn\.seg_embed", r"position_schemes.\1.xlnet.segment_table"),
]
NO_SEGMENTS = skip(r"layer\.\d+\.rel_attn\.(r_s_bias|seg_embed)", "a decoder here has no token types")
LANGUAGE_MODEL = rename(r"lm_loss\.(\w+)", r"lm_head.\1")
OTHER_HEADS = skip(
    r"(lm_loss|classifier|qa_outputs|sequence_summary|logits_proj|start_logits|end_logits|answer_class)\..*",
    "a head that the converted model does not have",
)
NO_MEMORY = "mem_len is not set: the encoder carries no memory; transformers would keep all that it has seen"


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan Transformer-XL's terms with norms after the sums; an encoder has a term for token types, and a query stream."""
    settings.require("attn_type", ["bi", "uni"], "it is unknown")
    settings.require("bi_data", [False], "a half of each batch would run backwards")
    clamp = settings("clamp_len", -1)
    fields = settings.common() | {
        "head_dim": settings("d_head"),
        "intermediate_size": settings("d_inner"),
        "hidden_act": settings("ff_activation"),
        "mlp_bias": True,
        "norm_position": "post",
        "layer_norm_eps": settings("layer_norm_eps"),
        "hidden_dropout": settings("dropout"),
        "attention_dropout": settings("dropout"),
        "classifier_dropout": settings("summary_last_dropout", None),
        "position_scheme": "xlnet",
        "position_parameters": {"clamp_len": clamp if clamp > 0 else None},
    }
    if settings("attn_type", "bi") == "bi":
        mem_len, reuse_len = settings("mem_len", 0), settings("reuse_len", 0)
        memory = {"mem_len": mem_len, "reuse_len": reuse_len or None} if mem_len else {}
        _, tokens, answers = encoder_heads()
        heads = [
            Head(RelPosEncoderForPermutationLM, ("LMHeadModel",), (LANGUAGE_MODEL,)),
            tokens,
            replace(answers, architectures=("ForQuestionAnsweringSimple",)),
        ]
        tuned = tuple(name for head in heads[1:] for name in head.architectures)
        asks = any(name.endswith("mask_emb") for name in weights)
        asks = asks and not any(name.endswith(tuned) for name in settings.architectures)
        config = RelPosEncoderConfig(**fields, **memory, type_vocab_size=2, query_stream=asks)
        rules = [*RULES, *SEGMENTS, QUERY_STREAM if asks else NO_QUERY_STREAM, OTHER_HEADS]
        return Plan(config, RelPosEncoderModel, "transformer.", rules, heads, [] if mem_len else [NO_MEMORY])
    settings.require("same_length", [False], "its window depends on the memory that is there")
    settings.require("reuse_len", [None, 0], "all tokens of a segment are remembered")
    config = RelPosDecoderConfig(**fields, mem_len=settings("mem_len", 0), sliding_window=None, lm_head_bias=True)
    rules = [*RULES, NO_SEGMENTS, NO_QUERY_STREAM, OTHER_HEADS]
    return Plan(config, RelPosDecoderModel, "transformer.", rules, decoder_heads(LANGUAGE_MODEL)[:1])
