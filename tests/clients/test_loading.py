"""Weights that are elsewhere: loaded to several devices, sharded, on the meta device, and brought from memory or disk for each call."""

import pathlib
from typing import Any

import pytest
import torch
from client_models import ALL
from client_models import Kind
from client_models import asks_of
from matrix import ids_of

asks = asks_of("transformers: loading", package="transformers")


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    target = {"decoder_input_ids": ids_of(length=5)} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids_of(), **target).logits


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def reload(model: Any, folder: pathlib.Path, **options: Any) -> Any:
    return type(model).from_pretrained(folder, dtype=torch.float64, **options)


@pytest.mark.clients
@asks("sharded weights, which from_pretrained fills into a model made on the meta device")
@pytest.mark.parametrize("kind", ALL)
def test_shards(kind: Kind, tmp_path: pathlib.Path) -> None:
    model = kind.model()
    wanted = logits_of(model)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    close(logits_of(reload(model, tmp_path)), wanted)


@pytest.mark.clients
@asks("device_map='auto' and a map by modules")
@pytest.mark.parametrize("kind", ALL)
def test_device_map(kind: Kind, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("accelerate")
    model = kind.model()
    model.save_pretrained(tmp_path)
    for device_map in ("auto", {"": "cpu"}):
        close(logits_of(reload(model, tmp_path, device_map=device_map)), logits_of(model))


@asks("layers on disk, brought for each call (accelerate)")
@pytest.mark.parametrize("kind", ALL)
def test_disk_offload(kind: Kind, tmp_path: pathlib.Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = kind.model()
    wanted = logits_of(model)
    found = accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert any(weight.is_meta for weight in found.parameters())
    close(logits_of(found), wanted)
