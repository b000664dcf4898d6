"""The tiny models that clients are tried with: ours, one of each kind of scheme, and the peer of each family."""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import pytest
import torch
import transformers
from matrix import SIZES
from matrix import sharpen
from transformers import BertConfig
from transformers import LlamaConfig
from transformers import PreTrainedConfig
from transformers import T5Config

import hf_relpos

SIZE = SIZES | {"max_position_embeddings": 64, "attn_implementation": None}
SHORT = {"max_distance": 6}


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of model: what a test's parameter `kind` holds.

    Attributes:
        name: what the table of clients calls it: the family and the scheme, or the peer's name.
        make: returns its configuration, from fields.
        fields: what differs from the tiny sizes of all.
        head: the Auto class of its language-model head.
        peer: whether it is a model of transformers, for comparison.
    """

    name: str
    make: Callable[..., PreTrainedConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    head: str = "AutoModelForCausalLM"
    peer: bool = False

    def config(self, **fields: Any) -> Any:
        """Return a tiny configuration; `fields` have the names that Llama, BERT and our families share."""
        return self.make(**{**SIZE, **self.fields, **fields})

    def model(self, auto: str | None = None, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
        """Return a tiny random model with the head of an Auto class, by default for language modelling, to evaluate."""
        model = getattr(transformers, auto or self.head).from_config(self.config(**fields))
        return sharpen(model).to(dtype).eval()


def t5_config(**fields: Any) -> T5Config:
    """Return a configuration of T5 from fields that are named as those of others."""
    names = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    names |= {"intermediate_size": "d_ff"}
    fields.pop("max_position_embeddings")
    heads = fields["num_attention_heads"]
    given = {names.get(name, name): value for name, value in fields.items()}
    return T5Config(**{"d_kv": given["d_model"] // heads, "decoder_start_token_id": 0, **given})


HEADS = {"Decoder": "AutoModelForCausalLM", "Encoder": "AutoModelForMaskedLM", "Seq2Seq": "AutoModelForSeq2SeqLM"}


def ours(family: str, schemes: dict[str, dict[str, Any]]) -> dict[str, Kind]:
    """Return kinds of one family by their names in tests."""
    make = getattr(hf_relpos, f"RelPos{family}Config")
    return {name: Kind(f"{family.lower()} {name}", make, fields, HEADS[family]) for name, fields in schemes.items()}


DECODERS = ours(
    "Decoder",
    {
        "rotary": {"position_scheme": "rope"},
        "bias": {"position_scheme": "t5"},
        "vectors": {"position_scheme": "shaw", "position_parameters": SHORT},
        "gates": {"position_scheme": "fox"},
        "memory": {"position_scheme": "transformer_xl", "mem_len": 4},
    },
)
ENCODERS = ours(
    "Encoder",
    {
        "rotary": {"position_scheme": "rope"},
        "bias": {"position_scheme": "t5"},
        "vectors": {"position_scheme": "deberta", "position_parameters": SHORT},
    },
)
SEQ2SEQS = ours(
    "Seq2Seq",
    {
        "rotary": {"encoder_position_scheme": "rope", "decoder_position_scheme": "rope"},
        "bias": {"encoder_position_scheme": "t5", "decoder_position_scheme": "t5"},
    },
)
LLAMA = Kind("Llama", LlamaConfig, peer=True)
BERT = Kind("BERT", BertConfig, head=HEADS["Encoder"], peer=True)
T5 = Kind("T5", t5_config, head=HEADS["Seq2Seq"], peer=True)


def params(*kinds: Kind) -> list[Any]:
    """Return values for `parametrize("kind", ...)`, each with its name as its id."""
    return [pytest.param(kind, id=kind.name.replace(" ", "-")) for kind in kinds]


DECODERS_AND_LLAMA = params(*DECODERS.values(), LLAMA)
ENCODERS_AND_BERT = params(*ENCODERS.values(), BERT)
SEQ2SEQS_AND_T5 = params(*SEQ2SEQS.values(), T5)
ALL = [*DECODERS_AND_LLAMA, *ENCODERS_AND_BERT, *SEQ2SEQS_AND_T5]


def asks_of(client: str, **about: Any) -> Callable[[str], Any]:
    """Return a function of what is asked of a client, that gives the mark of the row; `about` as in `report.py`."""
    return lambda asked: pytest.mark.row(client, asked, **about)
