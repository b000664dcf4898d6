"""Encoder-decoders with recomputed layers, in one compiled graph, and exported with free lengths."""

from typing import Any

import pytest
import torch
from matrix import ids_of
from pairs import EXACT
from pairs import SOURCE
from pairs import TARGET
from pairs import Pair

ROPE = Pair("rope", "rope")
SOME = {
    "rope": ROPE,
    "t5-shaw": Pair("t5", "shaw"),
    "transformer_xl-alibi": Pair("transformer_xl", "alibi"),
}


def example() -> dict[str, torch.Tensor]:
    """A source with padding on the left of one row, and labels."""
    mask = torch.ones(2, SOURCE, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": ids_of(length=SOURCE), "attention_mask": mask, "labels": ids_of(length=TARGET, seed=1)}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("pair", SOME.values(), ids=SOME)
def test_gradient_checkpointing(pair: Pair) -> None:
    """The same gradients, those of the encoder included, by both kinds of checkpoints."""
    results = []
    for kind in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model, given = pair.model(head=True).train(), example()
        if kind is not None:
            model.gradient_checkpointing_enable(kind)
        loss = model(**given).loss
        loss.backward()
        results.append([loss, *(weight.grad for weight in model.parameters())])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], **EXACT)


@pytest.mark.parametrize("pair", SOME.values(), ids=SOME)
def test_training_step_in_one_graph(pair: Pair) -> None:
    torch._dynamo.reset()
    model, results = pair.model(head=True, attn_implementation=None), []
    for runner in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        loss = runner(**example()).loss
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch._dynamo.reset()
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


class Exportable(torch.nn.Module):
    """A model as a function of ids and masks of source and target."""

    names = ("input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask")

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, tensors, strict=True)), use_cache=False).logits


@pytest.mark.parametrize("pair", SOME.values(), ids=SOME)
@torch.no_grad()
def test_export_with_free_lengths(pair: Pair) -> None:
    model = Exportable(pair.model(head=True, attn_implementation=None))
    given = (ids_of(length=SOURCE), ids_of(length=TARGET), torch.ones(2, SOURCE), torch.ones(2, TARGET))
    free = [{1: torch.export.Dim(name, min=2, max=64)} for name in ("source", "target")]
    program = torch.export.export(model, given, dynamic_shapes=((*free, *free),), strict=False).module()
    for source, target in ((17, 4), (5, 30)):
        mask = torch.ones(2, source)
        mask[0, :3] = 0
        given = (ids_of(length=source), ids_of(length=target), mask, torch.ones(2, target))
        torch.testing.assert_close(program(*given), model(*given), **EXACT)
