"""Transformer-XL: of transformers before version 5, by its names, and of the paper's own code, by its own."""

from collections.abc import Sequence

import torch

from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.plan import decoder_heads
from hf_relpos.conversion.rules import Rule
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.rules import skip
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.adaptive_softmax import cluster_bounds
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderModel

FIRST_MEMORY = (
    "the first segment has an empty memory, as in the paper's code; transformers gave it mem_len zeros, and attended "
    "to them: SegmentMemory(zeros, lengths), with a tensor of mem_len for each row, brings those numbers back"
)
LAYER_RULES = [
    rename(
        r"layers\.(\d+)\.dec_attn\.qkv_net\.weight",
        *(rf"layers.\1.attention.{letter}_proj.weight" for letter in "qkv"),
        change=lambda weight: weight.unflatten(0, (3, -1)).unbind(0),
    ),
    rename(r"layers\.(\d+)\.dec_attn\.o_net\.weight", r"layers.\1.attention.o_proj.weight"),
    rename(r"layers\.(\d+)\.dec_attn\.layer_norm\.(\w+)", r"layers.\1.attention_norm.\2"),
    rename(r"layers\.(\d+)\.pos_ff\.CoreNet\.0\.(\w+)", r"layers.\1.mlp.up_proj.\2"),
    rename(r"layers\.(\d+)\.pos_ff\.CoreNet\.3\.(\w+)", r"layers.\1.mlp.down_proj.\2"),
    rename(r"layers\.(\d+)\.pos_ff\.layer_norm\.(\w+)", r"layers.\1.mlp_norm.\2"),
    rename(r"layers\.(\d+)\.dec_attn\.r_net\.weight", r"position_schemes.\1.transformer_xl.distance_projection.weight"),
    rename(r"layers\.(\d+)\.dec_attn\.r_w_bias", r"position_schemes.\1.transformer_xl.key_offset"),
    rename(r"layers\.(\d+)\.dec_attn\.r_r_bias", r"position_schemes.\1.transformer_xl.distance_offset"),
    skip(r"pos_emb\.inv_freq", "follows from the configuration"),
    skip(r"crit\..*", "a head that the converted model does not have"),
]


def plan(settings: Settings, weights: Weights) -> Plan:
    """Plan four terms of attention, norms after the sums or before the sub-layers, memory, adaptive embeddings and softmax."""
    _refuse(settings)
    config = _config(settings)
    layers = range(config.num_hidden_layers)
    shared = [
        rename("r_w_bias", *(f"position_schemes.{index}.transformer_xl.key_offset" for index in layers)),
        rename("r_r_bias", *(f"position_schemes.{index}.transformer_xl.distance_offset" for index in layers)),
    ]
    original = any(name.startswith("crit.") for name in weights) and any(name.startswith("layers.") for name in weights)
    borrowed = _borrowed(settings, weights)
    if config.cutoffs:
        entry, head = _adaptive_rules(config, borrowed, original)
    else:
        entry, head = _plain_rules(config, borrowed)
    notes = [] if original else [FIRST_MEMORY]
    return Plan(config, RelPosDecoderModel, "transformer.", [*entry, *shared, *LAYER_RULES], decoder_heads(*head), notes)


def _refuse(settings: Settings) -> None:
    """Refuse what Transformer-XL's code offered beyond what is here."""
    settings.require("attn_type", [0], "only the paper's own attention can be converted")
    settings.require("ext_len", [0], "there is no extended context besides the memory")
    settings.require("sample_softmax", [-1, 0], "there is no sampled softmax")
    if settings("same_length", False) and settings("mem_len") < 2:
        raise ValueError(f"{settings.source}: same_length=True cannot be converted with mem_len={settings('mem_len')}")


def _config(settings: Settings) -> RelPosDecoderConfig:
    mem_len, clamp, pre_norm = settings("mem_len"), settings("clamp_len", -1), settings("pre_lnorm", False)
    return RelPosDecoderConfig(
        vocab_size=settings("vocab_size", None) or settings("n_token"),
        hidden_size=settings("d_model"),
        embedding_size=settings("d_embed", None),
        num_hidden_layers=settings("n_layer"),
        num_attention_heads=settings("n_head"),
        head_dim=settings("d_head"),
        intermediate_size=settings("d_inner"),
        hidden_act="relu",
        mlp_bias=True,
        norm_position="pre" if pre_norm else "post",
        final_norm=not pre_norm,
        layer_norm_eps=settings("layer_norm_epsilon", 1e-5),
        scale_embedding=True,
        hidden_dropout=settings("dropout"),
        attention_dropout=settings("dropatt"),
        tie_word_embeddings=settings("tie_word_embeddings", settings("tie_weight", True)),
        cutoffs=list(settings("cutoffs", [])) or None,
        div_val=settings("div_val", 1) if settings("cutoffs", []) else 1,
        lm_head_bias=True,
        mem_len=mem_len,
        sliding_window=mem_len if settings("same_length", False) else None,
        initializer_range=settings("init_std", 0.02),
        eos_token_id=settings("eos_token_id", None),
        position_scheme="transformer_xl",
        position_parameters={"clamp_len": clamp if clamp > 0 else None},
    )


def _plain_rules(config: RelPosDecoderConfig, borrowed: Sequence[int]) -> tuple[list[Rule], list[Rule]]:
    """Return the rules of embeddings and head without clusters; narrow embeddings are scaled here before they are projected."""
    entry = [rename(r"word_emb\.emb_layers\.0\.weight", "embed_tokens.weight")]
    head = [rename(r"crit\.out_layers\.0\.(\w+)", r"lm_head.\1")]
    width = config.embedding_size or config.hidden_size
    if width != config.hidden_size:
        gain = (config.hidden_size / width) ** 0.5
        head += _projections(0, ["embed_projection.weight"], ["head_projection.weight"], borrowed, gain)
        entry.append(rename(r"word_emb\.emb_projs\.0", "embed_projection.weight", change=lambda weight: weight * gain))
    return entry, head


def _adaptive_rules(config: RelPosDecoderConfig, borrowed: Sequence[int], original: bool) -> tuple[list[Rule], list[Rule]]:
    """Return the rules of adaptive embeddings and head; the paper's code numbers the clusters of its head from the last one."""
    bounds = cluster_bounds(config)
    sizes, clusters = [end - start for start, end in bounds], range(len(bounds))
    tables = [f"embed_tokens.tables.{index}.weight" for index in clusters]
    projections = [f"embed_tokens.projections.{index}.weight" for index in clusters]
    heads = [f"lm_head.projections.{index}.weight" for index in clusters]

    def turned(weight: torch.Tensor) -> torch.Tensor:
        return weight.flip(0) if original else weight

    def cut(weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return weight.split(sizes)

    head = [rename(r"crit\.cluster_(\w+)", r"lm_head.clusters.\1", change=turned)]
    if config.div_val == 1:
        entry = [
            rename(r"word_emb\.emb_layers\.0\.weight", *tables, change=cut),
            rename(r"word_emb\.emb_projs\.0", *projections),
        ]
        outputs = [rf"lm_head.tables.{index}.\1" for index in clusters]
        head.append(rename(r"crit\.out_layers\.0\.(\w+)", *outputs, change=cut))
        return entry, head + _projections(0, projections, heads, borrowed)
    entry = [rename(rf"word_emb\.emb_layers\.{index}\.weight", table) for index, table in enumerate(tables)]
    entry += [rename(rf"word_emb\.emb_projs\.{index}", target) for index, target in enumerate(projections)]
    head.append(rename(r"crit\.out_layers\.(\d+)\.(\w+)", r"lm_head.tables.\1.\2"))
    for index in clusters:
        head += _projections(index, [projections[index]], [heads[index]], borrowed)
    return entry, head


def _projections(
    first: int, embeddings: Sequence[str], heads: Sequence[str], borrowed: Sequence[int], gain: float = 1.0
) -> list[Rule]:
    """Return the rules of the head's projections, which are stored the other way round.

    Args:
        first: number of the embeddings' projection, and of the first one of the head.
        embeddings: what the projection of the embeddings becomes.
        heads: what the projections of the head become.
        borrowed: numbers of those that are stored only once, as a projection of the embeddings.
        gain: factor on what the projection of the embeddings becomes.
    """
    numbered = list(enumerate(heads, first))
    rules = [
        rename(rf"crit\.out_projs\.{index}", target, change=lambda weight: weight.T)
        for index, target in numbered
        if index not in borrowed
    ]
    lent = [target for index, target in numbered if index in borrowed]
    if lent:
        own = [f"model.{name}" for name in embeddings]
        both = rf"word_emb\.emb_projs\.{first}"
        rules.append(rename(both, *own, *lent, change=lambda weight: [weight * gain] * len(own) + [weight.T] * len(lent)))
    return rules


def _borrowed(settings: Settings, weights: Weights) -> list[int]:
    """Return projections of the head that are tied to those of the embeddings, and stored there alone."""
    tied = [index for index, shared in enumerate(settings("tie_projs", [])) if shared]
    has_head = any(name.startswith("crit.") for name in weights)
    return [index for index in tied if has_head and f"crit.out_projs.{index}" not in weights]
