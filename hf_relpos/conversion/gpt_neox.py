"""GPT-NeoX and Pythia."""

from hf_relpos.conversion.fused_layers import layer_rules
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.plan import rotary_parameters
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.rules import split_heads
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan RoPE in halves over a part of the channels, usually parallel residuals, and q, k and v fused head by head."""
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
    rules = [
        rename(r"embed_in\.weight", "embed_tokens.weight"),
        *layer_rules("layers", "attention", split_heads(config.num_attention_heads, by_head=True)),
        rename(r"final_layer_norm\.(\w+)", r"norm.\1"),
        skip(r".*rotary_emb\.inv_freq", "follows from the configuration"),
        skip(r"layers\.\d+\.attention\.(masked_)?bias", "a mask"),
    ]
    head = rename(r"(?:embed_out|lm_head)\.weight", "lm_head.weight")
    return Plan(config, RelPosDecoderModel, "gpt_neox.", rules, decoder_heads(head))
