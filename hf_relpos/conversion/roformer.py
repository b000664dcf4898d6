"""RoFormer."""

from typing import Any

import torch

from hf_relpos.conversion.bert import LAYER_RULES
from hf_relpos.conversion.bert import OTHER_HEADS
from hf_relpos.conversion.bert import common_fields
from hf_relpos.conversion.bert import language_heads
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel
from hf_relpos.model.modeling_relpos import RelPosEncoderModel
from hf_relpos.model.scheme_base import sinusoid


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan BERT with RoPE of neighbouring channels; narrow embeddings are normalised before they are projected."""
    settings.require("add_cross_attention", [False], "there is no attention to an encoder")
    settings.require("rotary_value", [False], "values are not turned here")
    _check_angles(weights)
    causal = settings("is_decoder", False)
    fields: dict[str, Any] = common_fields(settings) | {
        "position_scheme": "rope",
        "position_parameters": {"interleaved": True},
    }
    if (size := settings("embedding_size", None)) not in (None, fields["hidden_size"]):
        fields |= {"embedding_size": size, "embedding_norm": "before_projection"}
    rules = [
        *LAYER_RULES,
        rename(r"embeddings_project\.(\w+)", r"embed_projection.\1"),
        skip(r"encoder\.embed_positions\.weight", "follows from the configuration"),
        OTHER_HEADS,
    ]
    config = RelPosDecoderConfig(**fields, lm_head_dense=True, lm_head_bias=True) if causal else RelPosEncoderConfig(**fields)
    base = RelPosDecoderModel if causal else RelPosEncoderModel
    return Plan(config, base, "roformer.", rules, language_heads(causal))


def _check_angles(weights: Weights) -> None:
    """Refuse tables of sines and cosines that are not those of RoPE."""
    for name, table in weights.items():
        if name.endswith("encoder.embed_positions.weight"):
            wanted = sinusoid(torch.arange(table.shape[0]), table.shape[1])
            if not torch.allclose(table.float(), wanted, rtol=0, atol=1e-2):
                raise ValueError(f"roformer: {name} cannot be converted: it does not hold the sines and cosines of RoPE")
