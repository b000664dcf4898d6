"""Transformer-XL over several segments against the original code and transformers 4.35, memories included."""

from typing import Any

import pytest
import torch
from golden_reader import assert_gradients
from golden_reader import assert_outputs
from golden_reader import case_names
from golden_reader import golden
from golden_reader import memories

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderModel
from hf_relpos import SegmentMemory

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
LAYER = {
    "dec_attn.o_net.weight": "attention.o_proj.weight", "dec_attn.layer_norm.weight": "attention_norm.weight",
    "dec_attn.layer_norm.bias": "attention_norm.bias", "pos_ff.CoreNet.0.weight": "mlp.up_proj.weight",
    "pos_ff.CoreNet.0.bias": "mlp.up_proj.bias", "pos_ff.CoreNet.3.weight": "mlp.down_proj.weight",
    "pos_ff.CoreNet.3.bias": "mlp.down_proj.bias", "pos_ff.layer_norm.weight": "mlp_norm.weight",
    "pos_ff.layer_norm.bias": "mlp_norm.bias",
}  # fmt: skip


def transformer_xl(settings: dict[str, Any]) -> RelPosDecoderModel:
    """The model that a Transformer-XL configuration names, in float64."""
    mem_len, clamp = settings["mem_len"], settings["clamp_len"]
    config = RelPosDecoderConfig(
        **SIZES, norm_position="post", scale_embedding=True, hidden_act="relu", mlp_bias=True, mem_len=mem_len,
        sliding_window=mem_len if settings["same_length"] else None, position_scheme="transformer_xl",
        position_parameters={"clamp_len": clamp if clamp > 0 else None}, attn_implementation="eager",
    )  # fmt: skip
    return RelPosDecoderModel(config).double().eval()


def mapped(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The weights of both implementations under this package's names; the original shares u and v among the layers."""
    found = {"embed_tokens.weight": weights[f"{prefix}word_emb.emb_layers.0.weight"]}
    for index in range(2):
        layer, scheme = f"{prefix}layers.{index}.", f"position_schemes.{index}.transformer_xl."
        found |= {f"layers.{index}.{new}": weights[layer + old] for old, new in LAYER.items()}
        for part, piece in zip("qkv", weights[f"{layer}dec_attn.qkv_net.weight"].chunk(3), strict=True):
            found[f"layers.{index}.attention.{part}_proj.weight"] = piece
        found[f"{scheme}distance_projection.weight"] = weights[f"{layer}dec_attn.r_net.weight"]
        for old, new in (("r_w_bias", "key_offset"), ("r_r_bias", "distance_offset")):
            found[scheme + new] = weights[old] if old in weights else weights[f"{layer}dec_attn.{old}"]
    return found


def stream(
    model: Any, weights: dict[str, torch.Tensor], segments: list[torch.Tensor], memory: Any, **kwargs: Any
) -> list[Any]:
    """The outputs of all segments, one after the other."""
    outputs = []
    for ids in segments:
        outputs.append(torch.func.functional_call(model, weights, (ids,), {"memory": memory, **kwargs}))
        memory = outputs[-1].memory
    return outputs


@pytest.mark.parametrize("name, case", case_names("kimi_attn0_postln"))
def test_the_original(name: str, case: str) -> None:
    """Three segments of the paper's own code, from an empty memory: hidden states, losses, memories, gradients."""
    reader = golden(name, case)
    settings = reader.meta["cases"][case]["config"]
    weights = {key: weight.requires_grad_() for key, weight in reader.weights().items()}
    inputs = reader.inputs(case)
    segments = [ids.T for ids in inputs["data"]]
    outputs: dict[str, Any] = {}
    held = 0
    for index, output in enumerate(stream(transformer_xl(settings), mapped(weights, ""), segments, None)):
        states = output.last_hidden_state
        logits = states @ weights["crit.out_layers.0.weight"].T + weights["crit.out_layers.0.bias"]
        targets = inputs["target"][index].T
        held = min(held + targets.shape[1], settings["mem_len"])
        outputs[f"seg{index}"] = {
            "hidden": states.transpose(0, 1),
            "nll": torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, -1).T,
            "mems": memories(output, held),
        }
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)


@pytest.mark.parametrize("name, case", case_names("transfoxl_hf_div1", "transfoxl_hf_div1_clamp"))
def test_transformers_of_old(name: str, case: str) -> None:
    """TransfoXL of transformers 4.35: given no memory, it starts from zeros that are attended to, so here too."""
    reader = golden(name, case)
    settings = {**reader.meta["config_base"], **reader.meta["cases"][case]["config"]}
    weights = {key: weight.requires_grad_() for key, weight in reader.weights().items()}
    embeddings = weights["transformer.word_emb.emb_layers.0.weight"]
    inputs, slots = reader.inputs(case), settings["mem_len"]
    held = 0 if "mems0" in inputs else slots
    zeros = torch.zeros(2, 2, slots, 32, dtype=torch.float64)
    start = SegmentMemory(zeros, torch.full((2,), held))
    kwargs = {"output_attentions": True, "output_hidden_states": True}
    outputs: dict[str, Any] = {}
    found = stream(transformer_xl(settings), mapped(weights, "transformer."), inputs["input_ids"], start, **kwargs)
    for index, output in enumerate(found):
        logits = output.last_hidden_state @ embeddings.T + weights["crit.out_layers.0.bias"]
        held = min(held + output.last_hidden_state.shape[1], slots)
        outputs[f"seg{index}"] = {
            "hidden": output.last_hidden_state,
            "logprobs": logits.log_softmax(-1),
            "hidden_layers": list(output.hidden_states),
            "attn0": output.attentions[0],
            "mems": memories(output, held),
        }
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)
