"""BERT with relative or absolute positions, encoder and decoder, and what its relatives share with it."""

from typing import Any

import torch

from hf_relpos.conversion.plan import Head
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.plan import encoder_heads
from hf_relpos.conversion.rules import Rule
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel
from hf_relpos.model.modeling_relpos import RelPosEncoderModel

KINDS: dict[str, dict[str, Any]] = {
    "absolute": {"position_scheme": "learned_absolute"},
    "relative_key": {"position_scheme": "shaw", "position_parameters": {"values": False, "meets": "query"}},
    "relative_key_query": {"position_scheme": "shaw", "position_parameters": {"values": False, "meets": "both"}},
}
"""The fields here of each `position_embedding_type`."""
ABSOLUTE = "position_schemes.shared.learned_absolute.position_embeddings"
"""The weight here of learned absolute positions."""
LAYER_RULES = [
    rename(r"embeddings\.word_embeddings\.weight", "embed_tokens.weight"),
    rename(r"embeddings\.token_type_embeddings\.weight", "embed_types.weight"),
    rename(r"embeddings\.LayerNorm\.(\w+)", r"embed_norm.\1"),
    rename(
        r"encoder\.layer\.(\d+)\.attention\.self\.(q|k|v)(?:uery|ey|alue)(?:_proj)?\.(\w+)",
        r"layers.\1.attention.\2_proj.\3",
    ),
    rename(r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(\w+)", r"layers.\1.attention.o_proj.\2"),
    rename(r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(\w+)", r"layers.\1.attention_norm.\2"),
    rename(r"encoder\.layer\.(\d+)\.intermediate\.dense\.(\w+)", r"layers.\1.mlp.up_proj.\2"),
    rename(r"encoder\.layer\.(\d+)\.output\.dense\.(\w+)", r"layers.\1.mlp.down_proj.\2"),
    rename(r"encoder\.layer\.(\d+)\.output\.LayerNorm\.(\w+)", r"layers.\1.mlp_norm.\2"),
    skip(r"embeddings\.position_ids", "a counter"),
    skip(r"pooler\..*", "classifiers here read the hidden states without a pooler"),
]
OTHER_HEADS = skip(r"(cls|classifier|sequence_summary|qa_outputs)\..*", "a head that the converted model does not have")


def common_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields that BERT and its relatives share."""
    return settings.common() | {
        "intermediate_size": settings("intermediate_size"),
        "hidden_act": settings("hidden_act"),
        "norm_position": "post",
        "layer_norm_eps": settings("layer_norm_eps"),
        "embedding_norm": True,
        "type_vocab_size": settings("type_vocab_size"),
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_dropout": settings("hidden_dropout_prob"),
        "attention_dropout": settings("attention_probs_dropout_prob"),
        "classifier_dropout": settings("classifier_dropout", None),
    }


def language_heads(causal: bool) -> list[Head]:
    """Return the heads of an encoder or a decoder whose language-model head has a dense layer and a norm of its own."""
    dense, norm = ("head_projection.0", "head_projection.2") if causal else ("head_dense", "head_norm")
    rules = [
        rename(r"cls\.predictions\.transform\.dense\.(\w+)", rf"{dense}.\1"),
        rename(r"cls\.predictions\.transform\.LayerNorm\.(\w+)", rf"{norm}.\1"),
        rename(r"cls\.predictions\.decoder\.weight", "lm_head.weight"),
        rename(r"cls\.predictions\.(?:decoder\.)?bias", "lm_head.bias"),
    ]
    return decoder_heads(*rules)[:1] if causal else encoder_heads(*rules)


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan norms after the sums, and Shaw's vectors on keys and perhaps on queries, or learned absolute positions."""
    settings.require("add_cross_attention", [False], "there is no attention to an encoder")
    settings.require("position_embedding_type", list(KINDS), "it is unknown")
    causal, kind = settings("is_decoder", False), settings("position_embedding_type", "absolute")
    fields: dict[str, Any] = common_fields(settings) | KINDS[kind]
    rules: list[Rule] = [*LAYER_RULES]
    absolute = r"embeddings\.position_embeddings\.weight"
    if kind == "absolute":
        rules.append(rename(absolute, ABSOLUTE))
    else:
        furthest = fields["max_position_embeddings"] - 1
        fields["position_parameters"] = {"max_distance": furthest, **fields["position_parameters"]}

        def turn(table: torch.Tensor) -> torch.Tensor:
            """Return rows of key minus query from rows of query minus key; a decoder needs those of the past only."""
            return table.flip(0)[: furthest + 1] if causal else table.flip(0)

        table = r"encoder\.layer\.(\d+)\.attention\.self\.distance_embedding\.weight"
        rules.append(rename(table, r"position_schemes.\1.shaw.key_table", change=turn))
        rules.append(skip(absolute, f"position_embedding_type={kind!r} does not add absolute positions"))
    config = RelPosDecoderConfig(**fields, lm_head_dense=True, lm_head_bias=True) if causal else RelPosEncoderConfig(**fields)
    base = RelPosDecoderModel if causal else RelPosEncoderModel
    return Plan(config, base, "bert.", [*rules, OTHER_HEADS], language_heads(causal))
