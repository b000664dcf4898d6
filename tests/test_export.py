"""Exported programs: a memory that is saved with one, a decoding step in transformers' exporters, and passes without a mask."""

import copy
import pathlib
from typing import Any

import pytest
import torch
from matrix import Case
from matrix import ids_of
from pairs import Pair
from transformers.exporters.exporter_dynamo import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.utils import decompose_for_generation

from hf_relpos import SegmentMemory

PAIRS = {"t5": Pair("t5", "t5"), "rope": Pair("rope", "rope")}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@torch.no_grad()
def test_a_program_with_a_memory_is_saved(tmp_path: pathlib.Path) -> None:
    model, ids = Case("decoder", "transformer_xl", {}).model(mem_len=4, attn_implementation=None), ids_of()
    given = {"input_ids": ids, "memory": model(ids).memory}
    torch.export.save(torch.export.export(model, (), given, strict=False), tmp_path / "model.pt2")
    found, wanted = torch.export.load(tmp_path / "model.pt2").module()(**given), model(**given)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **EXACT)
    assert isinstance(found.memory, SegmentMemory)
    torch.testing.assert_close(tuple(found.memory), tuple(wanted.memory), **EXACT)


def test_a_memory_is_saved_alone(tmp_path: pathlib.Path) -> None:
    """`torch.load` reads it with its defaults, which refuse unknown classes."""
    memory = SegmentMemory(torch.zeros(1, 2, 3, 4), torch.ones(1).long())
    torch.save(memory, tmp_path / "memory.pt")
    loaded = torch.load(tmp_path / "memory.pt")
    assert isinstance(loaded, SegmentMemory) and loaded.length.tolist() == [1]


STEPS = {
    "bias": ("t5", {}),
    "rotary, a window that is full": ("rope", {"sliding_window": 5}),
    "memory": ("transformer_xl", {"mem_len": 4}),
}


@pytest.mark.parametrize("scheme, fields", STEPS.values(), ids=STEPS)
@torch.no_grad()
def test_a_decoding_step_in_the_exporter_of_transformers(scheme: str, fields: dict[str, Any]) -> None:
    """Behind a padded prompt; an exported sliding cache reports the tokens that it kept as all there were."""
    model, ids = Case("decoder", scheme, {}).model(head=True, attn_implementation=None, **fields), ids_of()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    stages = decompose_for_generation(model, {"input_ids": ids, "attention_mask": mask})
    step, given = stages["decode"]
    program = DynamoExporter().export(step, copy.deepcopy(given), DynamoConfig(dynamic=True))
    found, wanted = program(**copy.deepcopy(given)), step(**copy.deepcopy(given))
    torch.testing.assert_close(found["logits"], wanted.logits, **EXACT)


@torch.no_grad()
def test_a_free_length_without_a_mask() -> None:
    model, length = Case("decoder", "t5", {}).model(attn_implementation=None), torch.export.Dim("length", min=2, max=64)
    given, shapes = {"input_ids": ids_of(), "use_cache": False}, {"input_ids": {1: length}, "use_cache": None}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
    ids = ids_of(length=23)
    found = program(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, model(ids).last_hidden_state, **EXACT)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@torch.no_grad()
def test_an_encoder_decoder_without_a_mask_of_its_target(pair: Pair) -> None:
    model = pair.model(head=True, attn_implementation=None)
    source, target = (torch.export.Dim(name, min=2, max=64) for name in ("source", "target"))

    def inputs(read: int, said: int) -> dict[str, Any]:
        ids = {"input_ids": ids_of(length=read), "decoder_input_ids": ids_of(length=said)}
        return {**ids, "attention_mask": torch.ones(2, read), "use_cache": False}

    shapes = {"input_ids": {1: source}, "decoder_input_ids": {1: target}, "attention_mask": {1: source}, "use_cache": None}
    program = torch.export.export(model, (), inputs(11, 7), dynamic_shapes=shapes, strict=False).module()
    for lengths in ((17, 4), (5, 30)):
        given = inputs(*lengths)
        torch.testing.assert_close(program(**given).logits, model(**given).logits, **EXACT)


@pytest.mark.parametrize("mask", ["attention_mask", "reset_mask"])
@torch.no_grad()
def test_a_masked_pass_has_operations_that_onnx_knows(mask: str) -> None:
    """ONNX has no running maximum."""
    model, ids = Case("decoder", "t5", {}).model(head=True, attn_implementation=None), ids_of()
    given = torch.ones_like(ids)
    given[0, 3:5] = 0
    program = torch.export.export(model, (), {"input_ids": ids, mask: given, "use_cache": False}, strict=False)
    assert not [node.name for node in program.graph.nodes if "cummax" in node.name]
    found, wanted = program.module()(input_ids=ids, use_cache=False, **{mask: given}), model(ids, **{mask: given})
    torch.testing.assert_close(found.logits, wanted.logits, **EXACT)
