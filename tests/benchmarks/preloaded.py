"""Imports that the server of `peak_memory.py` makes once for all of its children: transformers loads its models late."""

from contextlib import suppress

import peak_memory
import speed_report
import torch._dynamo
import transformers
from transformers.models.t5 import modeling_t5

import hf_relpos

MODELS = ("XLNetModel", "DebertaV2Model", "BloomModel", "MptModel", "GPTNeoXModel", "LlamaModel", "GPT2Model")
LOADED = [
    peak_memory,
    speed_report,
    torch._dynamo,
    modeling_t5,
    hf_relpos.RelPosDecoderModel,
    *(getattr(transformers, name) for name in MODELS),
]

with suppress(ImportError):
    import x_transformers

    LOADED.append(x_transformers)
