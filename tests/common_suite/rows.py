"""The rows of transformers' common model tests: one test class for each family and scheme. `run_suite.py` runs them."""

import inspect
import unittest
from functools import partial
from unittest.mock import patch

import torch
import transformers.models.auto.modeling_auto as mappings
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin
from tests.test_modeling_common import ids_tensor
from tests.test_modeling_common import random_attention_mask
from transformers import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs

import hf_relpos

ROWS = {
    **{f"Decoder_{scheme}": {} for scheme in ("rope", "alibi", "t5", "transformer_xl", "shaw", "fire", "cope", "fox")},
    "Decoder_learned_absolute": {},
    "Decoder_transformer_xl_memory": {"position_scheme": "transformer_xl", "mem_len": 8},
    **{f"Encoder_{scheme}": {} for scheme in ("t5", "alibi", "shaw", "deberta", "xlnet", "sinusoidal")},
    "Encoder_permutation": {"position_scheme": "xlnet", "query_stream": True},
    **{f"Seq2Seq_{scheme}": {} for scheme in ("t5", "rope", "alibi")},
}
"""A row's name is its family and scheme; its fields say what else is set. All heads of the family are tested."""
HEADS = {
    "Decoder": ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"),
    "Encoder": ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"),
    "Seq2Seq": ("ConditionalGeneration", "SequenceClassification"),
}
"""The language-model head comes first."""
MAPPINGS = {
    "Model": "MODEL_MAPPING_NAMES",
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "PermutationLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",  # for its labels: one a token
    "ConditionalGeneration": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "QuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "MultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
}
"""Where the common tests look up which labels a model takes, and whether it has a loss."""


def model_class(family: str, head: str) -> type[PreTrainedModel]:
    """Return a model of this package, as the common tests are to see it.

    They look for its name in a mapping, and ask for attentions only where the annotation of `kwargs` says that it takes the
    keywords of transformers, which it does.
    """
    found = getattr(hf_relpos, f"RelPos{family}Model" if head == "Model" else f"RelPos{family}For{head}")
    getattr(mappings, MAPPINGS[head])[f"relpos_{family}_{head}"] = found.__name__
    inspect.unwrap(found.forward).__annotations__["kwargs"] = Unpack[TransformersKwargs]
    return found


class Tester:
    """Make the tiny configuration and the batch of a row."""

    batch_size, num_choices, is_training = 7, 2, True  # some tests fill up to 7 rows with random numbers
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 32
    seq_length = encoder_seq_length = decoder_seq_length = 9

    def __init__(self, family: str, fields: dict) -> None:
        self.family, self.fields = family, fields
        self.targets = fields.get("query_stream", False)

    def get_config(self) -> hf_relpos.RelPosDecoderConfig:
        return getattr(hf_relpos, f"RelPos{self.family}Config")(
            vocab_size=99,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            max_position_embeddings=64,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[hf_relpos.RelPosDecoderConfig, dict[str, torch.Tensor]]:
        shape = [self.batch_size, self.seq_length]
        batch = {"input_ids": ids_tensor(shape, 96) + 3, "attention_mask": random_attention_mask(shape).long()}
        if self.family == "Seq2Seq":
            batch |= {
                "decoder_input_ids": ids_tensor(shape, 96) + 3,
                "decoder_attention_mask": random_attention_mask(shape).long(),
            }
        if self.targets:  # every token is a target, and sees those before it in a random order
            order = torch.rand(shape).argsort(1)
            batch["perm_mask"] = (order[:, :, None] <= order[:, None, :]).float()
            batch["target_mapping"] = torch.eye(self.seq_length).repeat(self.batch_size, 1, 1)
        return self.get_config(), batch


class Row(ModelTesterMixin):
    """Run the common tests with their gates open."""

    family, fields = "", {}
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        self.model_tester = Tester(self.family, self.fields)
        kind = getattr(hf_relpos, f"RelPos{self.family}Config")
        self.config_tester = ConfigTester(self, config_class=kind, hidden_size=32)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    @unittest.skip("GenerationTesterMixin is not in the source distribution")
    def test_generation_tester_mixin_inheritance(self) -> None:
        """Stand for tests that are not at hand."""

    def test_attention_outputs(self) -> None:
        """Count the attentions without targets: with them there are two a layer, of both streams."""
        self.model_tester.targets = False
        super().test_attention_outputs()

    def test_torch_compile_for_training(self) -> None:
        """Compile a training step whole; the test itself asks for an accelerator and Triton, its body does not."""
        whole = partial(torch.compile, fullgraph=True, backend="aot_eager")
        with patch("torch.compile", lambda model, **settings: whole(model)):
            inspect.unwrap(ModelTesterMixin.test_torch_compile_for_training)(self)


def make_row(name: str, fields: dict) -> type:
    """Return the test class of a row."""
    family, scheme = name.split("_", 1)
    heads = ("PermutationLM",) if fields.get("query_stream") else HEADS[family]
    classes = tuple(model_class(family, head) for head in ("Model", *heads))
    members = {
        "family": family,
        "fields": {"position_scheme": scheme} | fields,
        "all_model_classes": classes,
        "is_encoder_decoder": family == "Seq2Seq",
        "additional_model_inputs": ["perm_mask", "target_mapping"],
        "_torch_compile_train_cls": None if heads[0] == "PermutationLM" else classes[1],  # its labels need more inputs
    }
    return type(f"Test{name}", (Row, unittest.TestCase), members)


for row, settings in ROWS.items():
    globals()[f"Test{row}"] = make_row(row, settings)
