"""RoBERTa."""

from typing import Any

import torch

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
    """Return the plan: BERT whose first position is row `pad_token_id + 1` of the table, and a head with other names."""
    settings.require("is_decoder", [False], "only the encoder is")
    settings.require("add_cross_attention", [False], "there is no attention to an encoder")
    settings.require("position_embedding_type", ["absolute"], "transformers no longer loads the others")
    fields: dict[str, Any] = common_fields(settings)
    first = fields["pad_token_id"] + 1
    fields |= {"position_scheme": "learned_absolute", "max_position_embeddings": fields["max_position_embeddings"] - first}

    def drop(table: torch.Tensor) -> torch.Tensor:
        """Leave out the rows of padding."""
        return table[first:]

    language = [
        rename(r"lm_head\.dense\.(\w+)", r"head_dense.\1"),
        rename(r"lm_head\.layer_norm\.(\w+)", r"head_norm.\1"),
        rename(r"lm_head\.decoder\.weight", "lm_head.weight"),
        rename(r"lm_head\.(?:decoder\.)?bias", "lm_head.bias"),
    ]
    rules = [
        rename(r"embeddings\.position_embeddings\.weight", ABSOLUTE, change=drop),
        skip(r"embeddings\.token_type_ids", "zeros"),
        *LAYER_RULES,
        skip(r"lm_head\..*", "a head that the converted model does not have"),
        OTHER_HEADS,
    ]
    return Plan(RelPosEncoderConfig(**fields), RelPosEncoderModel, "roberta.", rules, encoder_heads(*language))
