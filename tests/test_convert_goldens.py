"""Checkpoints of models that transformers removed, converted, against the numbers that these models made."""

from typing import Any

import pytest
import torch
from golden_reader import assert_gradients
from golden_reader import assert_outputs
from golden_reader import case_names
from golden_reader import golden
from golden_reader import memories

import hf_relpos
from hf_relpos import SegmentMemory
from hf_relpos.conversion.api import convert_checkpoint

Weights = dict[str, torch.Tensor]
OLD = ("transfoxl_hf_div1", "transfoxl_hf_div1_clamp", "transfoxl_hf_adaptive_div2")


def differentiable(source: str, config: dict[str, Any], weights: Weights) -> tuple[Any, Weights, Any]:
    """The converted model in float64, weights for it that are functions of the given ones, and the report."""
    ours, state, report = convert_checkpoint(source, config, weights)
    model = getattr(hf_relpos, ours.architectures[0])(ours).double().eval()
    return model, state | {name: state[origin] for name, origin in model.all_tied_weights_keys.items()}, report


def call(model: Any, weights: Weights, *inputs: torch.Tensor, **kwargs: Any) -> Any:
    return torch.func.functional_call(model, weights, inputs, {**kwargs, "output_hidden_states": True})


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-probability of each target, `(batch, sequence)`."""
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


@pytest.mark.parametrize("name, case", case_names("kimi_attn0_postln"))
def test_the_original_transformer_xl(name: str, case: str) -> None:
    """Three segments of the paper's own code: hidden states, losses, memories, gradients."""
    reader = golden(name, case)
    settings = reader.meta["cases"][case]["config"]
    given = {key: weight.requires_grad_() for key, weight in reader.weights().items()}
    model, weights, report = differentiable("transfo-xl", settings, given)
    assert report.unused.keys() == {"pos_emb.inv_freq"} and not report.missing
    inputs, memory, held = reader.inputs(case), None, 0
    outputs: dict[str, Any] = {}
    for index, (ids, targets) in enumerate(zip(inputs["data"], inputs["target"], strict=True)):
        output = call(model, weights, ids.T, memory=memory)
        memory, held = output.memory, min(held + len(ids), settings["mem_len"])
        outputs[f"seg{index}"] = {
            "hidden": output.hidden_states[-1].transpose(0, 1),
            "nll": losses_of(output.logits, targets.T).T,
            "mems": memories(output, held),
        }
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, given)


@pytest.mark.parametrize("name, case", case_names(*OLD))
def test_transformer_xl_of_old_transformers(name: str, case: str) -> None:
    """The same, and log-probabilities, with plain and adaptive embeddings; it began with zeros that it attended to."""
    reader = golden(name, case)
    settings = {**reader.meta["config_base"], **reader.meta["cases"][case]["config"]}
    given = {key: weight.requires_grad_() for key, weight in reader.weights().items()}
    model, weights, report = differentiable("transfo-xl", settings, given)
    assert report.unused.keys() == {"transformer.pos_emb.inv_freq"} and any("mem_len" in note for note in report.notes)
    inputs, slots = reader.inputs(case), settings["mem_len"]
    held = 0 if "mems0" in inputs else slots
    memory = SegmentMemory(torch.zeros(2, 2, slots, 32, dtype=torch.float64), torch.full((2,), held))
    in_order = not settings["cutoffs"] or reader.meta["cases"][case]["extra"].get("keep_order")
    outputs: dict[str, Any] = {}
    for index, (ids, labels) in enumerate(zip(inputs["input_ids"], inputs["labels"], strict=True)):
        output = call(model, weights, ids, memory=memory, labels=labels)
        trained = call(model.train(), weights, ids, memory=memory, labels=labels)
        model.eval()
        torch.testing.assert_close(trained.loss.float(), output.loss.float(), rtol=1e-5, atol=0)
        assert (trained.logits is None) == bool(settings["cutoffs"])
        losses = losses_of(output.logits[:, :-1], labels[:, 1:])
        memory, held = output.memory, min(held + ids.shape[1], slots)
        outputs[f"seg{index}"] = {
            "hidden": output.hidden_states[-1],
            "logprobs": output.logits.log_softmax(-1),
            "loss": trained.loss if settings["cutoffs"] else losses.mean(),
            "mems": memories(output, held),
        } | ({"losses": losses} if in_order else {})
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, given)


@pytest.mark.parametrize("name, case", case_names("bert_relative_key", "bert_relative_key_query_causal"))
def test_bert_with_relative_positions(name: str, case: str) -> None:
    """Encoder and decoder of transformers 4.35, hidden states of each layer, probabilities and gradients."""
    reader = golden(name, case)
    given = {key: weight.requires_grad_() for key, weight in reader.weights().items()}
    model, weights, report = differentiable("bert", reader.meta["config"], given)
    assert report.unused.keys() == {"embeddings.position_embeddings.weight"}
    inputs = reader.inputs(case)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    found = call(model, weights, inputs["input_ids"], mask, output_attentions=True)
    if case == "causal_cached_steps":
        assert_outputs(reader, case, {"steps": found.last_hidden_state})
        cache, steps = None, []
        for step in inputs["input_ids"].split(1, 1):
            output = call(model, weights, step, cache=cache, use_cache=True)
            cache = output.cache
            steps.append(output.last_hidden_state)
        assert_outputs(reader, case, {"steps": torch.cat(steps, 1)})
        return
    valid = mask.bool()[..., None]
    outputs = {
        "valid_last": found.last_hidden_state.masked_fill(~valid, 0.0),
        "hidden_states/0": found.hidden_states[0],
    }
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, given)
    for mine, theirs in zip(
        found.attentions, (reader.outputs(case)[f"attentions/{index}"] for index in range(2)), strict=True
    ):
        torch.testing.assert_close(mine * valid[:, None], theirs * valid[:, None], rtol=0, atol=1e-9)
