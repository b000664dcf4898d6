"""GPT-NeoX and Pythia."""

from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.plan import rotary_parameters
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import leave
from hf_relpos.conversion.rules import move
from hf_relpos.conversion.rules import split_heads
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel


def plan(settings: Settings, weights: Weights) -> Plan:
    """RoPE in halves over a part of the channels, usually parallel residuals, q, k and v fused head by head."""
    config = RelPosDecoderConfig(
        **settings.common(),
        intermediate_size=settings("intermediate_size"),
        hidden_act=settings("hidden_act"),
        layer_norm_eps=settings("layer_norm_eps"),
        parallel_residual=settings("use_parallel_residual", True),
        attention_bias=settings("attention_bias", True),
        mlp_bias=True,
        hidden_dropout=settings("hidden_dropout", 0.0),
        attention_dropout=settings("attention_dropout", 0.0),
        classifier_dropout=settings("classifier_dropout", None),
        position_scheme="rope",
        position_parameters=rotary_parameters(settings),
    )
    fused = [rf"layers.\1.attention.{letter}_proj.\2" for letter in "qkv"]
    rules = [
        move(r"embed_in\.weight", "embed_tokens.weight"),
        move(
            r"layers\.(\d+)\.attention\.query_key_value\.(\w+)",
            *fused,
            change=split_heads(config.num_attention_heads, by_head=True),
        ),
        move(r"layers\.(\d+)\.attention\.dense\.(\w+)", r"layers.\1.attention.o_proj.\2"),
        move(r"layers\.(\d+)\.input_layernorm\.(\w+)", r"layers.\1.attention_norm.\2"),
        move(r"layers\.(\d+)\.post_attention_layernorm\.(\w+)", r"layers.\1.mlp_norm.\2"),
        move(r"layers\.(\d+)\.mlp\.dense_h_to_4h\.(\w+)", r"layers.\1.mlp.up_proj.\2"),
        move(r"layers\.(\d+)\.mlp\.dense_4h_to_h\.(\w+)", r"layers.\1.mlp.down_proj.\2"),
        move(r"final_layer_norm\.(\w+)", r"norm.\1"),
        leave(r".*rotary_emb\.inv_freq", "follows from the configuration"),
        leave(r"layers\.\d+\.attention\.(masked_)?bias", "a mask"),
    ]
    head = move(r"(?:embed_out|lm_head)\.weight", "lm_head.weight")
    return Plan(config, RelPosDecoderModel, "gpt_neox.", rules, decoder_heads(head))
