"""Plans of conversion: the configuration here, the rules for the weights of a source, and the heads that it may have."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_relpos.conversion.rules import Rule
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.rules import rename
from hf_relpos.conversion.settings import Settings
from hf_relpos.model.configuration_relpos import RelPosConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderForCausalLM
from hf_relpos.model.modeling_relpos import RelPosDecoderForSequenceClassification
from hf_relpos.model.modeling_relpos import RelPosDecoderForTokenClassification
from hf_relpos.model.modeling_relpos import RelPosEncoderForMaskedLM
from hf_relpos.model.modeling_relpos import RelPosEncoderForQuestionAnswering
from hf_relpos.model.modeling_relpos import RelPosEncoderForTokenClassification
from hf_relpos.model.scheme_rotary import RoPE


@dataclass(frozen=True)
class Head:
    """A head that a checkpoint may have.

    Attributes:
        model: the class here.
        architectures: how the names of the source's classes with this head end.
        rules: for the weights of the head.
        zeros: weights here that the source has none for, because it has no bias there.
    """

    model: type[PreTrainedModel]
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The plan by which one checkpoint is converted.

    Attributes:
        config: the configuration here.
        base: the model class here without a head.
        prefix: of the base model's weights in a checkpoint with a head.
        rules: for the weights of the base model, to names without a prefix.
        heads: those that can be converted, the language-model head first.
        notes: what the user should know.
    """

    config: RelPosConfig
    base: type[PreTrainedModel]
    prefix: str
    rules: Sequence[Rule]
    heads: Sequence[Head] = ()
    notes: Sequence[str] = ()

    def choose_head(self, architectures: Sequence[str], weights: Weights) -> Head | None:
        """Return the head that the architectures name, or the language-model head when its weights are there."""
        for head in self.heads:
            if any(name.endswith(head.architectures) for name in architectures):
                return head
        for head in self.heads[:1]:
            patterns = [rule.pattern for rule in head.rules if rule.targets]
            if any(re.fullmatch(pattern, name) for pattern in patterns for name in weights):
                return head
        return None


def decoder_heads(*language_rules: Rule) -> list[Head]:
    """Return the heads of a decoder; its classifiers are one linear layer over the last token, or over each."""
    scores = rename(r"(?:score|classifier)\.(\w+)", r"classifier.\1")
    return [
        Head(RelPosDecoderForCausalLM, ("ForCausalLM", "LMHeadModel"), language_rules),
        Head(RelPosDecoderForSequenceClassification, ("ForSequenceClassification",), (scores,), ("classifier.bias",)),
        Head(RelPosDecoderForTokenClassification, ("ForTokenClassification",), (scores,)),
    ]


def encoder_heads(*language_rules: Rule) -> list[Head]:
    """Return the heads of an encoder that are one linear layer over each token, after the language-model head."""
    tokens, answers = (rename(rf"{name}\.(\w+)", rf"{name}.\1") for name in ("classifier", "qa_outputs"))
    return [
        Head(RelPosEncoderForMaskedLM, ("ForMaskedLM", "ForPreTraining"), language_rules),
        Head(RelPosEncoderForTokenClassification, ("ForTokenClassification",), (tokens,)),
        Head(RelPosEncoderForQuestionAnswering, ("ForQuestionAnswering",), (answers,)),
    ]


def rotary_parameters(settings: Settings) -> dict[str, Any]:
    """Return the parameters of `rope` from transformers' `rope_parameters`.

    Raises:
        ValueError: names a kind of scaling or a parameter that the scheme does not have.
    """
    parameters = dict(settings("rope_parameters", {}))
    parameters.setdefault("rope_type", parameters.pop("type", "default"))  # `type` is its old spelling
    kinds = RoPE.parameter_specs["rope_type"].choices or ()
    if (kind := parameters["rope_type"]) not in kinds:
        raise ValueError(f"{settings.source}: rope_parameters rope_type={kind!r} cannot be converted; one of {kinds} can")
    for name, value in parameters.items():
        if name not in RoPE.parameter_specs:
            raise ValueError(f"{settings.source}: rope_parameters {name}={value!r} cannot be converted")
    return {name: value for name, value in parameters.items() if value is not None}
