"""Encoder-decoders: the two stacks of the other families, and a decoder layer that attends to the encoder's output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.cache_utils import DynamicCache
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_outputs import Seq2SeqSequenceClassifierOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder
from transformers.utils.output_capturing import capture_outputs

from .attention import RelPosAttention
from .attention import RelPosCrossAttention
from .configuration_relpos import RelPosDecoderConfig
from .configuration_relpos_seq2seq import RelPosSeq2SeqConfig
from .forward_keywords import accept_old_cache_name
from .generation_relpos import PaddedGenerationMixin
from .head_classification import ClassifierHead
from .head_classification import find_padding
from .head_classification import given
from .head_classification import pool
from .head_losses import sequence_loss
from .modeling_relpos import RelPosDecoderForCausalLM
from .modeling_relpos import RelPosDecoderModel
from .modeling_relpos import RelPosEncoderModel
from .modeling_relpos import RelPosModelOutput
from .modeling_relpos import RelPosPreTrainedModel
from .modeling_relpos import keep_positions
from .position_builder import build_positions
from .position_builder import source_positions
from .position_ids_cache import append_position_ids
from .position_ids_cache import seen_so_far
from .transformer_layer import RelPosLayer
from .transformer_layer import SecondInput
from .transformer_layer import make_norm


@dataclass
class RelPosCrossModelOutput(RelPosModelOutput):
    """Output of the decoder alone, with `cross_attentions`, one tensor a layer, when attentions are asked for."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class RelPosSeq2SeqModelOutput(ModelOutput):
    """Output of an encoder-decoder without a head.

    Attributes:
        last_hidden_state: `(batch, target, hidden_size)` of the decoder.
        cache: the key/value cache of target and source, when one is in use.
        decoder_hidden_states, decoder_attentions, cross_attentions: one tensor a layer, when asked for.
        encoder_last_hidden_state: `(batch, source, hidden_size)` of the encoder.
        encoder_hidden_states, encoder_attentions: one tensor a layer, when asked for.
    """

    last_hidden_state: torch.Tensor | None = None
    cache: EncoderDecoderCache | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class RelPosSeq2SeqLMOutput(ModelOutput):
    """Output with a language-model head: `loss` and `logits (batch, target, vocab_size)`, then as the model's."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: EncoderDecoderCache | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None


class RelPosCrossLayer(RelPosLayer):
    """A layer that attends to the source between its self-attention and its feed-forward."""

    def __init__(self, config: RelPosDecoderConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.cross_attention = RelPosCrossAttention(config, layer_idx)
        self.cross_norm = make_norm(config, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        memory: torch.Tensor | None,
        second: torch.Tensor,
        second_inputs: dict[str, Any],
        cache: EncoderDecoderCache | None = None,
        force_eager: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run one layer over `(batch, query, hidden_size)` that attends to `second (batch, source, hidden_size)`, the source, too."""
        own = None if cache is None else cache.self_attention_cache
        hidden_states = self._self_attend(hidden_states, memory, cache=own, force_eager=force_eager, **kwargs)
        query = self.cross_norm(hidden_states) if self.pre_norm else hidden_states
        given = {"scale": kwargs["scheme"]("scale"), "cache": cache, "force_eager": force_eager}
        attended = self.cross_attention(query, second, **second_inputs, **given)[0]
        hidden_states = self._add(hidden_states, attended, self.cross_norm)
        return self._feed(hidden_states, hidden_states)

    def query_projections(self) -> list[nn.Linear]:
        return [*super().query_projections(), self.cross_attention.q_proj]

    def output_projections(self) -> list[nn.Linear]:
        return [*super().output_projections(), self.cross_attention.o_proj]


class RelPosCrossDecoder(RelPosDecoderModel):
    """The decoder of an encoder-decoder."""

    layer_class = RelPosCrossLayer
    _no_split_modules = ["RelPosCrossLayer"]
    _can_record_outputs = {
        "hidden_states": RelPosCrossLayer,
        "attentions": OutputRecorder(RelPosAttention, index=1, layer_name="attention"),
        "cross_attentions": RelPosCrossAttention,
    }

    @accept_old_cache_name
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> RelPosCrossModelOutput:
        """Decode `input_ids (batch, target)` as [`RelPosDecoderModel`] does, with a source in the place of a memory.

        Args:
            encoder_hidden_states: `(batch, source, hidden_size)` the encoder's output.
            encoder_attention_mask: `(batch, source)` 1 for tokens, 0 for padding.
            cache: an `EncoderDecoderCache`, or a cache of the target alone, which then becomes one.
        """
        force_eager = self._wants_attentions(kwargs)
        if encoder_hidden_states is None:
            raise ValueError(f"{type(self).__name__} needs encoder_hidden_states, the output of an encoder")
        embeds = self._embed_ids(input_ids, inputs_embeds)
        batch, sequence = embeds.shape[:2]
        if encoder_hidden_states.shape[0] != batch:
            raise ValueError(f"the source has a batch of {encoder_hidden_states.shape[0]}, the target a batch of {batch}")
        both = self._resolve_both_caches(cache, use_cache, batch)
        positions = build_positions(
            (batch, sequence),
            embeds,
            causal=True,
            attention_mask=attention_mask,
            position_ids=append_position_ids(both, position_ids, (batch, sequence), self.config.num_hidden_layers),
            cached=None if both is None else seen_so_far(both, sequence),
        )
        hidden_states, _ = self._run_layers(
            self._enter(embeds, positions, None),
            positions,
            cache=both,
            force_eager=force_eager,
            beside=SecondInput(
                encoder_hidden_states, source_positions(sequence, encoder_hidden_states, encoder_attention_mask)
            ),
        )
        return RelPosCrossModelOutput(last_hidden_state=hidden_states, cache=None if use_cache is False else both)

    def _resolve_both_caches(self, cache: Cache | None, use_cache: bool | None, batch: int) -> EncoderDecoderCache | None:
        """Return the cache of target and source of this pass, or None."""
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        own = self._resolve_cache(own, use_cache, None, batch)
        if own is None:
            return None
        return cache if isinstance(cache, EncoderDecoderCache) else EncoderDecoderCache(own, DynamicCache())


class RelPosSeq2SeqModel(RelPosPreTrainedModel):
    """Encoder-decoder without a head. Both stacks share their token embeddings, whatever the head does."""

    config: RelPosSeq2SeqConfig
    config_class = RelPosSeq2SeqConfig
    _no_split_modules = ["RelPosLayer", "RelPosCrossLayer"]
    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def __init__(self, config: RelPosSeq2SeqConfig) -> None:
        super().__init__(config)
        encoder, decoder = config.stacks()
        self.encoder = RelPosEncoderModel(encoder)
        self.decoder = RelPosCrossDecoder(decoder)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the tied weights, with the embeddings that the stacks share: `tie_word_embeddings` is about the head alone."""
        return dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        for stack in (self.encoder, self.decoder):
            stack.set_input_embeddings(value)
            stack.config.vocab_size = value.num_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> RelPosSeq2SeqModelOutput:
        """Encode `input_ids (batch, source)` and decode `decoder_input_ids (batch, target)`.

        Args:
            attention_mask: `(batch, source)` 1 for tokens, 0 for padding.
            decoder_attention_mask: `(batch, cached + target)` 1 for tokens, 0 for padding.
            encoder_outputs: what the encoder returned for this source earlier, in the place of `input_ids`.
            inputs_embeds, decoder_inputs_embeds: embeddings `(batch, length, embedding_size)` in the place of ids.
            position_ids, decoder_position_ids: `(batch|1, length)` position numbers; by default tokens are counted.
            token_type_ids: `(batch, source)` token types, when the model has any.
            cache: what the decoder keeps of earlier tokens and of the source; `past_key_values` is its old name.
            use_cache: return a cache; by default what the configuration says.
            kwargs: among them `output_attentions` and `output_hidden_states`.
        """
        for name in ("output_attentions", "output_hidden_states"):
            given = kwargs.get(name)
            kwargs[name] = getattr(self.config, name) if given is None else given
        encoded: Any = encoder_outputs
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                token_type_ids=token_type_ids,
                return_dict=True,
                output_attentions=kwargs["output_attentions"],
                output_hidden_states=kwargs["output_hidden_states"],
            )
        elif not isinstance(encoder_outputs, ModelOutput):
            states: tuple[Any, ...] = encoder_outputs
            encoded = BaseModelOutput(*states)
        decoded = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            use_cache=use_cache,
            **{**kwargs, "return_dict": True},
        )
        return RelPosSeq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            cache=decoded.cache,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


def check_start(config: Any) -> Any:
    """Return the configuration; a ValueError if the decoder has no token to begin with."""
    if config.decoder_start_token_id is None:
        raise ValueError(
            "decoder_start_token_id=None: the decoder needs a token to begin with; give it, or pad_token_id or "
            "bos_token_id, which it then is"
        )
    return config


def shift_right(tokens: torch.Tensor, config: Any, first: torch.Tensor | int = 0) -> torch.Tensor:
    """Return what the decoder reads to say `tokens (batch, target)`: these one to the right, padding for -100.

    Args:
        tokens: token ids, or -100.
        config: the model's configuration, for the token that the decoder begins with and for padding.
        first: `(batch, 1)` index of each row's first token, in whose place the decoder begins; 0 for rows without padding before.
    """
    start: Any = config.decoder_start_token_id
    pad = start if config.pad_token_id is None else config.pad_token_id
    begins = torch.arange(tokens.shape[1], device=tokens.device) <= first
    shifted = tokens.roll(1, 1).masked_fill(begins, start)
    return shifted.masked_fill(shifted == -100, pad)


class RelPosSeq2SeqForConditionalGeneration(RelPosPreTrainedModel, PaddedGenerationMixin):
    """Encoder-decoder with a language-model head."""

    config: RelPosSeq2SeqConfig
    config_class = RelPosSeq2SeqConfig
    _no_split_modules = RelPosSeq2SeqModel._no_split_modules
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    create_masks_for_generate = RelPosDecoderForCausalLM.create_masks_for_generate

    def __init__(self, config: RelPosSeq2SeqConfig) -> None:
        super().__init__(config)
        self.model = RelPosSeq2SeqModel(config)
        size = config.embedding_size or config.hidden_size
        self.head_projection = None if size == config.hidden_size else nn.Linear(config.hidden_size, size, bias=False)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Generate as transformers does. `labels`, which `Seq2SeqTrainer` hands on with its batches, are ignored."""
        return super().generate(*args, **kwargs)  # pyright: ignore

    @classmethod
    def fit_config(cls, config: Any) -> Any:
        """Return the configuration; a ValueError if the decoder has nothing to begin with, or for another family."""
        return check_start(super().fit_config(config))

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return what the decoder reads to predict `labels (batch, target)`: these one to the right, padding for -100."""
        return shift_right(labels, self.config)

    @accept_old_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> RelPosSeq2SeqLMOutput:
        """Predict the target; the arguments of [`RelPosSeq2SeqModel`] and three more.

        Args:
            labels: `(batch, target)` what each position of the decoder is to predict, -100 where there is nothing. The
                decoder's input is made of them when none is given, and no cache is kept unless asked for.
            logits_to_keep: number of last positions to compute logits for, or their indices; 0 for all.
            num_items_in_batch: by what the sum of losses is divided; None for the number of targets in this batch.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError(
                    "the decoder has no input: give decoder_input_ids, decoder_inputs_embeds or labels; "
                    "DataCollatorForSeq2Seq(tokenizer, model) makes decoder_input_ids of labels"
                )
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if use_cache is None and labels is not None and cache is None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            decoder_inputs_embeds=decoder_inputs_embeds,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            cache=cache,
            use_cache=use_cache,
            **{**kwargs, "return_dict": True},
        )
        hidden_states = keep_positions(outputs.last_hidden_state, logits_to_keep)
        if self.config.scale_head:
            hidden_states = hidden_states * self.config.hidden_size**-0.5
        logits = self.lm_head(hidden_states if self.head_projection is None else self.head_projection(hidden_states))
        loss = None if labels is None else self._token_loss(logits, labels, labels, num_items_in_batch, shift_labels=labels)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return RelPosSeq2SeqLMOutput(loss=loss, logits=logits, **others)


class RelPosSeq2SeqForSequenceClassification(ClassifierHead):
    """Encoder-decoder that classifies a sequence, which both stacks read, from the decoder's last token (BART, arXiv 1910.13461)."""

    config: RelPosSeq2SeqConfig
    config_class = RelPosSeq2SeqConfig
    model_class = RelPosSeq2SeqModel
    _no_split_modules = RelPosSeq2SeqModel._no_split_modules
    _loss_function = staticmethod(sequence_loss)

    @classmethod
    def fit_config(cls, config: Any) -> Any:
        """Return the configuration; a ValueError if the decoder has nothing to begin with, or for another family."""
        return check_start(super().fit_config(config))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqSequenceClassifierOutput:
        """Classify; the arguments of [`RelPosSeq2SeqModel`] and two more. By default the decoder reads `input_ids` too.

        Args:
            labels: `(batch,)` classes, `(batch, num_labels)` numbers from 0 to 1, or -100, for several classes at once, or the
                numbers of a regression.
            num_items_in_batch: by what the sum of losses is divided; None for the number of labels in this batch.
        """
        attention_mask = find_padding(input_ids, attention_mask, self.config.pad_token_id)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if input_ids is None:
                raise ValueError(
                    "the decoder has no input: give decoder_input_ids or decoder_inputs_embeds beside inputs_embeds"
                )
            first = 0 if attention_mask is None else attention_mask.argmax(1, keepdim=True)
            decoder_input_ids, decoder_attention_mask = shift_right(input_ids, self.config, first), attention_mask
        outputs, scores = self._score(
            given(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=encoder_outputs,
                decoder_inputs_embeds=decoder_inputs_embeds,
                token_type_ids=token_type_ids,
                inputs_embeds=inputs_embeds,
                position_ids=position_ids,
                decoder_position_ids=decoder_position_ids,
            )
            | {"use_cache": False, **kwargs}
        )
        logits = pool(scores, decoder_attention_mask, "last")
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, num_items_in_batch=num_items_in_batch
            )
        others = {name: value for name, value in outputs.items() if name not in ("last_hidden_state", "cache")}
        return Seq2SeqSequenceClassifierOutput(loss=loss, logits=logits, **others)
