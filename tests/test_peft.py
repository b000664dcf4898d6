"""PEFT's `modules_to_save`: modules that are trained whole, for which PEFT puts a wrapper in their place."""

import pathlib
from typing import Any

import pytest
import torch
from matrix import DIRECTION
from matrix import MATRIX
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
from hf_relpos.model.scheme_registry import scheme_class

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


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


def trained(model: Any, **labels: torch.Tensor) -> Any:
    """Return a model whose trainable weights took a step; each of them has a gradient."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    model.train()(input_ids=ids_of(), **labels).loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    optimizer.step()
    return model.eval()


def fresh(kind: Any, config: Any) -> Any:
    return sharpen(kind(config)).float().eval()


SAVED = {row.scheme: row.variants[0] for row in MATRIX}


@pytest.mark.parametrize("scheme", SAVED)
@pytest.mark.parametrize("whole_stack", [True, False])
def test_positions_are_trained_saved_loaded_and_merged(scheme: str, whole_stack: bool, tmp_path: pathlib.Path) -> None:
    peft = pytest.importorskip("peft")
    for family in ("decoder", "encoder"):
        if DIRECTION[family] in scheme_class(scheme).refuses:
            continue
        case = Case(family, scheme, SAVED[scheme])
        model, plain = (case.model(head=True, dtype=torch.float32) for _ in range(2))
        own = {name for name, _ in model.named_parameters() if "position_schemes" in name}
        settings = peft.LoraConfig(modules_to_save=["position_schemes" if whole_stack else scheme])
        tuned = trained(peft.get_peft_model(model, settings), labels=ids_of())
        taught = {name for name, weight in tuned.named_parameters() if weight.requires_grad and "modules_to_save" in name}
        assert len(taught) == len(own)
        tuned.save_pretrained(tmp_path / family)
        wanted = tuned(input_ids=ids_of()).logits
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / family).eval()
        torch.testing.assert_close(loaded(input_ids=ids_of()).logits, wanted, **CLOSE)
        merged = loaded.merge_and_unload()
        assert {name for name, _ in merged.named_parameters() if "position_schemes" in name} == own
        torch.testing.assert_close(merged(ids_of()).logits, wanted, **CLOSE)


HEADS = {
    "SEQ_CLS": ("ForSequenceClassification", {"labels": torch.tensor([0, 1])}),
    "TOKEN_CLS": ("ForTokenClassification", {"labels": ids_of() % 2}),
    "QUESTION_ANS": ("ForQuestionAnswering", {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])}),
}


@pytest.mark.parametrize("family", ["Decoder", "Encoder", "Seq2Seq"])
@pytest.mark.parametrize("task", HEADS)
def test_a_task_trains_and_saves_its_head(family: str, task: str, tmp_path: pathlib.Path) -> None:
    """Without being told, as for transformers' own models."""
    peft = pytest.importorskip("peft")
    name, labels = HEADS[task]
    kind = getattr(hf_relpos, f"RelPos{family}{name}", None)
    if kind is None:
        pytest.skip("no such head")
    config = kind.config_class(position_scheme="t5", **SIZES)
    tuned = trained(peft.get_peft_model(fresh(kind, config), peft.LoraConfig(task_type=task)), **labels)
    tuned.save_pretrained(tmp_path)
    assert any(kind.linear_name in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    other = fresh(kind, config)
    with torch.no_grad():
        getattr(other, kind.linear_name).weight.normal_()
    loaded = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    wanted, found = (model(input_ids=ids_of()).to_tuple()[0] for model in (tuned, loaded))
    torch.testing.assert_close(found, wanted, **CLOSE)


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
