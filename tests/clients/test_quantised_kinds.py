"""Weights of fewer bits: what each library's loader moves in our models and in the peers, by tiny models of each kind.

`tests/test_quantised.py` compares every scheme with one without weights.
"""

import copy
import pathlib
from typing import Any

import pytest
import torch
from client_models import DECODERS_AND_LLAMA
from client_models import ENCODERS_AND_BERT
from client_models import Kind
from test_quantised import LOADERS

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
NAMES = {
    "bnb_int8": ("bitsandbytes", "int8 on a processor"),
    "bnb_nf4": ("bitsandbytes", "nf4 on a processor"),
    "torchao": ("torchao", "int8 weights"),
    "quanto": ("optimum-quanto", "int8 weights"),
}
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
IDS = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [*DECODERS_AND_LLAMA, *ENCODERS_AND_BERT])
@pytest.mark.parametrize("loader", [pytest.param(name, marks=pytest.mark.row(*row), id=name) for name, row in NAMES.items()])
@torch.no_grad()
def test_logits_stay_close(kind: Kind, loader: str, tmp_path: pathlib.Path, record_property: Any) -> None:
    """The logits are those of the exact model, but for the rounding of weights."""
    model = kind.model(dtype=torch.float32, **SIZES)
    wanted = model(IDS).logits
    found = LOADERS[loader](copy.deepcopy(model), tmp_path).eval()(IDS).logits.float()
    drift = float((found - wanted).norm() / wanted.norm())
    assert drift < (0.35 if loader == "bnb_nf4" else 0.05), drift
    assert drift > 0, "nothing was quantised"
