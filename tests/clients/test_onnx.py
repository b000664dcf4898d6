"""ONNX in onnxruntime: programs with free sizes of every family and kind of scheme answer as the models, padding included."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_models import ALL
from client_models import HEADS
from client_models import Kind
from matrix import CONFIGS
from matrix import DIRECTION
from matrix import MATRIX
from matrix import ids_of

from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.modeling_relpos import RelPosDecoderForCausalLM
from hf_relpos.model.scheme_registry import scheme_class

SCHEMES = [
    (family, row.scheme, row.variants[0])
    for row in MATRIX
    for family in CONFIGS
    if DIRECTION[family] not in scheme_class(row.scheme).refuses
]


class Program(torch.nn.Module):
    """A model as a function of ids and mask, and of the target's ids in an encoder-decoder."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: Any = None) -> torch.Tensor:
        target = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **target, **self.options).logits


def inputs(batch: int, length: int, target: int | None) -> list[torch.Tensor]:
    """Return ids, a mask with padding on the left of the first row, and the target's ids if there are any."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :2] = 0
    found = [ids_of(batch, length) * mask, mask]
    return found if target is None else [*found, ids_of(batch, target, seed=1)]


@torch.no_grad()
def compare(model: Any, options: dict[str, Any], with_target: bool = False) -> None:
    """Export with free sizes, run in onnxruntime at other sizes, and compare the logits of tokens."""
    import onnxruntime

    program = Program(model, options)
    batch, length, target = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "length", "target"))
    shapes = [{0: batch, 1: length}] * 2 + [{0: batch, 1: target}] * with_target
    given = inputs(2, 9, 5 if with_target else None)
    exported: Any = torch.onnx.export(program, tuple(given), dynamo=True, dynamic_shapes=tuple(shapes), verbose=False)
    file = io.BytesIO()
    exported.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    for sizes in ((3, 14, 7), (2, 5, 11)):
        given = inputs(*sizes[:2], sizes[2] if with_target else None)
        names = [one.name for one in session.get_inputs()]
        found = session.run(None, {name: value.numpy() for name, value in zip(names, given, strict=True)})[0]
        wanted = program(*given).numpy()
        real = np.ones(wanted.shape[:2], bool) if with_target else given[1].bool().numpy()
        np.testing.assert_allclose(found[real], wanted[real], rtol=1e-3, atol=1e-4)


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
@pytest.mark.row("onnxruntime", "a model as it is, which gives its memory too", kind="decoder memory")
@torch.no_grad()
def test_memory_is_an_output(tmp_path: Path) -> None:
    """As `docs/how-to/onnx.md` exports it; padding stands between tokens, too."""
    pytest.importorskip("onnxscript")
    import onnxruntime

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "attn_implementation": "eager"}
    model: Any = RelPosDecoderForCausalLM(RelPosDecoderConfig(position_scheme="transformer_xl", mem_len=8, **sizes)).eval()
    model.config.use_cache = False
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", min=2, max=64)}
    shapes, file = {"input_ids": axes, "attention_mask": axes}, str(tmp_path / "model.onnx")
    given = (ids_of(2, 16), torch.ones(2, 16, dtype=torch.long))
    names = ["logits", "memory", "memory_length"]
    torch.onnx.export(model, given, file, output_names=names, dynamic_shapes=shapes, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file)
    for batch, length in ((1, 40), (3, 12)):
        ids, mask = ids_of(batch, length), torch.ones(batch, length, dtype=torch.long)
        mask[0, [0, 1, 7]] = 0
        logits, hidden, count = session.run(names, dict(zip(shapes, (ids.numpy(), mask.numpy()), strict=True)))
        wanted = model(input_ids=ids, attention_mask=mask)
        real = mask.bool().numpy()
        np.testing.assert_allclose(logits[real], wanted.logits.numpy()[real], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(hidden, wanted.memory.hidden.numpy(), rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(count, wanted.memory.length.numpy())


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
@pytest.mark.row("onnxruntime", "torch.onnx.export with free batch and length, padded")
@pytest.mark.parametrize("kind", ALL)
def test_kinds_in_onnxruntime(kind: Kind) -> None:
    pytest.importorskip("onnxscript")
    options = {} if kind.head == HEADS["Encoder"] else {"use_cache": False}
    compare(kind.model(dtype=torch.float32), options, kind.head == HEADS["Seq2Seq"])


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
@pytest.mark.row("onnxruntime", "every scheme, decoder and encoder", kind="all schemes")
@pytest.mark.parametrize("family, scheme, parameters", SCHEMES, ids=[f"{family}-{scheme}" for family, scheme, _ in SCHEMES])
def test_every_scheme_in_onnxruntime(family: str, scheme: str, parameters: dict[str, Any]) -> None:
    pytest.importorskip("onnxscript")
    fields = {"position_scheme": scheme, "position_parameters": parameters}
    kind = Kind(f"{family} {scheme}", CONFIGS[family], fields, HEADS[family.capitalize()])
    compare(kind.model(dtype=torch.float32), {"use_cache": False} if family == "decoder" else {})
