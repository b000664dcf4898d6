"""DeBERTa-v2 and v3."""

from typing import Any

from hf_relpos.conversion.bert import LAYER_RULES
from hf_relpos.conversion.bert import OTHER_HEADS
from hf_relpos.conversion.bert import common_fields
from hf_relpos.conversion.bert import language_heads
from hf_relpos.conversion.plan import Head
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.modeling_relpos import RelPosEncoderModel

NEW_HEAD = r"lm_predictions\.lm_head\."
RULES = [
    *LAYER_RULES,
    rename(r"embeddings\.embed_proj\.weight", "embed_projection.weight"),
    rename(r"encoder\.rel_embeddings\.weight", "position_schemes.shared.deberta.table"),
    rename(r"encoder\.LayerNorm\.(\w+)", r"position_schemes.shared.deberta.norm.\1"),
    rename(
        r"encoder\.layer\.(\d+)\.attention\.self\.pos_key_proj\.weight",
        r"position_schemes.shared.deberta.key_projections.\1.weight",
    ),
    rename(
        r"encoder\.layer\.(\d+)\.attention\.self\.pos_query_proj\.(\w+)",
        r"position_schemes.shared.deberta.query_projections.\1.\2",
    ),
    skip(
        r"encoder\.layer\.\d+\.attention\.self\.pos_key_proj\.bias",
        "it adds the same to the scores of all keys, which changes no probability",
    ),
    skip(r"mask_predictions\..*", "a part of pretraining that has no head here"),
    OTHER_HEADS,
]


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan BERT with disentangled attention over one table of distances."""
    settings.require("relative_attention", [True], "without it, positions are absolute only")
    settings.require("position_biased_input", [False], "absolute positions do not go with relative ones here")
    settings.require("conv_kernel_size", [0], "there is no convolution beside the first layer")
    fields = common_fields(settings) | {
        "head_dim": settings("attention_head_size", None),
        "position_scheme": "deberta",
        "position_parameters": _parameters(settings),
    }
    if (size := settings("embedding_size", None)) not in (None, fields["hidden_size"]):
        fields["embedding_size"] = size
    head, *others = language_heads(causal=False)
    new = any(name.startswith("lm_predictions.") for name in weights)
    if new:
        fields["tie_word_embeddings"] = True  # this head reads the embeddings themselves
        rules = [
            rename(NEW_HEAD + r"dense\.(\w+)", r"head_dense.\1"),
            rename(NEW_HEAD + r"LayerNorm\.(\w+)", r"head_norm.\1"),
            rename(NEW_HEAD + r"bias", "lm_head.bias"),
        ]
        head = Head(head.model, head.architectures, tuple(rules))
    return Plan(RelPosEncoderConfig(**fields), RelPosEncoderModel, "deberta.", RULES, [head, *others])


def _parameters(settings: Settings) -> dict[str, Any]:
    """Return the parameters of `deberta`."""
    kinds = set(settings("pos_att_type", []))
    if not kinds or kinds - {"c2p", "p2c"}:
        raise ValueError(f"deberta-v2: pos_att_type={sorted(kinds)} cannot be converted; c2p, p2c or both can")
    furthest, buckets = settings("max_relative_positions", -1), settings("position_buckets", -1)
    furthest = furthest if furthest > 0 else settings("max_position_embeddings")
    return {
        "max_distance": furthest,
        "num_buckets": buckets if buckets > 0 else None,
        "terms": "both" if len(kinds) == 2 else kinds.pop(),
        "projections": "layer" if settings("share_att_key", False) else "own",
        "normalise": "layer_norm" in settings("norm_rel_ebd", "none").lower().split("|"),
    }
