"""Layers, stacks and heads of the relative-position models."""

from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import ModelOutput
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .adaptive_softmax import AdaptiveHead
from .adaptive_softmax import embedding_width
from .adaptive_softmax import tied_tables
from .configuration_relpos import RelPosDecoderConfig
from .configuration_relpos import RelPosEncoderConfig
from .forward_keywords import accept_old_cache_name
from .generation_relpos import MemoryGenerationMixin
from .head_classification import MultipleChoiceHead
from .head_classification import QuestionAnsweringHead
from .head_classification import SequenceClassifierHead
from .head_classification import TokenClassifierHead
from .head_losses import check_labels
from .head_losses import count_targets
from .memory_projections import MemoryProjections
from .memory_projections import begin_projections
from .position_builder import build_positions
from .position_ids_cache import append_position_ids
from .position_ids_cache import seen_so_far
from .position_two_stream import check_perm_mask
from .position_two_stream import content_positions
from .position_two_stream import find_targets
from .position_two_stream import query_positions
from .positions import Positions
from .segment_memory import SegmentMemory
from .segment_memory import next_memory
from .sliding_cache import check_static_cache
from .sliding_cache import keep_all_keys
from .transformer_layer import SecondInput
from .transformer_layer import make_norm
from .transformer_stack import RelPosPreTrainedModel
from .transformer_stack import RelPosStack

logger = logging.get_logger(__name__)


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


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Return the last `logits_to_keep` of `hidden_states (batch, sequence, hidden_size)`, or those that it names; all for 0."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    return hidden_states[:, logits_to_keep]


class RelPosEncoderModel(RelPosStack):
    """Bidirectional encoder without a head, with segment memory, and with a query stream where `query_stream` says so."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig

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
        seq_idx: torch.Tensor | None = None,
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
            seq_idx: `(batch, sequence)` the number of each token's document, which says the same.
            perm_mask: `(batch, query, key)` 1 where a token may not see another of the segment; each sees itself.
            target_mapping: `(batch, predict, sequence)` one-hot rows: the tokens to predict, by a query stream that sees
                what `perm_mask` lets it, itself included; rows of zeros pad.
        """
        embeds = self._embed_ids(input_ids, inputs_embeds)
        shape = (embeds.shape[0], embeds.shape[1])
        alone = attention_mask is None and memory is None
        kwargs["seq_idx"] = seq_idx
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
            self._enter(embeds, positions, token_type_ids), seen, memory, force_eager=force_eager, beside=queries
        )
        if mem_len := self.config.mem_len:
            valid, document = positions.query_valid, positions.query_document
            memory = next_memory(memory, entered, mem_len, valid, document, self.config.reuse_len).detach()
        return RelPosModelOutput(last_hidden_state=hidden_states, memory=memory)

    def _query_stream(
        self, positions: Positions, hidden: torch.Tensor | None, target_mapping: torch.Tensor, shape: tuple[int, int]
    ) -> SecondInput:
        """Return the targets before the first layer: all the same, only their positions differ."""
        if self.mask_emb is None:
            raise ValueError("target_mapping was given to an encoder without a query stream: set query_stream=True")
        if hidden is None:
            raise ValueError("target_mapping needs a perm_mask: without one every target would see itself")
        targets, named = find_targets(target_mapping, shape)
        where, seen = query_positions(positions, hidden, targets, named)
        states = self.dropout(self.mask_emb.expand(*targets.shape, -1))
        return SecondInput(states, where, seen[..., None].to(states.dtype))


class RelPosDecoderModel(RelPosStack):
    """Causal decoder without a head, with segment memory and a key/value cache."""

    config: RelPosDecoderConfig
    config_class = RelPosDecoderConfig

    @accept_old_cache_name
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
        seq_idx: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
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
            cache: key/value cache of earlier tokens, read whatever `use_cache` says; `past_key_values` is its old name.
            use_cache: return a cache, and make one where none is given; by default what the configuration says, but a model
                with memory returns memory.
            memory: segment memory that an earlier forward returned.
            reset_mask: `(batch, sequence)` true on the first token of each document: nothing before it is seen.
            seq_idx: `(batch, sequence)` the number of each token's document, which says the same, as does `cu_seq_lens_q` of
                transformers' packing collator.
            token_type_ids: `(batch, sequence)` token types, when the model has any.
        """
        config: Any = self.config  # what may be left out of it is complete by now
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[config.layer_types[0]]
        embeds = self._embed_ids(input_ids, inputs_embeds)
        batch, sequence = embeds.shape[:2]
        unasked = cache is None and use_cache is None
        cache = self._resolve_cache(cache, use_cache, memory, batch)
        keep_all_keys(cache, attention_mask, sequence)
        alone = attention_mask is None and memory is None and (cache is None or unasked)
        kwargs["seq_idx"] = seq_idx
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
            position_ids=append_position_ids(cache, position_ids, (batch, sequence), config.num_hidden_layers),
            reset_mask=reset_mask,
            cached=None if cache is None else seen_so_far(cache, sequence),
            memory_length=None if memory is None else memory.length,
            memory_slots=0 if memory is None else memory.slots,
        )
        remembered = self._remembered(memory, cache)
        hidden_states, entered = self._run_layers(
            self._enter(embeds, positions, token_type_ids), positions, memory, cache, force_eager, remembered=remembered
        )
        if cache is None and config.mem_len:
            memory = next_memory(memory, entered, config.mem_len, positions.query_valid, positions.query_document)
            memory = memory.detach() if config.detach_memory else memory
            if remembered is not None and positions.query_valid is None:  # else padding has moved what is remembered
                remembered.keep(memory)
        memory = memory if cache is None else None
        return RelPosModelOutput(last_hidden_state=hidden_states, cache=None if use_cache is False else cache, memory=memory)

    def _remembered(self, memory: SegmentMemory | None, cache: Cache | None) -> MemoryProjections | None:
        """Return the keys and values of a memory, those that this pass is given and leaves; numbers of gates are not among them."""
        if cache is not None or not self.config.mem_len or any(scheme.gates() for scheme in self.schemes_of_layers()):
            return None
        return begin_projections(memory, self.layers, self.config.mem_len)

    def _resolve_cache(
        self, cache: Cache | None, use_cache: bool | None, memory: SegmentMemory | None, batch: int
    ) -> Cache | None:
        """Return the cache of this pass, or None; a cache and a memory exclude each other."""
        if memory is not None and (cache is not None or use_cache):
            raise ValueError(
                "memory and a key/value cache exclude each other: model.memory_to_cache(memory) turns one into the other"
            )
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None or use_cache:
                logger.warning_once("use_cache=True is incompatible with gradient checkpointing: no cache is used")
            return None
        if cache is None:
            if use_cache is None:
                use_cache = self.config.use_cache and self.config.mem_len == 0 and not self.training
            return DynamicCache(config=self.config) if use_cache else None
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

    @accept_old_cache_name
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
        seq_idx: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> RelPosCausalLMOutput:
        """Decode and predict the next tokens; the arguments of [`RelPosDecoderModel`] and four more.

        Args:
            labels: `(batch, sequence)` unshifted targets, -100 where there is none.
            logits_to_keep: number of last positions to compute logits for, or their indices; 0 for all.
            num_items_in_batch: by what the sum of losses is divided; None for the number of targets in this batch.
            kwargs: among them `shift_labels (batch, sequence)`, targets aligned with the logits, so that the first token of the
                next segment can be a target too; they take precedence over `labels`. As in Llama they have no name of their own:
                Trainer would wait for both kinds of labels, and evaluate without a loss where there is one kind.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            memory=memory,
            reset_mask=reset_mask,
            seq_idx=seq_idx,
            token_type_ids=token_type_ids,
            **kwargs,
        )
        hidden_states = keep_positions(outputs.last_hidden_state, logits_to_keep)
        loss, logits = self._predict(hidden_states, labels, shift_labels, num_items_in_batch)
        return RelPosCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            memory=outputs.memory,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _predict(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        shift_labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return loss and logits; an adaptive head in training scores the targets alone, which is what makes it fast."""
        if self.head_projection is not None:
            hidden_states = self.head_projection(hidden_states)
        labels = shift_labels if labels is None else labels  # without labels, the loss reads shift_labels alone
        if labels is None:
            return None, self.lm_head(hidden_states)
        check_labels(labels, tuple(hidden_states.shape[:2]), self.config.vocab_size)
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        if self.training and isinstance(self.lm_head, AdaptiveHead):
            return self.lm_head(hidden_states, targets).sum() / count_targets(targets, num_items_in_batch), None
        logits = self.lm_head(hidden_states)
        shifted = {} if shift_labels is None else {"shift_labels": shift_labels}
        return self._token_loss(logits, labels, targets, num_items_in_batch, **shifted), logits

    def create_masks_for_generate(
        self, attention_mask: torch.Tensor | None, cache: Cache, **kwargs: Any
    ) -> torch.Tensor | None:
        """Return the padding mask, as wide as a static cache, so that its shape stays the same from step to step."""
        if attention_mask is None:
            return None
        check_static_cache(cache, attention_mask, getattr(self.config, "sliding_window", None))
        slots = sum(cache.get_mask_sizes(kwargs["inputs_embeds"].shape[1], 0))
        return nn.functional.pad(attention_mask, (0, max(0, slots - attention_mask.shape[1])))

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        """Return no position ids: they follow from the mask and the cache, and distances from indices."""
        return None


class RelPosEncoderForMaskedLM(RelPosPreTrainedModel):
    """Encoder with a masked-language-model head."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig
    query_stream = False  # a weight that is never used breaks distributed training
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RelPosEncoderConfig) -> None:
        super().__init__(config)
        config = self.config
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
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        memory: SegmentMemory | None = None,
        reset_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        perm_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> RelPosMaskedLMOutput:
        """Predict masked tokens; the arguments of [`RelPosEncoderModel`] and two more.

        Args:
            labels: `(batch, sequence)` the tokens that were masked, -100 elsewhere.
            num_items_in_batch: by what the sum of losses is divided; None for the number of targets in this batch.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            memory=memory,
            reset_mask=reset_mask,
            seq_idx=seq_idx,
            perm_mask=perm_mask,
            **kwargs,
        )
        logits = self.lm_head(self.head_norm(self.head_act(self.head_dense(outputs.last_hidden_state))))
        loss = None if labels is None else self._token_loss(logits, labels, labels, num_items_in_batch)
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
    query_stream = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RelPosEncoderConfig) -> None:
        super().__init__(config)
        config = self.config
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
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        reset_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> RelPosMaskedLMOutput:
        """Predict the targets; the arguments of [`RelPosEncoderModel`] and two more.

        Args:
            labels: `(batch, predict)` the tokens that `target_mapping` names, -100 where there is none.
            num_items_in_batch: by what the sum of losses is divided; None for the number of targets in this batch.
        """
        expected = None if target_mapping is None else tuple(target_mapping.shape[:2])
        if labels is not None and tuple(labels.shape) != expected:
            wanted = "a target_mapping, whose rows they are for" if expected is None else f"{expected}: (batch, predict)"
            raise ValueError(f"labels of the shape {tuple(labels.shape)} need {wanted}")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            memory=memory,
            reset_mask=reset_mask,
            seq_idx=seq_idx,
            perm_mask=perm_mask,
            target_mapping=target_mapping,
            **kwargs,
        )
        states = outputs.last_hidden_state
        logits = self.lm_head(states if self.head_projection is None else self.head_projection(states))
        loss = None if labels is None else self._token_loss(logits, labels, labels, num_items_in_batch)
        return RelPosMaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            memory=outputs.memory,
        )


class RelPosEncoderForSequenceClassification(SequenceClassifierHead):
    """Encoder that classifies the first token or the mean of all (`classifier_pooling`)."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig
    model_class = RelPosEncoderModel
    query_stream = False


class RelPosEncoderForTokenClassification(TokenClassifierHead):
    """Encoder that classifies each token."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig
    model_class = RelPosEncoderModel
    query_stream = False


class RelPosEncoderForQuestionAnswering(QuestionAnsweringHead):
    """Encoder that finds the first and last token of an answer."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig
    model_class = RelPosEncoderModel
    query_stream = False


class RelPosEncoderForMultipleChoice(MultipleChoiceHead):
    """Encoder that chooses one of several continuations."""

    config: RelPosEncoderConfig
    config_class = RelPosEncoderConfig
    model_class = RelPosEncoderModel
    query_stream = False


class RelPosDecoderForSequenceClassification(SequenceClassifierHead):
    """Decoder that classifies a sequence from its last token, which has seen all others."""

    config: RelPosDecoderConfig
    config_class = RelPosDecoderConfig
    model_class = RelPosDecoderModel


class RelPosDecoderForTokenClassification(TokenClassifierHead):
    """Decoder that classifies each token."""

    config: RelPosDecoderConfig
    config_class = RelPosDecoderConfig
    model_class = RelPosDecoderModel


class RelPosDecoderForQuestionAnswering(QuestionAnsweringHead):
    """Decoder that finds the first and last token of an answer."""

    config: RelPosDecoderConfig
    config_class = RelPosDecoderConfig
    model_class = RelPosDecoderModel
