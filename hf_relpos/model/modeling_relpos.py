"""Layers, stacks and heads of the relative-position models."""

from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import cast

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_outputs import MultipleChoiceModelOutput
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils import ModelOutput
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .adaptive_softmax import AdaptiveHead
from .adaptive_softmax import embedding_width
from .adaptive_softmax import tied_tables
from .configuration_relpos import RelPosConfig
from .configuration_relpos import RelPosDecoderConfig
from .configuration_relpos import RelPosEncoderConfig
from .generation_relpos import MemoryGenerationMixin
from .position_builder import build_positions
from .position_ids_cache import number_all_keys
from .position_two_stream import QueryStream
from .position_two_stream import check_perm_mask
from .position_two_stream import content_positions
from .position_two_stream import find_targets
from .position_two_stream import query_positions
from .positions import Positions
from .segment_memory import SegmentMemory
from .segment_memory import next_memory
from .transformer_layer import make_norm
from .transformer_stack import RelPosPreTrainedModel
from .transformer_stack import RelPosStack

logger = logging.get_logger(__name__)


def check_family(model: RelPosPreTrainedModel, config: Any) -> None:
    """Refuse, by a ValueError, the configuration of another family: most of its fields would fit."""
    own: Any = model.config_class
    if getattr(config, "model_type", None) != own.model_type:
        raise ValueError(
            f"{type(model).__name__} takes a {own.__name__} (model_type={own.model_type!r}), got {type(config).__name__}"
        )


def check_labels(labels: torch.Tensor, logits: torch.Tensor) -> None:
    """Refuse, by a ValueError, labels that are not one whole number for each position of `logits (batch, sequence, classes)`."""
    expected = tuple(logits.shape[:2])
    if tuple(labels.shape) != expected or labels.is_floating_point():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} are refused: expected whole numbers of shape {expected}"
        )


@dataclass
class RelPosModelOutput(ModelOutput):
    """Output of an encoder or a decoder without a head.

    Attributes:
        last_hidden_state: `(batch, sequence, hidden_size)`; of the targets, `(batch, predict, hidden_size)`, where there are any.
        cache: the key/value cache, when one is in use.
        memory: the segment memory after this segment, when `mem_len > 0` and no cache is in use.
        hidden_states, attentions: one tensor a layer, when asked for; with targets, two `attentions` a layer, of both streams.
    """

    last_hidden_state: torch.Tensor | None = None
    cache: Cache | None = None
    memory: SegmentMemory | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class RelPosCausalLMOutput(ModelOutput):
    """Output of a decoder with a language-model head: `loss` and `logits (batch, sequence, vocab_size)`, then as the model's."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: Cache | None = None
    memory: SegmentMemory | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class RelPosMaskedLMOutput(MaskedLMOutput):
    """Output of an encoder with a language-model head: `loss` and `logits (batch, sequence or predict, vocab_size)`, then as the model's."""

    memory: SegmentMemory | None = None


class RelPosEncoderModel(RelPosStack):
    """Bidirectional encoder without a head, with segment memory, and with a query stream where `query_stream` says so."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig

    def __init__(self, config: RelPosConfig) -> None:
        check_family(self, config)
        super().__init__(config)

    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        memory: SegmentMemory | None = None,
        reset_mask: torch.Tensor | None = None,
        perm_mask: torch.Tensor | None = None,
        target_mapping: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> RelPosModelOutput:
        """Encode `input_ids (batch, sequence)`.

        Args:
            input_ids: token ids; or `inputs_embeds (batch, sequence, embedding_size)` in their place.
            attention_mask: `(batch, sequence)` 1 for tokens, 0 for padding.
            position_ids: `(batch|1, sequence)` position numbers; by default tokens are counted. Without attention mask and
                memory, a 0 that follows a token begins a document (`position_documents.py`).
            token_type_ids: `(batch, sequence)` token types, when the model has any.
            memory: segment memory that an earlier forward returned.
            reset_mask: `(batch, sequence)` true on the first token of each packed document: nothing before it is seen.
            perm_mask: `(batch, query, key)` 1 where a token may not see another of the segment; each sees itself.
            target_mapping: `(batch, predict, sequence)` one-hot rows: the tokens to predict, by a query stream that sees
                what `perm_mask` lets it, itself included; rows of zeros pad.
        """
        embeds = self._embed_ids(input_ids, inputs_embeds)
        shape = (embeds.shape[0], embeds.shape[1])
        alone = attention_mask is None and memory is None
        reset_mask = self._document_starts(embeds, reset_mask, position_ids, kwargs, alone)
        force_eager = self._wants_attentions(kwargs)
        memory = self._check_memory(memory, embeds)
        positions = build_positions(
            shape,
            embeds,
            causal=False,
            attention_mask=attention_mask,
            position_ids=position_ids,
            reset_mask=reset_mask,
            memory_length=None if memory is None else memory.length,
            memory_slots=0 if memory is None else memory.slots,
        )
        if token_type_ids is not None:  # what is remembered is of type 0
            types = nn.functional.pad(token_type_ids, (positions.key.shape[1] - shape[1], 0))
            positions = replace(positions, token_types=types, query_types=token_type_ids)
        hidden = None if perm_mask is None else check_perm_mask(perm_mask, shape)
        queries = None if target_mapping is None else self._query_stream(positions, hidden, target_mapping, shape)
        seen = positions if hidden is None else content_positions(positions, hidden)
        hidden_states, entered = self._run_layers(
            self._enter(embeds, positions, token_type_ids), seen, memory, force_eager=force_eager, queries=queries
        )
        if mem_len := self.config.mem_len:
            valid, document = positions.query_valid, positions.query_document
            memory = next_memory(memory, entered, mem_len, valid, document, self.config.reuse_len).detach()
        return RelPosModelOutput(last_hidden_state=hidden_states, memory=memory)

    def _query_stream(
        self, positions: Positions, hidden: torch.Tensor | None, target_mapping: torch.Tensor, shape: tuple[int, int]
    ) -> QueryStream:
        """The targets before the first layer: all the same, only where they stand differs."""
        if self.mask_emb is None:
            raise ValueError("target_mapping was given to an encoder without a query stream: set query_stream=True")
        if hidden is None:
            raise ValueError("target_mapping needs a perm_mask: without one every target would see itself")
        targets, named = find_targets(target_mapping, shape)
        asking, seen = query_positions(positions, hidden, targets, named)
        states = self.dropout(self.mask_emb.expand(*targets.shape, -1))
        return QueryStream(states, asking, seen[..., None].to(states.dtype))


class RelPosDecoderModel(RelPosStack):
    """Causal decoder without a head, with segment memory and a key/value cache."""

    config: RelPosDecoderConfig
    config_class = RelPosDecoderConfig

    def __init__(self, config: RelPosConfig) -> None:
        check_family(self, config)
        super().__init__(config)

    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        memory: SegmentMemory | None = None,
        reset_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> RelPosModelOutput:
        """Decode `input_ids (batch, sequence)`.

        Args:
            input_ids: token ids; or `inputs_embeds (batch, sequence, embedding_size)` in their place.
            attention_mask: `(batch, cached + sequence)` 1 for tokens, 0 for padding; or a ready mask of four dimensions.
            position_ids: `(batch|1, sequence)` position numbers, whole and in any order; by default tokens are counted. A
                cache remembers those of its tokens; beside a memory, `(batch|1, mem_len + sequence)` number its slots first.
                Without attention mask, cache and memory, a 0 that follows a token begins a document, in a pass that then
                makes no cache (`position_documents.py`).
            cache: key/value cache of earlier tokens; `past_key_values` is its old name.
            use_cache: return a cache; by default what the configuration says, but a model with memory returns memory.
            memory: segment memory that an earlier forward returned.
            reset_mask: `(batch, sequence)` true on the first token of each document: nothing before it is seen; `seq_idx` and
                `cu_seq_lens_q` of transformers' packing collator mark documents too.
        """
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        config: Any = self.config  # what may be left out of it is complete by now
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[config.layer_types[0]]
        embeds = self._embed_ids(input_ids, inputs_embeds)
        batch, sequence = embeds.shape[:2]
        unasked = cache is None and use_cache is None
        cache = self._resolve_cache(cache, use_cache, memory, batch)
        alone = attention_mask is None and memory is None and (cache is None or unasked)
        reset_mask = self._document_starts(embeds, reset_mask, position_ids, kwargs, alone)
        if unasked and reset_mask is not None:
            cache = None  # packed documents are not continued token by token
        force_eager = self._wants_attentions(kwargs)
        memory = self._check_memory(memory, embeds)
        positions = build_positions(
            (batch, sequence),
            embeds,
            causal=True,
            window=config.sliding_window,
            attention_mask=attention_mask,
            position_ids=number_all_keys(cache, position_ids, (batch, sequence), len(self.layers)),
            reset_mask=reset_mask,
            cached=None if cache is None else (cache.get_seq_length(), *cache.get_mask_sizes(sequence, 0)),
            memory_length=None if memory is None else memory.length,
            memory_slots=0 if memory is None else memory.slots,
        )
        hidden_states, entered = self._run_layers(
            self._enter(embeds, positions, kwargs.get("token_type_ids")), positions, memory, cache, force_eager
        )
        if cache is None and self.config.mem_len:
            memory = next_memory(memory, entered, self.config.mem_len, positions.query_valid, positions.query_document)
            memory = memory.detach() if self.config.detach_memory else memory
        return RelPosModelOutput(last_hidden_state=hidden_states, cache=cache, memory=memory if cache is None else None)

    def _resolve_cache(
        self, cache: Cache | None, use_cache: bool | None, memory: SegmentMemory | None, batch: int
    ) -> Cache | None:
        """The cache of this pass, or None; a cache and a memory exclude each other."""
        if memory is not None and (cache is not None or use_cache):
            raise ValueError(
                "memory and a key/value cache exclude each other: model.memory_to_cache(memory) turns one into the other"
            )
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None or use_cache:
                logger.warning_once("use_cache=True is incompatible with gradient checkpointing: no cache is used")
            return None
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and self.config.mem_len == 0 and not self.training)
        if not use_cache:
            return None
        if cache is None:
            return DynamicCache(config=self.config)
        first = next((layer for layer in getattr(cache, "layers", []) if getattr(layer, "keys", None) is not None), None)
        if first is not None and first.keys.dim() == 4 and first.keys.shape[0] != batch:
            raise ValueError(f"the cache holds a batch of {first.keys.shape[0]}, the input a batch of {batch}")
        return cache


class RelPosDecoderForCausalLM(RelPosPreTrainedModel, MemoryGenerationMixin):
    """Decoder with a language-model head."""

    config: RelPosDecoderConfig
    config_class = RelPosDecoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RelPosDecoderConfig) -> None:
        check_family(self, config)
        super().__init__(config)
        self.model = RelPosDecoderModel(config)
        size = embedding_width(config)
        self.head_projection = None if size == config.hidden_size else nn.Linear(config.hidden_size, size, bias=False)
        if config.lm_head_dense:
            dense = nn.Linear(config.hidden_size, size)
            self.head_projection = nn.Sequential(dense, ACT2FN[config.hidden_act], make_norm(config, size))
        if config.cutoffs:
            self._tied_weights_keys = tied_tables(config)
        plain = (size, config.vocab_size, config.lm_head_bias)
        self.lm_head = AdaptiveHead(config) if config.cutoffs else nn.Linear(*plain)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        memory: SegmentMemory | None = None,
        reset_mask: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> RelPosCausalLMOutput:
        """Decode and predict the next tokens; the arguments of [`RelPosDecoderModel`] and two more.

        Args:
            labels: `(batch, sequence)` unshifted targets, -100 where there is none; `shift_labels`, aligned with the logits,
                takes precedence, so that the first token of the next segment can be a target too.
            logits_to_keep: number of last positions to compute logits for, or their indices; 0 for all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            memory=memory,
            reset_mask=reset_mask,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        hidden_states = outputs.last_hidden_state if isinstance(keep, int) else outputs.last_hidden_state[:, keep]
        loss, logits = self._predict(hidden_states, labels, kwargs)
        return RelPosCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            memory=outputs.memory,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _predict(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Loss and logits; an adaptive head in training scores the targets alone, which is what makes it fast."""
        if self.head_projection is not None:
            hidden_states = self.head_projection(hidden_states)
        targets = kwargs.get("shift_labels")
        labels = targets if labels is None else labels  # without labels, the loss reads shift_labels alone
        if labels is None:
            return None, self.lm_head(hidden_states)
        check_labels(labels, hidden_states)
        if self.training and isinstance(self.lm_head, AdaptiveHead):
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if targets is None else targets
            return self.lm_head.losses(hidden_states, targets).sum() / self._count_targets(targets, kwargs), None
        logits = self.lm_head(hidden_states)
        return self._token_loss(logits, labels, True, kwargs), logits

    def create_masks_for_generate(
        self, attention_mask: torch.Tensor | None, cache: Cache, **kwargs: Any
    ) -> torch.Tensor | None:
        """The padding mask as it is, but as wide as a static cache, so that its shape stays the same from step to step."""
        if attention_mask is None:
            return None
        slots = sum(cache.get_mask_sizes(kwargs["inputs_embeds"].shape[1], 0))
        return nn.functional.pad(attention_mask, (0, max(0, slots - attention_mask.shape[1])))

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        """No position numbers: they follow from the mask and the cache, and distances from indices."""
        return None


class RelPosEncoderForMaskedLM(RelPosPreTrainedModel):
    """Encoder with a masked-language-model head."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RelPosEncoderConfig) -> None:
        check_family(self, config)
        config.query_stream = False  # a weight that is never used breaks distributed training
        super().__init__(config)
        self.model = RelPosEncoderModel(config)
        size = config.embedding_size or config.hidden_size
        self.head_dense = nn.Linear(config.hidden_size, size)
        self.head_act = ACT2FN[config.hidden_act]
        self.head_norm = make_norm(config, size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=True)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> RelPosMaskedLMOutput:
        """Predict masked tokens: `labels (batch, sequence)` hold the originals, -100 elsewhere; else as [`RelPosEncoderModel`]."""
        inputs = {name: value for name, value in kwargs.items() if name not in ("num_items_in_batch", "shift_labels")}
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        logits = self.lm_head(self.head_norm(self.head_act(self.head_dense(outputs.last_hidden_state))))
        loss = None
        if labels is not None:
            check_labels(labels, logits)
            loss = self._token_loss(logits, labels, False, kwargs)
        return RelPosMaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            memory=outputs.memory,
        )


class RelPosEncoderForPermutationLM(RelPosPreTrainedModel):
    """Encoder that predicts tokens in an order of factorization, by the query stream (XLNet, arXiv 1906.08237, section 2.3)."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RelPosEncoderConfig) -> None:
        check_family(self, config)
        config.require_query_stream()
        super().__init__(config)
        self.model = RelPosEncoderModel(config)
        size = embedding_width(config)
        self.head_projection = None if size == config.hidden_size else nn.Linear(config.hidden_size, size, bias=False)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=True)
        self.loss_type = "ForMaskedLM"  # targets are not shifted
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        perm_mask: torch.Tensor | None = None,
        target_mapping: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        memory: SegmentMemory | None = None,
        **kwargs: Any,
    ) -> RelPosMaskedLMOutput:
        """Predict the targets; the arguments of [`RelPosEncoderModel`] and `labels (batch, predict)`, -100 where there is none."""
        expected = None if target_mapping is None else tuple(target_mapping.shape[:2])
        if labels is not None and tuple(labels.shape) != expected:
            wanted = "a target_mapping, whose rows they are for" if expected is None else f"{expected}: (batch, predict)"
            raise ValueError(f"labels of the shape {tuple(labels.shape)} need {wanted}")
        inputs = {name: value for name, value in kwargs.items() if name not in ("num_items_in_batch", "shift_labels")}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            memory=memory,
            perm_mask=perm_mask,
            target_mapping=target_mapping,
            **inputs,
        )
        states = outputs.last_hidden_state
        logits = self.lm_head(states if self.head_projection is None else self.head_projection(states))
        loss = None if labels is None else self._token_loss(logits, labels.contiguous(), False, kwargs)
        return RelPosMaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            memory=outputs.memory,
        )


class _Classifier(RelPosPreTrainedModel):
    """A base model, dropout and one linear layer: what all classification heads share."""

    outputs_per_token: int | None = None
    model_class: type[RelPosStack] = RelPosEncoderModel

    def __init__(self, config: RelPosConfig) -> None:
        check_family(self, config)
        if isinstance(config, RelPosEncoderConfig):
            config.query_stream = False
        super().__init__(config)
        self.model = self.model_class(config)
        rate = config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout
        self.classifier_dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, self.outputs_per_token or cast(int, config.num_labels))
        self.post_init()

    def _classify(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.classifier_dropout(hidden_states))


class _SequenceClassifier(_Classifier):
    """Classifies a whole sequence from one pooled vector."""

    def _pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """`(batch, hidden_size)` from `(batch, sequence, hidden_size)`, padding left out."""
        raise NotImplementedError(f"{type(self).__name__} has no pooling")

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify: `labels (batch,)` classes, or `(batch, num_labels)` for several, or numbers for regression."""
        loss_kwargs = {"num_items_in_batch": kwargs.pop("num_items_in_batch", None)}
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = input_ids.ne(self.config.pad_token_id).long()
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        logits = self._classify(self._pool(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **loss_kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class _TokenClassifier(_Classifier):
    """Classifies each token."""

    @can_return_tuple
    def forward(
        self, input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> TokenClassifierOutput:
        """Classify each token: `labels (batch, sequence)`, -100 where there is none."""
        loss_kwargs = {"num_items_in_batch": kwargs.pop("num_items_in_batch", None)}
        outputs = self.model(input_ids=input_ids, **kwargs)
        logits = self._classify(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            check_labels(labels, logits)
            loss = self.loss_function(logits, labels, self.config, **loss_kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class RelPosEncoderForSequenceClassification(_SequenceClassifier):
    """Encoder that classifies the first token or the mean of all (`classifier_pooling`)."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig

    def _pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        mask = hidden_states.new_ones(hidden_states.shape[:2]) if attention_mask is None else attention_mask
        if self.config.classifier_pooling == "cls":
            return hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), mask.argmax(1)]
        weight = mask.to(hidden_states.dtype)[..., None]
        return (hidden_states * weight).sum(1) / weight.sum(1).clamp(min=1)


class RelPosEncoderForTokenClassification(_TokenClassifier):
    """Encoder that classifies each token."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig


class RelPosEncoderForQuestionAnswering(_Classifier):
    """Encoder that finds the first and last token of an answer."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig
    outputs_per_token = 2

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Score each token as start and end; `start_positions` and `end_positions (batch,)` give the loss."""
        loss_kwargs = {"num_items_in_batch": kwargs.pop("num_items_in_batch", None)}
        outputs = self.model(input_ids=input_ids, **kwargs)
        start_logits, end_logits = (part.contiguous() for part in self._classify(outputs.last_hidden_state).unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **loss_kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RelPosEncoderForMultipleChoice(RelPosEncoderForSequenceClassification):
    """Encoder that chooses one of several continuations."""

    outputs_per_token = 1

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Score `input_ids (batch, choices, sequence)`; `labels (batch,)` name the right choice."""
        kwargs.pop("num_items_in_batch", None)
        tensors = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        choices = next(value.shape[1] for value in tensors.values() if isinstance(value, torch.Tensor) and value.dim() > 2)
        flat = {name: value.flatten(0, 1) if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}
        outputs = super().forward(**flat, return_dict=True)
        scores: Any = outputs.logits
        logits = scores.view(-1, choices)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class _LastToken:
    """Pooling of a causal model: its last token has seen all others."""

    def _pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        if attention_mask is None:
            return hidden_states[:, -1]
        order = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        last = (attention_mask * order).argmax(1)
        return hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), last]


class RelPosDecoderForSequenceClassification(_LastToken, _SequenceClassifier):
    """Decoder that classifies a sequence from its last token."""

    config: RelPosDecoderConfig
    config_class = RelPosDecoderConfig
    model_class = RelPosDecoderModel


class RelPosDecoderForTokenClassification(_TokenClassifier):
    """Decoder that classifies each token."""

    config: RelPosDecoderConfig
    config_class = RelPosDecoderConfig
    model_class = RelPosDecoderModel
