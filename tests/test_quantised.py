"""Weights that libraries store in fewer bits: every scheme stays as close to its own answers as `nope` does under the same loader."""

import copy
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import CONFIGS
from matrix import DIRECTION
from matrix import LANGUAGE_MODELS
from matrix import MATRIX
from torch import nn

from hf_relpos.model.scheme_registry import scheme_class

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
IDS = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(0))


def bitsandbytes(model: Any, folder: pathlib.Path, **settings: Any) -> Any:
    """Save a model and load it as users of bitsandbytes do."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, quantization_config=BitsAndBytesConfig(**settings), device_map="cpu")


def by_torchao(model: Any, folder: pathlib.Path) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def by_quanto(model: Any, folder: pathlib.Path) -> Any:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def by_torch(model: Any, folder: pathlib.Path) -> Any:
    """The dynamic quantisation of torch, whose layers have a method in the place of a weight."""
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


LOADERS: dict[str, Callable[[Any, pathlib.Path], Any]] = {
    "bnb_int8": lambda model, folder: bitsandbytes(model, folder, load_in_8bit=True),
    "bnb_nf4": lambda model, folder: bitsandbytes(model, folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "torchao": by_torchao,
    "quanto": by_quanto,
    "torch": by_torch,
}


def drift(family: str, scheme: str, parameters: dict[str, Any], loader: str, folder: pathlib.Path) -> float:
    """Return by how much a loader moves the logits of a model, in parts of their size."""
    torch.manual_seed(0)
    config = CONFIGS[family](**SIZES, position_scheme=scheme, position_parameters=parameters)
    model = LANGUAGE_MODELS[family](config).eval()
    with torch.no_grad():
        wanted = model(IDS)[0]
        found = LOADERS[loader](copy.deepcopy(model), folder).eval()(IDS)[0]
    return float((found - wanted).norm() / wanted.norm())


WITHOUT_WEIGHTS = {"decoder": "nope", "encoder": "alibi"}
"""What schemes are compared with: of the family's, one without weights; encoders refuse `nope`, and drift by more than decoders."""

CASES = [
    pytest.param(row.scheme, parameters, id=f"{row.scheme}-{number}")
    for row in MATRIX
    for number, parameters in enumerate(row.variants)
    if number == 0 or row.scheme == "deberta"
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("scheme, parameters", CASES)
def test_every_scheme_drifts_as_nope_does(
    scheme: str, parameters: dict[str, Any], loader: str, tmp_path: pathlib.Path
) -> None:
    family = next(family for family in CONFIGS if DIRECTION[family] not in scheme_class(scheme).refuses)
    without = WITHOUT_WEIGHTS[family]
    base = drift(family, without, {}, loader, tmp_path / "without")
    own = drift(family, scheme, parameters, loader, tmp_path / "own")
    assert math.isfinite(own) and own <= 1.5 * base, f"{scheme}: {own:.4f}, {without}: {base:.4f}"
