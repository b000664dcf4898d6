"""Weights and conventions that all models share, and a stack of embeddings, position schemes and layers."""

from copy import deepcopy
from typing import Any
from typing import ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from .adaptive_softmax import AdaptiveEmbedding
from .adaptive_softmax import embedding_width
from .attention import RelPosAttention
from .attention_kernels import KERNELS
from .attention_kernels import check_kernels
from .configuration_relpos import RelPosConfig
from .forward_keywords import check_keywords
from .head_losses import check_labels
from .head_losses import count_targets
from .hub_card import HubCardMixin
from .memory_projections import MemoryProjections
from .parallel_plans import ParallelPlans
from .position_builder import build_positions
from .position_documents import find_document_starts
from .position_documents import whole_numbers
from .position_ids_cache import remember_position_ids
from .position_tables import DistanceTables
from .positions import Positions
from .positions import reads_freely
from .scheme_base import PositionScheme
from .scheme_modules import PositionSchemes
from .scheme_registry import layer_schemes
from .scheme_registry import probabilities_reason
from .scheme_registry import scheme_class
from .segment_memory import SegmentMemory
from .segment_memory import check_memory
from .transformer_layer import RelPosLayer
from .transformer_layer import SecondInput
from .transformer_layer import make_norm
from .weight_loading import WeightLoading
from .weight_loading import rename_numbered


class RelPosPreTrainedModel(HubCardMixin, WeightLoading, ParallelPlans, PreTrainedModel):
    """Weights, backends and conventions that all models share."""

    config: RelPosConfig
    config_class = RelPosConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RelPosLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": RelPosLayer, "attentions": RelPosAttention}
    query_stream: ClassVar[bool | None] = None
    """Whether the model has a query stream; None where the configuration says so."""

    def __init__(self, config: Any) -> None:
        super().__init__(self.fit_config(config))

    @classmethod
    def fit_config(cls, config: Any) -> Any:
        """Return the configuration that a model of this class has: the caller's own, or a changed copy of it.

        Raises:
            ValueError: the configuration of another family, most of whose fields would fit.
        """
        own: Any = cls.config_class
        if getattr(config, "model_type", None) != own.model_type:
            raise ValueError(
                f"{cls.__name__} takes a {own.__name__} (model_type={own.model_type!r}), got {type(config).__name__}"
            )
        if cls.query_stream is None or cls.query_stream == getattr(config, "query_stream", cls.query_stream):
            return config
        config = deepcopy(config)
        if cls.query_stream:
            config.require_query_stream()
        config.query_stream = cls.query_stream
        return config

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill one module; transformers skips those without weights of their own, so a gain stands on the projection itself."""
        super()._init_weights(module)
        if isinstance(module, PositionScheme):
            module.initialize(self.config.initializer_range)
        elif isinstance(module, RelPosStack) and module.mask_emb is not None:
            init.normal_(module.mask_emb, std=self.config.initializer_range)
        elif (gain := getattr(module, "init_gain", 1.0)) != 1.0:
            init.normal_(module.get_parameter("weight"), std=self.config.initializer_range * gain)

    def _flex_attn_can_dispatch(self, is_init_check: bool = False) -> bool:
        reason = next(filter(None, map(probabilities_reason, self.config.stacks())), None)
        if reason is not None:
            raise ValueError(f"attn_implementation='flex_attention' cannot do this scheme: {reason}; use 'sdpa' or 'eager'")
        return super()._flex_attn_can_dispatch(is_init_check)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention != KERNELS:
            return super().get_correct_attn_implementation(requested_attention, is_init_check)
        check_kernels(self.config)
        return KERNELS

    @torch.no_grad()
    def attention_plan(self, length: int, cached: int = 0) -> list[dict[str, Any]]:
        """Return how each layer attends to its own tokens, as it would in a forward pass in the current mode.

        Args:
            length: number of tokens, without padding.
            cached: number of tokens before them, in a memory or cache.

        Returns:
            For each layer its `stack`, number, `scheme`, and `path`: `eager`, `flex_attention`, or under `sdpa` `fused` (nothing is
            added to the scores), `blockwise` (memory linear in the length) or `dense` (one bias of all pairs).

        Raises:
            ValueError: a number of tokens that is none.
        """
        for name, given, least in (("length", length, 1), ("cached", cached, 0)):
            if not isinstance(given, int) or isinstance(given, bool) or given < least:
                raise ValueError(f"{name}={given!r} is not allowed: a whole number of tokens, at least {least}")
        plan = []
        for name, stack in self.named_modules():
            if not isinstance(stack, RelPosStack):
                continue
            config, like = stack.config, stack.embed_example()
            seen = (cached, cached + length, 0) if config.causal and cached else None
            window = getattr(config, "sliding_window", None)
            slots = cached if not config.causal and getattr(config, "mem_len", 0) else 0
            positions = build_positions(
                (1, length), like, causal=config.causal, window=window, cached=seen, memory_slots=slots
            )
            tables = DistanceTables(positions)
            named = zip(layer_schemes(config), stack.schemes_of_layers(), strict=True)
            for number, (scheme_name, scheme) in enumerate(named):
                attention: Any = stack.layers[number].attention
                gates = like.new_zeros(1, config.num_attention_heads, cached + length) if scheme.gates() else None
                path = attention.path(attention.score_terms(scheme.call, tables, gates), positions)
                found = {"layer": number, "scheme": scheme_name, "path": path}
                plan.append({"stack": name or "model", **found})
        return plan

    def _token_loss(
        self, logits: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, num_items_in_batch: Any = None, **shifted: Any
    ) -> torch.Tensor:
        """Return the loss of a token for each place, over the targets that are not -100; 0 without any.

        Args:
            logits: `(batch, sequence, vocab_size)`.
            labels: `(batch, sequence)` tokens, which `loss_function` shifts if it is that of a causal model.
            targets: `(batch, sequence)` what each place is to predict.
            num_items_in_batch: by what the sum is divided; None for the number of targets.
            shifted: `shift_labels`, where the caller gave targets instead of labels.
        """
        check_labels(targets, tuple(logits.shape[:-1]), logits.shape[-1])
        total = count_targets(targets, num_items_in_batch)
        given = {name: part.contiguous() for name, part in {"labels": labels, **shifted}.items()}  # a slice of a table is not
        return self.loss_function(logits=logits, vocab_size=self.config.vocab_size, num_items_in_batch=total, **given)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize as transformers does; refuse adaptive embeddings, whose clusters are made for one vocabulary."""
        if getattr(self.config, "cutoffs", None):
            raise ValueError(f"embeddings with cutoffs={self.config.cutoffs} cannot be resized")
        return super().resize_token_embeddings(*args, **kwargs)


class RelPosStack(RelPosPreTrainedModel):
    """Embeddings, position schemes and layers: what the encoder and the decoder share."""

    layer_class: type[RelPosLayer] = RelPosLayer

    def __init__(self, config: RelPosConfig) -> None:
        super().__init__(config)
        width, adaptive = embedding_width(config), getattr(config, "cutoffs", None)
        plain = (config.vocab_size, width, config.pad_token_id)
        self.embed_tokens = AdaptiveEmbedding(config) if adaptive else nn.Embedding(*plain)
        self.norm_first = config.embedding_norm == "before_projection"
        same = width == config.hidden_size
        self.embed_projection = None if same else nn.Linear(width, config.hidden_size, bias=self.norm_first)
        normed = width if self.norm_first else config.hidden_size
        self.embed_norm = make_norm(config, normed) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.hidden_dropout)
        asks = getattr(config, "query_stream", False)
        self.mask_emb = nn.Parameter(torch.empty(config.hidden_size)) if asks else None
        types = 0 if any(scheme_class(name).reads_token_types for name in layer_schemes(config)) else config.type_vocab_size
        self.embed_types = nn.Embedding(types, width) if types else None
        self.position_schemes = PositionSchemes(config)
        layers = [self.layer_class(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        for layer, scheme in zip(layers, self.schemes_of_layers(), strict=True):
            layer.set_init_gains(scheme.query_gain(), config.num_hidden_layers)
        self.norm = make_norm(config, config.hidden_size) if config.norm_position == "pre" and config.final_norm else None
        self.gradient_checkpointing = False
        self.register_load_state_dict_pre_hook(rename_numbered)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def _embed_ids(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Return token embeddings `(batch, sequence, embedding_size)` of exactly one of the two inputs."""
        if inputs_embeds is not None and input_ids is None:
            return inputs_embeds
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if not torch.compiler.is_compiling():
            self._check_ids(input_ids)
        return self.embed_tokens(input_ids)

    @torch.no_grad()
    def embed_example(self) -> torch.Tensor:
        """Return a token's embedding, `(1, 1, width)`: it is of the device and dtype that the stack computes in.

        Weights do not tell: they may be of bytes, or on no device while nothing calls for them.
        """
        called_for = any(hasattr(module, "_hf_hook") for module in self.modules())
        device = "cpu" if self.device.type == "meta" and called_for else self.device
        return self.embed_tokens(torch.zeros(1, 1, dtype=torch.long, device=device))

    def _check_ids(self, input_ids: Any) -> None:
        """Refuse what is no batch of token ids."""
        if not whole_numbers(input_ids) or input_ids.dim() != 2:
            found = f"{tuple(input_ids.shape)} {input_ids.dtype}" if isinstance(input_ids, torch.Tensor) else type(input_ids)
            raise ValueError(f"input_ids must be a tensor of integers (batch, sequence), found {found}")
        if input_ids.shape[1] == 0:
            raise ValueError(f"input_ids of shape {tuple(input_ids.shape)} hold no token: at least one is needed")
        if not input_ids.numel() or not reads_freely(input_ids):
            return
        lowest, highest = int(input_ids.min()), int(input_ids.max())
        if lowest < 0 or highest >= self.config.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"token id {wrong} is beyond vocab_size={self.config.vocab_size}: 0 to {self.config.vocab_size - 1}"
            )

    def _check_memory(self, memory: SegmentMemory | None, embeds: torch.Tensor) -> SegmentMemory | None:
        """Return the memory if it fits this model and the batch of `embeds`; else raise a ValueError."""
        if memory is None:
            return None
        if self.config.mem_len == 0:
            raise ValueError("memory was given to a model with mem_len=0: set mem_len to use segment memory")
        like = embeds.new_empty(1, 1, self.config.hidden_size)
        return check_memory(memory, embeds.shape[0], self.config.num_hidden_layers, self.config.mem_len, like)

    def _document_starts(
        self,
        embeds: torch.Tensor,
        reset_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        keywords: dict[str, Any],
        alone: bool,
    ) -> torch.Tensor | None:
        """Return the `reset_mask` of a pass over `embeds`, however the caller marked documents (`position_documents.py`).

        Position ids mark documents only if the pass is `alone`, without an attention mask, cache and memory. The `keywords` of
        packing collators are taken out.
        """
        marking = position_ids if alone and self.config.position_ids_mark_documents else None
        return find_document_starts((embeds.shape[0], embeds.shape[1]), reset_mask, marking, keywords, embeds.device)

    def _enter(self, embeds: torch.Tensor, positions: Positions, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        """Return the input of the first layer, `(batch, sequence, hidden_size)`."""
        hidden_states = embeds * embeds.shape[-1] ** 0.5 if self.config.scale_embedding else embeds
        if self.embed_types is not None:
            types = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
            hidden_states = hidden_states + self.embed_types(types if token_type_ids is None else token_type_ids)
        if self.norm_first and self.embed_norm is not None:
            hidden_states = self.embed_norm(hidden_states)
        if self.embed_projection is not None:
            hidden_states = self.embed_projection(hidden_states)
        hidden_states = self.schemes_of_layers()[0].call("embed", hidden_states, positions.in_document)
        return self.dropout(hidden_states if self.embed_norm is None or self.norm_first else self.embed_norm(hidden_states))

    def _run_layers(
        self,
        hidden_states: torch.Tensor,
        positions: Positions,
        memory: SegmentMemory | None = None,
        cache: Cache | None = None,
        force_eager: bool = False,
        beside: SecondInput | None = None,
        remembered: MemoryProjections | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run all layers; returns the last hidden states `(batch, sequence, hidden_size)` and what entered each layer.

        With a query stream `beside`, its last hidden states `(batch, predict, hidden_size)` are returned. Of a memory whose keys and
        values are `remembered`, the hidden states are not read.
        """
        tables = DistanceTables(positions, cache, None if remembered is None else remembered.tables)
        home = hidden_states.device
        prepared, second = self.prepare(tables), self._second_inputs(beside)
        states: Any = None if beside is None else beside.states
        entered, given = [], {} if remembered is None else {"remembered": remembered}
        read = None if remembered is not None and remembered.before is not None else memory
        depth = self.config.num_hidden_layers  # lowered for a while where generation drafts with the first layers alone
        layers = list(zip(self.layers, self.schemes_of_layers(), strict=True))[:depth]
        for index, (layer, scheme) in enumerate(layers):
            entered.append(hidden_states.to(home))
            hidden_states = layer(
                hidden_states,
                None if read is None else read.hidden[:, index],
                states,
                second.get(scheme.name),
                scheme=scheme.call,
                tables=tables,
                prepared=prepared[scheme.name],
                cache=cache,
                force_eager=force_eager,
                **given,
            )
            if beside is not None and beside.seen is not None:
                hidden_states, states = hidden_states
        remember_position_ids(cache, positions, depth)
        last = hidden_states if beside is None or beside.seen is None else states
        return last if self.norm is None else self.norm(last), entered

    def _second_inputs(self, beside: SecondInput | None) -> dict[str, dict[str, Any]]:
        """Return what layers are given with the states of a second input, by the name of their scheme."""
        if beside is None:
            return {}
        tables = DistanceTables(beside.positions)
        if beside.seen is None:
            return {scheme.name: {"tables": tables} for scheme in self.schemes_of_layers()}
        given = {"tables": tables, "seen": beside.seen}
        return {name: {**given, "prepared": prepared} for name, prepared in self.prepare(tables).items()}

    def schemes_of_layers(self) -> list[PositionScheme]:
        """Return the scheme of each layer."""
        return self.position_schemes.for_layers()

    def prepare(self, tables: DistanceTables) -> dict[str, Any]:
        """Return what the layers of one scheme share in one pass to encode queries and keys, by name; prepare distances too."""
        schemes: dict[str, Any] = {scheme.name: scheme for scheme in reversed(self.schemes_of_layers())}
        tables.prepare(schemes.values())
        return {name: scheme.call("prepare", tables.positions) for name, scheme in schemes.items()}

    def _wants_attentions(self, kwargs: dict[str, Any]) -> bool:
        """Return whether probabilities are asked for, which only the eager path gives; refuse keywords that would be forgotten."""
        check_keywords(f"{type(self).__name__}.forward", kwargs, self.config.causal)
        wanted = kwargs.get("output_attentions")
        return bool(self.config.output_attentions if wanted is None else wanted)
