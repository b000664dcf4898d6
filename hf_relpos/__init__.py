"""Position schemes as one config field, with segment memory, for Hugging Face transformers.

`hf_relpos/model/` holds the files that travel with the weights, and nothing else; the other folders need the extras of the
package (`pip install hf_relpos[train]`).
"""

from typing import TYPE_CHECKING
from typing import Any

from transformers import AutoConfig
from transformers import AutoModel
from transformers import AutoModelForCausalLM
from transformers import AutoModelForMaskedLM
from transformers import AutoModelForMultipleChoice
from transformers import AutoModelForPreTraining
from transformers import AutoModelForQuestionAnswering
from transformers import AutoModelForSeq2SeqLM
from transformers import AutoModelForSequenceClassification
from transformers import AutoModelForTokenClassification
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .data.tokenizers import RelPosTokenizer
from .model.configuration_relpos import RelPosDecoderConfig
from .model.configuration_relpos import RelPosEncoderConfig
from .model.configuration_relpos_seq2seq import RelPosSeq2SeqConfig
from .model.modeling_relpos import RelPosDecoderForCausalLM
from .model.modeling_relpos import RelPosDecoderForQuestionAnswering
from .model.modeling_relpos import RelPosDecoderForSequenceClassification
from .model.modeling_relpos import RelPosDecoderForTokenClassification
from .model.modeling_relpos import RelPosDecoderModel
from .model.modeling_relpos import RelPosEncoderForMaskedLM
from .model.modeling_relpos import RelPosEncoderForMultipleChoice
from .model.modeling_relpos import RelPosEncoderForPermutationLM
from .model.modeling_relpos import RelPosEncoderForQuestionAnswering
from .model.modeling_relpos import RelPosEncoderForSequenceClassification
from .model.modeling_relpos import RelPosEncoderForTokenClassification
from .model.modeling_relpos import RelPosEncoderModel
from .model.modeling_relpos_seq2seq import RelPosSeq2SeqForConditionalGeneration
from .model.modeling_relpos_seq2seq import RelPosSeq2SeqForSequenceClassification
from .model.modeling_relpos_seq2seq import RelPosSeq2SeqModel
from .model.package_version import VERSION as __version__
from .model.scheme_registry import SCHEMES
from .model.segment_memory import SegmentMemory

if TYPE_CHECKING:
    from .training.segment_trainer import SegmentTrainer

__all__ = [
    "SCHEMES",
    "RelPosDecoderConfig",
    "RelPosDecoderForCausalLM",
    "RelPosDecoderForQuestionAnswering",
    "RelPosDecoderForSequenceClassification",
    "RelPosDecoderForTokenClassification",
    "RelPosDecoderModel",
    "RelPosEncoderConfig",
    "RelPosEncoderForMaskedLM",
    "RelPosEncoderForMultipleChoice",
    "RelPosEncoderForPermutationLM",
    "RelPosEncoderForQuestionAnswering",
    "RelPosEncoderForSequenceClassification",
    "RelPosEncoderForTokenClassification",
    "RelPosEncoderModel",
    "RelPosSeq2SeqConfig",
    "RelPosSeq2SeqForConditionalGeneration",
    "RelPosSeq2SeqForSequenceClassification",
    "RelPosSeq2SeqModel",
    "SegmentMemory",
    "SegmentTrainer",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import `SegmentTrainer` at its first use: it needs `accelerate`, which the models do without."""
    if name == "SegmentTrainer":
        try:
            from .training.segment_trainer import SegmentTrainer
        except ModuleNotFoundError as error:
            raise ImportError(
                f"SegmentTrainer needs the packages for training, and {error.name} is not installed: pip install 'hf_relpos[train]'"
            ) from error

        return SegmentTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register() -> None:
    """Make the Auto classes know every class here, and every saved folder carry the code. Harmless when repeated."""
    families = {
        RelPosDecoderConfig: {
            AutoModel: RelPosDecoderModel,
            AutoModelForCausalLM: RelPosDecoderForCausalLM,
            AutoModelForSequenceClassification: RelPosDecoderForSequenceClassification,
            AutoModelForTokenClassification: RelPosDecoderForTokenClassification,
            AutoModelForQuestionAnswering: RelPosDecoderForQuestionAnswering,
        },
        RelPosEncoderConfig: {
            AutoModel: RelPosEncoderModel,
            AutoModelForMaskedLM: RelPosEncoderForMaskedLM,
            AutoModelForPreTraining: RelPosEncoderForPermutationLM,
            AutoModelForSequenceClassification: RelPosEncoderForSequenceClassification,
            AutoModelForTokenClassification: RelPosEncoderForTokenClassification,
            AutoModelForQuestionAnswering: RelPosEncoderForQuestionAnswering,
            AutoModelForMultipleChoice: RelPosEncoderForMultipleChoice,
        },
        RelPosSeq2SeqConfig: {
            AutoModel: RelPosSeq2SeqModel,
            AutoModelForSeq2SeqLM: RelPosSeq2SeqForConditionalGeneration,
            AutoModelForSequenceClassification: RelPosSeq2SeqForSequenceClassification,
        },
    }
    for config, models in families.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        config.register_for_auto_class()
        AutoTokenizer.register(config, RelPosTokenizer, exist_ok=True)
        for auto, model in models.items():
            auto.register(config, model, exist_ok=True)
            model.register_for_auto_class(auto.__name__)
    # Trainer looks class names up here to decide whether label smoothing must shift the labels.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[RelPosDecoderConfig.model_type] = RelPosDecoderForCausalLM.__name__


_register()
