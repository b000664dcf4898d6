"""Configuration of encoder-decoders: the fields of all families, and schemes for each of the two stacks."""

from dataclasses import fields
from typing import Any
from typing import ClassVar
from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_relpos import RelPosConfig
from .configuration_relpos import RelPosDecoderConfig
from .configuration_relpos import RelPosEncoderConfig
from .configuration_relpos import auto_map
from .scheme_registry import in_order

_REFUSED = {
    "mem_len": "segment memory goes on with one text, but each pair of source and target is a text of its own",
    "sliding_window": "generate would cut the cache of the source to it too",
    "position_ids_mark_documents": "documents of the source would have to be paired with those of the target",
    "parallel_residual": "attention to the source would have to read what attention to the target has not written yet",
}
"""Fields of other families that have no meaning here, with the reason."""


@strict
class RelPosSeq2SeqConfig(RelPosConfig):
    r"""
    Configuration of an encoder-decoder. The common fields are those of [`RelPosConfig`] and hold for both stacks;
    `num_hidden_layers` counts the layers of the encoder. Attention to the source has no position scheme, and scales
    its scores as the decoder's scheme does.

    Args:
        num_decoder_layers (`int`, *optional*): number of layers of the decoder; as many as the encoder's by default.
        encoder_position_scheme, decoder_position_scheme (`str` or `list[str]`, *optional*): the scheme of one stack;
            `position_scheme` with `position_parameters` by default.
        encoder_position_parameters, decoder_position_parameters (`dict`, *optional*): parameters of that scheme; by
            default `position_parameters`, if it is the same scheme.
        use_cache (`bool`): return a key/value cache when the model generates.
        decoder_start_token_id (`int`, *optional*): what the decoder begins with; `pad_token_id` by default, else
            `bos_token_id`.
        scale_head (`bool`): divide what enters the language-model head by the root of `hidden_size`, as T5 1.0 does.
    """

    model_type = "relpos_seq2seq"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *RelPosConfig.keys_to_ignore_at_inference,
        "encoder_last_hidden_state",
    ]
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {}  # that of each stack says it
    family_auto_map: ClassVar[dict[str, str]] = auto_map(
        "RelPosSeq2Seq", ("ConditionalGeneration", "SequenceClassification"), "_seq2seq"
    )

    is_encoder_decoder: bool = True
    num_decoder_layers: int | None = None
    encoder_position_scheme: str | list[str] | None = None
    encoder_position_parameters: dict[str, Any] | None = None
    decoder_position_scheme: str | list[str] | None = None
    decoder_position_parameters: dict[str, Any] | None = None
    use_cache: bool = True
    decoder_start_token_id: int | None = None
    scale_head: bool = False
    position_ids_mark_documents: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        own = ("parallel_residual", "position_ids_mark_documents")
        given = {name: getattr(self, name) for name in own} | kwargs
        for name, reason in _REFUSED.items():
            if given.get(name):
                raise ValueError(f"{name}={given[name]!r} is refused for an encoder-decoder: {reason}")
            kwargs.pop(name, None)
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_hidden_layers
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id if self.pad_token_id is None else self.pad_token_id
        super().__post_init__(**kwargs)

    @classmethod
    def t5(cls, version: Literal["1.0", "1.1"] = "1.0", **given: Any) -> "RelPosSeq2SeqConfig":
        """Return a configuration with the geometry of T5 (arXiv 1910.10683), of which any field may be given anew.

        Args:
            version: of the released models: "1.0" has ReLU and a head tied to the embeddings; "1.1", which mT5 and
                Flan-T5 follow, has a gated GELU and a head of its own.
            given: fields of the configuration; the sizes are not those of a T5.
        """
        if version not in ("1.0", "1.1"):
            raise ValueError(f"version={version!r} is not one of the released geometries: '1.0', '1.1'")
        old = version == "1.0"
        geometry = {
            "position_scheme": "t5",
            "share_positions": "model",
            "norm_type": "rms_norm",
            "layer_norm_eps": 1e-6,
            "hidden_act": "relu" if old else "gelu_new",
            "gated_mlp": not old,
            "tie_word_embeddings": old,
            "scale_head": old,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }
        return cls(**{**geometry, **given})

    def stacks(self) -> tuple[RelPosConfig, ...]:
        """Return the configurations of the encoder and of the decoder, made from the fields of this one."""
        names = {field.name for field in fields(self)} & set(RelPosConfig.__annotations__)
        common = {name: vars(self)[name] for name in names}
        common["pad_token_id"] = None  # its embedding is learned, because the decoder may begin with it
        common["attn_implementation"] = getattr(self, "_attn_implementation_internal", None)

        def positions(side: str) -> dict[str, Any]:
            return {name: getattr(self, f"{side}_{name}") for name in ("position_scheme", "position_parameters")}

        own = {"num_hidden_layers": self.num_decoder_layers, "use_cache": self.use_cache, "type_vocab_size": 0}
        return (
            RelPosEncoderConfig(**{**common, **positions("encoder")}),
            RelPosDecoderConfig(**{**common, **positions("decoder"), **own}),
        )

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """Return how tensor parallelism cuts the layers of both stacks; attention to the source as attention to the own tokens."""
        own = super().base_model_tp_plan
        cross = {name.replace("attention", "cross_attention"): style for name, style in own.items() if "attention" in name}
        stacks = {"encoder": own, "decoder": own | cross}
        return {f"{stack}.{name}": style for stack, plan in stacks.items() for name, style in plan.items()}

    def all_schemes(self) -> list[str]:
        """Return the names of the schemes of all layers of both stacks."""
        sides = (self.encoder_position_scheme, self.decoder_position_scheme)
        return [name for names in sides for name in ([names] if isinstance(names, str) else names or [])]

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> RelPosConfig:
        """Return this configuration, or the one of a single stack: the decoder's is what a cache is built from."""
        return self if decoder == encoder else self.stacks()[bool(decoder)]

    def _check_positions(self) -> None:
        """Complete the schemes of both stacks; the configuration of each then refuses what it cannot do."""
        self.position_scheme = in_order(self.position_scheme)
        alike = []
        for side in ("encoder", "decoder"):
            scheme, parameters = getattr(self, f"{side}_position_scheme"), getattr(self, f"{side}_position_parameters")
            scheme = in_order(self.position_scheme if scheme is None else scheme)
            alike.append(scheme == self.position_scheme)
            common = self.position_parameters if alike[-1] else {}
            setattr(self, f"{side}_position_scheme", scheme)
            setattr(self, f"{side}_position_parameters", common if parameters is None else parameters)
        if self.position_parameters and not any(alike):
            raise ValueError(
                f"position_parameters={self.position_parameters!r} belong to position_scheme={self.position_scheme!r}, which no "
                "stack uses; give encoder_position_parameters or decoder_position_parameters"
            )
        self.stacks()
