"""ELECTRA, generator and discriminator, as far as its embeddings are as wide as its layers."""

from typing import Any

from hf_relpos.conversion.bert import ABSOLUTE
from hf_relpos.conversion.bert import LAYER_RULES
from hf_relpos.conversion.bert import OTHER_HEADS
from hf_relpos.conversion.bert import common_fields
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import encoder_heads
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.modeling_relpos import RelPosEncoderModel


def plan(settings: Settings, weights: Weights) -> Plan:
    """Return the plan: BERT with a head of other names; narrower embeddings are refused.

    There, ELECTRA adds positions before it projects the embeddings, and absolute positions are added behind that here.
    """
    settings.require("embedding_size", [settings("hidden_size")], "positions are added behind the projection here")
    settings.require("is_decoder", [False], "only the encoder is")
    settings.require("position_embedding_type", ["absolute"], "transformers no longer loads the others")
    fields: dict[str, Any] = common_fields(settings) | {"position_scheme": "learned_absolute"}
    language = [
        rename(r"generator_predictions\.dense\.(\w+)", r"head_dense.\1"),
        rename(r"generator_predictions\.LayerNorm\.(\w+)", r"head_norm.\1"),
        rename(r"generator_lm_head\.(\w+)", r"lm_head.\1"),
    ]
    rules = [
        rename(r"embeddings\.position_embeddings\.weight", ABSOLUTE),
        *LAYER_RULES,
        skip(r"(generator|discriminator)_(predictions|lm_head)\..*", "a head that the converted model does not have"),
        OTHER_HEADS,
    ]
    return Plan(RelPosEncoderConfig(**fields), RelPosEncoderModel, "electra.", rules, encoder_heads(*language))
