"""Heads that classify sequences, tokens, answers and choices: a base model, dropout and one linear layer."""

from typing import Any
from typing import ClassVar

import torch
from torch import nn
from transformers.modeling_outputs import MultipleChoiceModelOutput
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from .head_losses import answer_loss
from .head_losses import choice_loss
from .head_losses import sequence_loss
from .head_losses import token_loss
from .segment_memory import SegmentMemory
from .transformer_stack import RelPosPreTrainedModel
from .weight_loading import rename_answers

HeadOutput = SequenceClassifierOutput | TokenClassifierOutput | MultipleChoiceModelOutput | QuestionAnsweringModelOutput
"""What a head returns. sentence-transformers reads the fields of an output from the annotation of `forward`."""


class ClassifierHead(RelPosPreTrainedModel):
    """The base of all classification heads. A subclass says its base model, its loss, its output, and what it reads."""

    model_class: ClassVar[type[RelPosPreTrainedModel]]
    output_class: ClassVar[Any]
    outputs_per_token: ClassVar[int | None] = None
    """Width of the linear layer; None for `num_labels`."""
    linear_name: ClassVar[str] = "classifier"
    """Name of the linear layer, as in transformers: PEFT trains and saves the layer of this name unasked."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        config = self.config
        self.model = self.model_class(config)
        rate = config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout
        self.classifier_dropout = nn.Dropout(rate)
        self.add_module(self.linear_name, nn.Linear(config.hidden_size, self.outputs_per_token or config.num_labels))
        self.post_init()

    def _classify(self, states: torch.Tensor) -> torch.Tensor:
        """Return scores `(..., classes)` of hidden states `(..., hidden_size)`."""
        return getattr(self, self.linear_name)(self.classifier_dropout(states))

    def _score(self, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """Run the base model and return its outputs, and the scores of each token `(batch, sequence, classes)`."""
        outputs = self.model(**inputs)
        return outputs, self._classify(outputs.last_hidden_state)

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
    ) -> HeadOutput:
        """Classify; the arguments of the base model and two more.

        Args:
            labels: of a sequence, `(batch,)` classes, `(batch, num_labels)` numbers from 0 to 1 for several classes at once, or
                the numbers of a regression; of tokens, `(batch, sequence)`; of choices, `(batch,)`. -100 marks a place without.
            num_items_in_batch: by what the sum of losses is divided; None for the number of labels in this batch.
        """
        inputs = given(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            memory=memory,
            reset_mask=reset_mask,
            seq_idx=seq_idx,
            perm_mask=perm_mask,
        )
        outputs, logits = self._score(inputs | kwargs)
        loss = None
        if labels is not None:
            names = {"logits": logits, "pooled_logits": logits, "config": self.config}  # a loss takes those that it knows
            loss = self.loss_function(labels=labels, num_items_in_batch=num_items_in_batch, **names)
        return self.output_class(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class TokenClassifierHead(ClassifierHead):
    """Classifies each token."""

    output_class = TokenClassifierOutput
    _loss_function = staticmethod(token_loss)


class SequenceClassifierHead(ClassifierHead):
    """Classifies a whole sequence from one vector: of its first token, of its last, or the mean of all."""

    output_class = SequenceClassifierOutput
    _loss_function = staticmethod(sequence_loss)

    def _score(self, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """Run the base model and return its outputs, and the scores of each row `(batch, classes)`, padding left out."""
        mask = find_padding(inputs.get("input_ids"), inputs.get("attention_mask"), self.config.pad_token_id)
        inputs = inputs if mask is None else {**inputs, "attention_mask": mask}
        outputs = self.model(**inputs)
        pooled = pool(outputs.last_hidden_state, mask, getattr(self.config, "classifier_pooling", "last"))
        return outputs, self._classify(pooled)


class MultipleChoiceHead(SequenceClassifierHead):
    """Chooses one of several sequences, each of which is scored as it would be alone."""

    output_class = MultipleChoiceModelOutput
    outputs_per_token = 1
    _loss_function = staticmethod(choice_loss)

    def _score(self, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """Score `input_ids (batch, choices, sequence)`, and all that belongs to them: `(batch, choices)`."""
        name = "inputs_embeds" if inputs.get("input_ids") is None else "input_ids"
        tokens, expected = inputs.get(name), 4 if name == "inputs_embeds" else 3
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != expected:
            found = f"shape {tuple(tokens.shape)}" if isinstance(tokens, torch.Tensor) else f"type {type(tokens).__name__}"
            wanted = "(batch, choices, sequence)" + ", and a width" * (expected == 4)
            raise ValueError(f"{name} of {found} are refused by {type(self).__name__}: expected a tensor of shape {wanted}")
        flat = {key: value.flatten(0, 1) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        outputs, scores = super()._score(flat)
        return outputs, scores.view(tokens.shape[:2])


class QuestionAnsweringHead(ClassifierHead):
    """Scores each token as the first and as the last of an answer."""

    outputs_per_token = 2
    linear_name = "qa_outputs"
    output_class = QuestionAnsweringModelOutput
    _loss_function = staticmethod(answer_loss)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_load_state_dict_pre_hook(rename_answers)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        memory: SegmentMemory | None = None,
        reset_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        perm_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Score each token; the arguments of the base model and three more.

        Args:
            start_positions, end_positions: `(batch,)` indices of the first and the last token of the answer, which give the loss;
                -100, or an index beyond the sequence, for an answer that was cut off.
            num_items_in_batch: by what the sum of losses is divided; None for the number of answers in this batch.
        """
        inputs = given(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            memory=memory,
            reset_mask=reset_mask,
            seq_idx=seq_idx,
            perm_mask=perm_mask,
        )
        outputs, scores = self._score(inputs | kwargs)
        start_logits, end_logits = (part.contiguous() for part in scores.unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, num_items_in_batch=num_items_in_batch
            )
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def given(**inputs: Any) -> dict[str, Any]:
    """Return the arguments that are not None: base models differ in what they take."""
    return {name: value for name, value in inputs.items() if value is not None}


def find_padding(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, pad_token_id: int | None
) -> torch.Tensor | None:
    """Return `attention_mask (batch, sequence)`, or one that `input_ids` tell where there is none; None without padding."""
    if attention_mask is not None or input_ids is None or pad_token_id is None:
        return attention_mask
    mask = input_ids.ne(pad_token_id)
    return mask.long() if torch.compiler.is_compiling() or not bool(mask.all()) else None


def pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, kind: str) -> torch.Tensor:
    """Return one vector a row, `(batch, hidden_size)`.

    Args:
        hidden_states: `(batch, sequence, hidden_size)`.
        attention_mask: `(batch, sequence)` 0 for padding, which is left out; None for none.
        kind: `"cls"` for the first token, `"last"` for the last one, `"mean"` for the mean of all.
    """
    mask = hidden_states.new_ones(hidden_states.shape[:2]) if attention_mask is None else attention_mask
    if kind == "mean":
        weight = mask.to(hidden_states.dtype)[..., None]
        return (hidden_states * weight).sum(1) / weight.sum(1).clamp(min=1)
    rank = mask if kind == "cls" else mask * torch.arange(mask.shape[1], device=mask.device)
    return hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), rank.argmax(1)]
