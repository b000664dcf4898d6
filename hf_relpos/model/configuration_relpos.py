"""Configurations: the position scheme is one field, and combinations without meaning are refused here with the reason."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from typing import ClassVar
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

from .adaptive_softmax import check_clusters
from .configuration_changes import merge_fields
from .configuration_checks import check_numbers
from .configuration_checks import complete_heads
from .configuration_checks import exact_fields
from .configuration_checks import refuse_misspelled
from .package_version import VERSION
from .package_version import warn_if_newer
from .parallel_plans import cut_layers
from .peft_targets import register_peft_targets
from .scheme_registry import check_schemes
from .scheme_registry import in_order
from .scheme_registry import layer_schemes
from .scheme_registry import scheme_class


def auto_map(family: str, heads: tuple[str, ...], suffix: str = "") -> dict[str, str]:
    """Return the `auto_map` of a family: its configuration, `AutoModel` and every head, so that any head loads from any folder.

    Args:
        family: what the names of its classes begin with.
        heads: what the names of its heads end with.
        suffix: what the names of its two files end with.
    """
    configuration, modeling = f"configuration_relpos{suffix}", f"modeling_relpos{suffix}"
    auto = {
        "MaskedLM": "AutoModelForMaskedLM",
        "CausalLM": "AutoModelForCausalLM",
        "PermutationLM": "AutoModelForPreTraining",
        "ConditionalGeneration": "AutoModelForSeq2SeqLM",
    }
    entries = {"AutoConfig": f"{configuration}.{family}Config", "AutoModel": f"{modeling}.{family}Model"}
    return entries | {auto.get(head, f"AutoModelFor{head}"): f"{modeling}.{family}For{head}" for head in heads}


@strict
class RelPosConfig(PreTrainedConfig):
    r"""
    The fields that all families have in common. Use [`RelPosEncoderConfig`], [`RelPosDecoderConfig`] or [`RelPosSeq2SeqConfig`].

    Args:
        vocab_size (`int`): number of tokens.
        hidden_size (`int`): width of the model.
        num_hidden_layers (`int`): number of layers.
        num_attention_heads (`int`): number of attention heads.
        num_key_value_heads (`int`, *optional*): number of key and value heads; as many as attention heads by default.
        head_dim (`int`, *optional*): size of a head; `hidden_size / num_attention_heads` by default.
        intermediate_size (`int`, *optional*): width of the feed-forward layers; four times `hidden_size` by default.
        hidden_act (`str`): activation of the feed-forward layers.
        gated_mlp (`bool`): multiply the activation by a second projection, as Llama and T5 1.1 do.
        hidden_dropout (`float`): dropout of embeddings and of the output of each sub-layer.
        attention_dropout (`float`): dropout of attention probabilities.
        norm_position (`"pre"` or `"post"`): normalise the input of each sub-layer, or the sum after it.
        final_norm (`bool`): with `norm_position="pre"`, normalise the output of the last layer too. Transformer-XL's code does not.
        norm_type (`"layer_norm"` or `"rms_norm"`): how it is normalised.
        layer_norm_eps (`float`): epsilon of the normalisation.
        embedding_norm (`bool` or `"before_projection"`): normalise the embeddings, as BERT and BLOOM do; before the projection
            from `embedding_size`, which then has a bias, as in RoFormer, ALBERT and ELECTRA.
        embedding_size (`int`, *optional*): width of the embeddings when it is not `hidden_size`.
        scale_embedding (`bool`, *optional*): multiply the embeddings by the root of their size; by default only for
            `sinusoidal`, whose paper does so.
        type_vocab_size (`int`): number of token types; 0 for none.
        parallel_residual (`bool`): attention and feed-forward read the same input, as GPT-NeoX does.
        attention_bias, mlp_bias, norm_bias (`bool`): whether these layers have a bias.
        initializer_range (`float`): standard deviation of the initial weights.
        max_position_embeddings (`int`): the length that the model is made for. It is a bound, the number of learned positions, for
            `learned_absolute` only: with other schemes the attribute cannot be read (`trained_length` gives it).
        tie_word_embeddings (`bool`): share the embeddings with the language-model head.
        position_scheme (`str` or `list[str]`): one scheme for all layers, or one a layer; `rope` or `xpos` joins one that adds
            a number per distance to the scores, as in `"rope+alibi"`.
        position_parameters (`dict`): the scheme's own parameters; with a list or a combination, a dict for each scheme name.
        share_positions (`"layer"` or `"model"`): each layer owns its position parameters, or one set serves the stack.
        attention_path (`"auto"`, `"dense"` or `"blockwise"`): how `sdpa` attends with score terms: block by block in memory linear in
            the length, or with one dense bias; by default blockwise wherever it can and pays.
        position_ids_mark_documents (`bool`): in a pass without attention mask, cache and memory, `position_ids` that begin anew
            at 0 begin a document, as in transformers' own models: nothing before it is seen. False: they only number tokens.
        classifier_dropout (`float`, *optional*): dropout before a classification head; `hidden_dropout` by default.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values", "memory"]
    causal: ClassVar[bool] = False
    family_auto_map: ClassVar[dict[str, str]] = {}
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {"layers.*": "free_full_weight"}
    """What FSDP2 gathers on its own; the rest with the root: embeddings, norm and schemes, whose terms are weights themselves."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    gated_mlp: bool = False
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    norm_position: Literal["pre", "post"] = "pre"
    final_norm: bool = True
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    layer_norm_eps: float = 1e-5
    embedding_norm: bool | Literal["before_projection"] = False
    embedding_size: int | None = None
    scale_embedding: bool | None = None
    type_vocab_size: int = 0
    parallel_residual: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = True
    initializer_range: float = 0.02
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    position_scheme: str | list[str] = "rope"
    position_parameters: dict[str, Any] | None = None
    share_positions: Literal["layer", "model"] = "layer"
    attention_path: Literal["auto", "dense", "blockwise"] = "auto"
    position_ids_mark_documents: bool = True
    classifier_dropout: float | int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        warn_if_newer(kwargs.pop("hf_relpos_version", None))
        check_numbers(vars(self))
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is unknown; the activations are: {', '.join(ACT2FN)}")
        complete_heads(self)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.position_parameters is None:
            self.position_parameters = {}
        if self.parallel_residual and self.norm_position == "post":
            raise ValueError("parallel_residual=True needs norm_position='pre': both sub-layers read one normalised input")
        self._check_positions()
        foreign = {field.name for family in RelPosConfig.__subclasses__() for field in fields(family)}
        refuse_misspelled(self, kwargs, foreign)
        kwargs.pop("auto_map", None)
        super().__post_init__(**kwargs)
        self.auto_map = dict(self.family_auto_map)

    def _check_positions(self) -> None:
        """Complete what depends on the scheme, and refuse schemes, parameters and combinations without meaning."""
        self.position_scheme = in_order(self.position_scheme)
        if self.scale_embedding is None:
            self.scale_embedding = any(scheme_class(name).scales_embeddings for name in layer_schemes(self))
        check_schemes(self)

    def stacks(self) -> tuple["RelPosConfig", ...]:
        """Return the configuration of each stack of layers: this one."""
        return (self,)

    def all_schemes(self) -> list[str]:
        """Return the names of the schemes of all layers."""
        return layer_schemes(self)

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """Return how tensor parallelism cuts the layers; the model adds its other matrices."""
        return cut_layers(self.gated_mlp)

    @property
    def trained_length(self) -> int:
        """Return the `max_position_embeddings` as given and saved, whether they are a bound or not."""
        return vars(self)["max_position_embeddings"]

    def __getattribute__(self, name: str) -> Any:
        """Hide `max_position_embeddings` where no scheme is bounded by them, as if the model had none, like T5 and BLOOM.

        The length warning of `generate`, lm-eval's window and sentence-transformers' cut read them as the longest input. A missing
        attribute is the only answer that all three take for no bound: None breaks sentence-transformers, -1 breaks `generate`.
        """
        if name == "max_position_embeddings" and not any(scheme_class(scheme).bounded for scheme in self.all_schemes()):
            raise AttributeError(
                f"no max_position_embeddings: position_scheme={self.position_scheme!r} has no bound; the length that the model was "
                "made for is config.trained_length"
            )
        return super().__getattribute__(name)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Compare families as transformers does, by all that they hold: a dataclass compares by reading each field."""
        super().__init_subclass__(**kwargs)
        cls.__eq__ = PreTrainedConfig.__eq__

    def __iter__(self) -> Iterator[str]:
        """Go through the names of what can be read."""
        return (name for name in super().__iter__() if hasattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the version of this code. PEFT asks for them before it looks for layers to tune, so it is told those."""
        register_peft_targets(self.model_type)
        return super().to_dict() | {"hf_relpos_version": VERSION}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read what was saved; fields given beside it, as by `from_pretrained`, are checked and completed as new ones are.

        So a saved field that was derived follows them: `head_dim` the number of heads, `sliding_window` the memory, and so on
        (`configuration_changes.py`). With another `position_scheme`, the parameters of schemes that are left stay.
        """
        own = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        given = exact_fields(cls, {name: kwargs.pop(name) for name in own & kwargs.keys()})
        return super().from_dict(merge_fields(cls, config_dict, given) if given else config_dict, **kwargs)


@strict
class RelPosEncoderConfig(RelPosConfig):
    r"""
    Configuration of a bidirectional encoder. The common fields are those of [`RelPosConfig`].

    Args:
        classifier_pooling (`"cls"` or `"mean"`): what a sequence classifier reads: the first token or the mean of all.
        mem_len (`int`): tokens of segment memory; 0 turns it off.
        reuse_len (`int`, *optional*): how many of a segment's first tokens enter the memory, for segments that overlap as
            XLNet's do: the next one begins `reuse_len` tokens later. By default all.
        query_stream (`bool`): whether there is a `mask_emb` for the query stream of XLNet, which predicts the tokens that
            `target_mapping` names. The head for permutation language models turns it on, other heads turn it off.
    """

    model_type = "relpos_encoder"
    family_auto_map: ClassVar[dict[str, str]] = auto_map(
        "RelPosEncoder",
        (
            "MaskedLM",
            "PermutationLM",
            "SequenceClassification",
            "TokenClassification",
            "QuestionAnswering",
            "MultipleChoice",
        ),
    )

    classifier_pooling: Literal["cls", "mean"] = "mean"
    mem_len: int = 0
    reuse_len: int | None = None
    query_stream: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.reuse_len is not None and not self.mem_len:
            raise ValueError(f"reuse_len={self.reuse_len} needs a memory: mem_len=0")
        super().__post_init__(**kwargs)
        if self.query_stream:
            self.require_query_stream()

    def require_query_stream(self) -> None:
        """Turn the query stream on, or refuse it by a ValueError for schemes that it cannot have."""
        for name in dict.fromkeys(layer_schemes(self)):
            if scheme_class(name).acts_on_embeddings:
                raise ValueError(
                    f"position_scheme {name!r} is refused for a query stream: it puts positions into the embeddings, but all "
                    "targets begin from one vector, which must be told where each stands by the attention"
                )
        self.query_stream = True


@strict
class RelPosDecoderConfig(RelPosConfig):
    r"""
    Configuration of a causal decoder. The common fields are those of [`RelPosConfig`].

    Args:
        use_cache (`bool`): return a key/value cache when the model generates.
        mem_len (`int`): tokens of segment memory; 0 turns it off.
        sliding_window (`int`, `None` or `"auto"`): keys that a query sees, itself included; None for all of the memory and the
            own segment (the original Transformer-XL). By default `mem_len + 1` with memory, else None.
        detach_memory (`bool`): cut the memory off from the graph of the segment that made it.
        lm_head_bias (`bool`): whether the language-model head has a bias.
        lm_head_dense (`bool`): a dense layer, `hidden_act` and a norm before the language-model head, as in BERT.
        cutoffs (`list[int]`, *optional*): first tokens of the second and later clusters of adaptive embeddings and softmax,
            as in Transformer-XL; the logits are then log-probabilities, and None in training when there are targets.
        div_val (`int`): by how much each cluster's embeddings are narrower than those of the cluster before.
    """

    model_type = "relpos_decoder"
    causal: ClassVar[bool] = True
    family_auto_map: ClassVar[dict[str, str]] = auto_map(
        "RelPosDecoder", ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
    )

    use_cache: bool = True
    mem_len: int = 0
    sliding_window: int | None | Literal["auto"] = "auto"
    detach_memory: bool = True
    layer_types: list[str] | None = None
    lm_head_bias: bool = False
    lm_head_dense: bool = False
    cutoffs: list[int] | None = None
    div_val: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        check_numbers(vars(self))
        check_clusters(self)
        if self.sliding_window == "auto":
            self.sliding_window = self.mem_len + 1 if self.mem_len else None
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        self.layer_types = [kind] * self.num_hidden_layers
        super().__post_init__(**kwargs)
