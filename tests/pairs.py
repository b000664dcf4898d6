"""Small encoder-decoders: every scheme on each side that allows it."""

from dataclasses import dataclass
from dataclasses import field
from typing import Any

import pytest
import torch
from matrix import MATRIX
from matrix import SIZES
from matrix import sharpen

from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos import RelPosSeq2SeqForConditionalGeneration
from hf_relpos import RelPosSeq2SeqModel
from hf_relpos.model.scheme_registry import scheme_class

EXACT = {"rtol": 1e-9, "atol": 1e-10}
SOURCE, TARGET = 9, 6


@dataclass(frozen=True)
class Pair:
    """The schemes of an encoder and of a decoder, with parameters."""

    encoder: str | list[str]
    decoder: str | list[str]
    encoder_parameters: dict[str, Any] = field(default_factory=dict)
    decoder_parameters: dict[str, Any] = field(default_factory=dict)

    def config(self, **fields: Any) -> RelPosSeq2SeqConfig:
        """A tiny configuration whose decoder is deeper than its encoder."""
        schemes = {
            "encoder_position_scheme": self.encoder,
            "encoder_position_parameters": self.encoder_parameters,
            "decoder_position_scheme": self.decoder,
            "decoder_position_parameters": self.decoder_parameters,
            "num_decoder_layers": 3,
        }
        return RelPosSeq2SeqConfig(**{**SIZES, **schemes, **fields})

    def model(self, head: bool = False, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
        """A tiny model whose weights make positions and the source matter."""
        kind = RelPosSeq2SeqForConditionalGeneration if head else RelPosSeq2SeqModel
        return sharpen(kind(self.config(**fields))).to(dtype).eval()


def pairs() -> list[Any]:
    """Every scheme on both sides where both allow it, else on the one that does; and sides that differ."""
    found = {}
    for row in MATRIX:
        refused, own = scheme_class(row.scheme).refuses, row.variants[0]
        encoder = ("alibi", {}) if "bidirectional" in refused else (row.scheme, own)
        decoder = ("rope", {}) if "causal" in refused else (row.scheme, own)
        found[row.scheme] = Pair(encoder[0], decoder[0], encoder[1], decoder[1])
    found["t5-nope"] = Pair("t5", "nope", {"num_buckets": 8})
    found["lists"] = Pair(["rope", "t5"], ["alibi", "nope", "rope"], {"t5": {"num_buckets": 8}})
    return [pytest.param(pair, id=name) for name, pair in found.items()]
