"""GPT-2."""

import torch

from hf_relpos.conversion.bert import ABSOLUTE
from hf_relpos.conversion.fused_layers import FUSED
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.rules import split_heads
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel


def plan(settings: Settings, weights: Weights) -> Plan:
    """Return the plan: learned absolute positions, and matrices that stand the other way round than in `nn.Linear`."""
    settings.require("add_cross_attention", [False], "there is no attention to an encoder")
    settings.require("scale_attn_weights", [True], "scores are divided by the root of the head size")
    settings.require("scale_attn_by_inverse_layer_idx", [False], "scores are not divided by the number of the layer")
    dropout = {settings(name, 0.1) for name in ("resid_pdrop", "embd_pdrop")}
    if len(dropout) > 1:
        raise ValueError(f"gpt2: resid_pdrop and embd_pdrop are {sorted(dropout)}: one hidden_dropout serves both here")
    config = RelPosDecoderConfig(
        **settings.common(),
        intermediate_size=settings("n_inner", 4 * settings("hidden_size")),
        hidden_act=settings("activation_function"),
        layer_norm_eps=settings("layer_norm_epsilon"),
        attention_bias=True,
        mlp_bias=True,
        hidden_dropout=dropout.pop(),
        attention_dropout=settings("attn_pdrop", 0.1),
        position_scheme="learned_absolute",
    )
    split = split_heads(config.num_attention_heads, by_head=False)

    def turn(weight: torch.Tensor) -> torch.Tensor:
        return weight.mT if weight.dim() == 2 else weight

    rules = [
        rename(r"wte\.weight", "embed_tokens.weight"),
        rename(r"wpe\.weight", ABSOLUTE),
        rename(r"h\.(\d+)\.attn\.c_attn\.(\w+)", *FUSED, change=lambda weight: split(turn(weight))),
        rename(r"h\.(\d+)\.attn\.c_proj\.(\w+)", r"layers.\1.attention.o_proj.\2", change=turn),
        rename(r"h\.(\d+)\.ln_1\.(\w+)", r"layers.\1.attention_norm.\2"),
        rename(r"h\.(\d+)\.ln_2\.(\w+)", r"layers.\1.mlp_norm.\2"),
        rename(r"h\.(\d+)\.mlp\.c_fc\.(\w+)", r"layers.\1.mlp.up_proj.\2", change=turn),
        rename(r"h\.(\d+)\.mlp\.c_proj\.(\w+)", r"layers.\1.mlp.down_proj.\2", change=turn),
        rename(r"ln_f\.(\w+)", r"norm.\1"),
        skip(r"h\.\d+\.attn\.(masked_)?bias", "a mask"),
    ]
    head = rename(r"lm_head\.weight", "lm_head.weight")
    return Plan(config, RelPosDecoderModel, "transformer.", rules, decoder_heads(head))
