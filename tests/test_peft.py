"""PEFT's `modules_to_save`: modules that are trained whole, for which PEFT puts a wrapper in their place."""

import pathlib
from typing import Any

import pytest
import torch
from matrix import SIZES
from matrix import Case
from matrix import cases
from matrix import ids_of
from matrix import sharpen
from safetensors.torch import load_file
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForQuestionAnswering

import hf_relpos


class Wrapper(nn.Module):
    """Hands on what PEFT's wrapper hands on: calls and attributes, but neither `[]` nor iteration."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.copies = nn.ModuleDict({"default": wrapped})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("copies")["default"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.copies["default"](*args, **kwargs)


@torch.no_grad()
def check_wrapped(model: Any, *endings: str) -> None:
    """Compare what a model answers, token by token where it has a cache, with and without wrappers around some modules."""

    def answers() -> list[torch.Tensor]:
        steps = [model.generate(ids_of(), max_new_tokens=3, do_sample=False)] if model.config.causal else []
        return [model(ids_of()).logits, *steps]

    wanted, plan = answers(), model.attention_plan(6)
    names = [name for name, _ in model.named_modules() if name.endswith(endings)]
    assert names
    for name in names:
        model.set_submodule(name, Wrapper(model.get_submodule(name)))
    torch.testing.assert_close(answers(), wanted, rtol=0, atol=0)
    assert model.attention_plan(6) == plan


@pytest.mark.parametrize("case", cases())
def test_positions_behind_a_wrapper(case: Case) -> None:
    """All schemes of a stack, or each of them."""
    check_wrapped(case.model(head=True), "position_schemes")
    check_wrapped(case.model(head=True), f".{case.scheme}")


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_layers_of_several_schemes_behind_wrappers(family: str) -> None:
    """What one scheme prepares is not handed to another."""
    schemes = ["t5", "rope", "shaw"]
    check_wrapped(Case(family, schemes, {}).model(head=True, num_hidden_layers=3), *schemes)


def fresh(kind: Any, config: Any) -> Any:
    return sharpen(kind(config)).float().eval()


@pytest.mark.parametrize("kind", [hf_relpos.RelPosDecoderForQuestionAnswering, hf_relpos.RelPosEncoderForQuestionAnswering])
def test_a_head_for_answers_loads_by_its_old_name(kind: Any, tmp_path: pathlib.Path) -> None:
    """Version 0.1.0 named its layer as those of all other heads, of which none is taken for it."""
    model = fresh(kind, kind.config_class(position_scheme="t5", **SIZES))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert {"qa_outputs.weight", "qa_outputs.bias"} <= load_file(file).keys()
    old = {name.replace("qa_outputs", "classifier"): weight for name, weight in load_file(file).items()}
    save_file(old, file, {"format": "pt"})
    loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    automatic = AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    resumed = fresh(kind, model.config)
    resumed.qa_outputs.reset_parameters()
    resumed.load_state_dict(old)
    for found in (loaded, automatic, resumed):
        torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=0, atol=0)
    loaded.save_pretrained(tmp_path / "again")
    assert "qa_outputs.weight" in load_file(tmp_path / "again" / "model.safetensors")
    token_class = getattr(hf_relpos, kind.__name__.replace("QuestionAnswering", "TokenClassification"))
    fresh(token_class, token_class.config_class(position_scheme="t5", **SIZES)).save_pretrained(tmp_path / "tokens")
    _, report = kind.from_pretrained(tmp_path / "tokens", output_loading_info=True)
    assert set(report["missing_keys"]) == {"qa_outputs.weight", "qa_outputs.bias"}
