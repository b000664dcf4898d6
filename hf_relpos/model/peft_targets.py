"""Tells PEFT, where it is in use, which layers of these models its methods tune.

PEFT looks the layers up by the kind of a model, in tables of its own that know released models only.
"""

import sys
from typing import Any

NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
"""The only layers that are not named as Llama's are."""


def register_peft_targets(model_type: str) -> None:
    """Enter a kind of model into PEFT's tables, with the layers that each method tunes in Llama. What is there already stays.

    Nothing is imported: without PEFT there are no tables.
    """
    tables: Any = sys.modules.get("peft.utils.constants")
    for name, table in vars(tables).items() if tables is not None else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict) and "llama" in table:
            table.setdefault(model_type, [NORMS.get(layer, layer) for layer in table["llama"]])
