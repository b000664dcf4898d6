"""Nezha: BERT with fixed sinusoids of the distance added to keys and values (arXiv 1909.00204), as transformers had it until 4.40."""

from typing import Any

from hf_relpos.conversion.bert import LAYER_RULES
from hf_relpos.conversion.bert import OTHER_HEADS
from hf_relpos.conversion.bert import common_fields
from hf_relpos.conversion.bert import language_heads
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.modeling_relpos import RelPosEncoderModel


def plan(settings: Settings, weights: Weights) -> Plan:
    """Return the plan: BERT with Shaw's scheme, whose vectors are sinusoids of their row in the table: its code, not its paper."""
    settings.require("is_decoder", [False], "only the encoder is")
    parameters = {"max_distance": settings("max_relative_position"), "table": "sinusoidal_rows"}
    fields: dict[str, Any] = common_fields(settings) | {"position_scheme": "shaw", "position_parameters": parameters}
    rules = [
        *LAYER_RULES,
        skip(r"encoder\.layer\.\d+\.attention\.self\.relative_positions_encoding\..*", "follows from the configuration"),
        skip(r"embeddings\.token_type_ids", "zeros"),
        OTHER_HEADS,
    ]
    return Plan(RelPosEncoderConfig(**fields), RelPosEncoderModel, "nezha.", rules, language_heads(causal=False))
