"""Layers that BLOOM, GPT-NeoX and Falcon name alike: one projection for queries, keys and values, and a plain MLP."""

import torch

from hf_relpos.conversion.rules import Change
from hf_relpos.conversion.rules import Rule
from hf_relpos.conversion.rules import rename

FUSED = tuple(rf"layers.\1.attention.{letter}_proj.\2" for letter in "qkv")


def layer_rules(layer: str, attention: str, change: Change) -> list[Rule]:
    """Return the rules for the weights of all layers.

    Args:
        layer: what the name of a layer's weights begins with, before its number.
        attention: the name of its attention.
        change: splits the fused projection into queries, keys and values.
    """
    start = rf"{layer}\.(\d+)\."
    return [
        rename(rf"{start}{attention}\.query_key_value\.(\w+)", *FUSED, change=change),
        rename(rf"{start}{attention}\.dense\.(\w+)", r"layers.\1.attention.o_proj.\2"),
        rename(rf"{start}(?:input_layernorm|ln_attn)\.(\w+)", r"layers.\1.attention_norm.\2"),
        rename(rf"{start}(?:post_attention_layernorm|ln_mlp)\.(\w+)", r"layers.\1.mlp_norm.\2"),
        rename(rf"{start}mlp\.dense_h_to_4h\.(\w+)", r"layers.\1.mlp.up_proj.\2"),
        rename(rf"{start}mlp\.dense_4h_to_h\.(\w+)", r"layers.\1.mlp.down_proj.\2"),
    ]


def split_groups(groups: int, head_dim: int) -> Change:
    """Split a fused projection in which each group of query heads is followed by its key head and its value head."""

    def change(weight: torch.Tensor) -> list[torch.Tensor]:
        heads = weight.unflatten(0, (groups, -1, head_dim))
        return [part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])]

    return change
