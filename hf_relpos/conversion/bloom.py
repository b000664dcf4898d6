"""BLOOM."""

from hf_relpos.conversion.fused_layers import layer_rules
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import split_heads
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan ALiBi with the slopes of the released code, normed embeddings and biases everywhere."""
    settings.require("apply_residual_connection_post_layernorm", [False], "the residual is what enters a layer, not its norm")
    config = RelPosDecoderConfig(
        **settings.common(),
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=settings("layer_norm_epsilon"),
        embedding_norm=True,
        attention_bias=True,
        mlp_bias=True,
        hidden_dropout=settings("hidden_dropout", 0.0),
        attention_dropout=settings("attention_dropout", 0.0),
        position_scheme="alibi",
    )
    rules = [
        rename(r"word_embeddings\.weight", "embed_tokens.weight"),
        rename(r"word_embeddings_layernorm\.(\w+)", r"embed_norm.\1"),
        *layer_rules("h", "self_attention", split_heads(config.num_attention_heads, by_head=True)),
        rename(r"ln_f\.(\w+)", r"norm.\1"),
    ]
    head = rename(r"lm_head\.weight", "lm_head.weight")
    return Plan(config, RelPosDecoderModel, "transformer.", rules, decoder_heads(head))
