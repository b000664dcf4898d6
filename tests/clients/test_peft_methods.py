"""PEFT: each method by its default targets, trained, saved, loaded, merged and generated with; position tables trained too."""

import pathlib
from itertools import product
from typing import Any

import pytest
import torch
from client_models import ALL
from client_models import BERT
from client_models import DECODERS_AND_LLAMA
from client_models import ENCODERS
from client_models import Kind
from client_models import asks_of
from matrix import DIRECTION
from matrix import MATRIX
from matrix import SIZES
from matrix import Case
from matrix import ids_of
from safetensors.torch import load_file
from test_peft import fresh
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import hf_relpos
from hf_relpos.model.scheme_registry import scheme_class

asks = asks_of("peft")
pytestmark = pytest.mark.clients
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
GATED = {"intermediate_size": 32, "gated_mlp": True}
"""A feed-forward layer as Llama's, so that IA3 finds a `down_proj`; methods that cut layers into blocks need a width of blocks."""
CLASSES = torch.tensor([0, 1])


def task(kind: Kind) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Return the Auto class of a kind, PEFT's name of its task, and labels."""
    if kind.config().is_encoder_decoder:
        return "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", {"labels": ids_of(seed=1)}
    if kind is BERT or kind in ENCODERS.values():
        return "AutoModelForSequenceClassification", "SEQ_CLS", {"labels": CLASSES}
    return "AutoModelForCausalLM", "CAUSAL_LM", {"labels": ids_of()}


def base(kind: Kind) -> Any:
    fields = {} if kind.peer else GATED
    return kind.model(task(kind)[0], dtype=torch.float32, **fields)


def trained(model: Any, **labels: torch.Tensor) -> Any:
    """Return a model whose trainable weights took a step; each of them has a gradient."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    model.train()(input_ids=ids_of(), **labels).loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    optimizer.step()
    return model.eval()


def settings(method: str, task_type: str) -> Any:
    """Return PEFT's configuration of a method: its defaults, or the smallest that has a meaning."""
    import peft

    prompt = {"num_virtual_tokens": 3, "task_type": task_type}
    makers = {
        "LoRA": lambda: peft.LoraConfig(task_type=task_type),
        "DoRA": lambda: peft.LoraConfig(use_dora=True, task_type=task_type),
        "IA3": lambda: peft.IA3Config(task_type=task_type),
        "AdaLoRA": lambda: peft.AdaLoraConfig(total_step=10, task_type=task_type),
        "VeRA": lambda: peft.VeraConfig(r=4, task_type=task_type),
        "OFT": lambda: peft.OFTConfig(oft_block_size=4, task_type=task_type),
        "norms (LN tuning)": lambda: peft.LNTuningConfig(task_type=task_type),
        "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 4], task_type=task_type),
        "prompt tuning": lambda: peft.PromptTuningConfig(**prompt),
        "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=16, **prompt),
        "prefix tuning": lambda: peft.PrefixTuningConfig(**prompt),
        "prefix tuning with a projection": lambda: peft.PrefixTuningConfig(
            prefix_projection=True, encoder_hidden_size=16, **prompt
        ),
    }
    return makers[method]()


WRAPPING = ["LoRA", "DoRA", "IA3", "AdaLoRA", "VeRA", "OFT", "norms (LN tuning)", "trainable tokens"]
PROMPTS = ["prompt tuning", "p-tuning", "prefix tuning", "prefix tuning with a projection"]


def answers(model: Any, kind: Kind) -> torch.Tensor:
    given = {"decoder_input_ids": ids_of(seed=1)} if kind.config().is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids_of(), **given).logits


def rows(methods: list[str], what: str) -> list[Any]:
    """Return values for `parametrize("method", ...)`, each with the row of its own."""
    return [pytest.param(method, marks=asks(f"{method}: {what}"), id=method) for method in methods]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("method", rows(WRAPPING, "trained with default targets, saved, loaded and merged"))
def test_a_method_that_wraps_layers(kind: Kind, method: str, tmp_path: pathlib.Path, record_property: Any) -> None:
    peft = pytest.importorskip("peft")
    _, task_type, labels = task(kind)
    try:
        model = peft.get_peft_model(base(kind), settings(method, task_type))
    except ValueError as error:
        assert kind.peer, error
        return record_property("says", f"refused: {str(error).splitlines()[0]}")
    tuned = trained(model, **labels)
    wanted = answers(tuned, kind)
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(kind), tmp_path).eval()
    torch.testing.assert_close(answers(loaded, kind), wanted, **CLOSE)
    torch.testing.assert_close(answers(loaded.merge_and_unload(), kind), wanted, **CLOSE)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("method", rows(PROMPTS, "trained, saved and loaded"))
def test_a_method_of_prompts(kind: Kind, method: str, tmp_path: pathlib.Path, record_property: Any) -> None:
    peft = pytest.importorskip("peft")
    _, task_type, labels = task(kind)
    try:
        tuned = trained(peft.get_peft_model(base(kind), settings(method, task_type)), **labels)
    except ValueError as error:
        refused = kind.name == "decoder gates" and "PEFT's prefix tuning" in str(error)
        assert refused or "does not support past key values" in str(error), error
        return record_property("says", "refused: " + ("a learned prefix has no gates" if refused else str(error)))
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(kind), tmp_path).eval()
    torch.testing.assert_close(answers(loaded, kind), answers(tuned, kind), **CLOSE)


def last_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits after a text and after each of four tokens more, each by a full pass over all that was read."""
    found = []
    for _ in range(4):
        found.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1])
        ids = torch.cat([ids, found[-1].argmax(-1, keepdim=True)], 1)
    return torch.stack(found)


REPEATED = "other tokens than full passes: PEFT puts the prompt before the tokens of each cached step, as it looks for `past_key_values`"


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
@pytest.mark.parametrize("method", ["LoRA", *PROMPTS])
@torch.no_grad()
def test_generation(kind: Kind, method: str, use_cache: bool, request: Any, record_property: Any) -> None:
    """As full passes over the prompt and all tokens, whose logits are compared."""
    peft = pytest.importorskip("peft")
    request.node.add_marker(asks(f"{method}: generate with use_cache={use_cache}, as full passes"))
    if kind.name == "decoder gates" and method.startswith("prefix"):
        pytest.skip("refused in training")
    model = peft.get_peft_model(base(kind), settings(method, "CAUSAL_LM")).eval()
    wanted = last_logits(model, ids_of())
    asked = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found = torch.stack(model.generate(input_ids=ids_of(), use_cache=use_cache, **asked).logits)
    if not torch.allclose(found, wanted, **CLOSE) and (kind.peer or use_cache and method in PROMPTS[:2]):
        return record_property("says", REPEATED if method in PROMPTS[:2] else "other tokens than full passes")
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
@pytest.mark.parametrize("method", rows(PROMPTS[:1], "generate with a cache and padding"))
def test_a_prompt_that_is_repeated_is_refused_behind_padding(kind: Kind, method: str, record_property: Any) -> None:
    """The mask tells: it covers the prompt once."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(base(kind), settings(method, "CAUSAL_LM")).eval()
    mask = torch.ones_like(ids_of())
    mask[0, :2] = 0
    try:
        model.generate(input_ids=ids_of(), attention_mask=mask, max_new_tokens=3, do_sample=False)
    except ValueError as error:
        assert "attention_mask covers 15 tokens, expected 18" in str(error)
        return record_property("says", f"refused: {error}")
    assert kind.peer
    record_property("says", "other tokens than full passes, without a word")


TABLES = "position tables trained whole (`modules_to_save`), saved, loaded and merged"
SAVED = {row.scheme: row.variants[0] for row in MATRIX}


@pytest.mark.row("peft", TABLES, kind="decoder and encoder, every scheme")
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


@pytest.mark.row("peft", TABLES, kind="BERT", peer=True)
def test_positions_of_bert(tmp_path: pathlib.Path) -> None:
    peft = pytest.importorskip("peft")
    saved = peft.LoraConfig(modules_to_save=["position_embeddings"])
    tuned = trained(peft.get_peft_model(BERT.model("AutoModelForMaskedLM", dtype=torch.float32), saved), labels=ids_of())
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(BERT.model("AutoModelForMaskedLM", dtype=torch.float32), tmp_path).eval()
    torch.testing.assert_close(answers(loaded, BERT), answers(tuned, BERT), **CLOSE)


HEADS = {
    "SEQ_CLS": ("ForSequenceClassification", {"labels": torch.tensor([0, 1])}),
    "TOKEN_CLS": ("ForTokenClassification", {"labels": ids_of() % 2}),
    "QUESTION_ANS": ("ForQuestionAnswering", {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])}),
}


def head(family: str, task_type: str) -> Any:
    """Return the class of a family's head, or None where it has none."""
    return getattr(hf_relpos, f"RelPos{family}{HEADS[task_type][0]}", None)


@pytest.mark.row(
    "peft", "a new head is trained and saved without being told (SEQ_CLS, TOKEN_CLS, QUESTION_ANS)", kind="all families"
)
@pytest.mark.parametrize(
    "family, task_type", [pair for pair in product(("Decoder", "Encoder", "Seq2Seq"), HEADS) if head(*pair)]
)
def test_a_task_trains_and_saves_its_head(family: str, task_type: str, tmp_path: pathlib.Path) -> None:
    """Without being told, as for transformers' own models."""
    peft = pytest.importorskip("peft")
    kind, labels = head(family, task_type), HEADS[task_type][1]
    config = kind.config_class(position_scheme="t5", **SIZES)
    tuned = trained(peft.get_peft_model(fresh(kind, config), peft.LoraConfig(task_type=task_type)), **labels)
    tuned.save_pretrained(tmp_path)
    assert any(kind.linear_name in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    other = fresh(kind, config)
    with torch.no_grad():
        getattr(other, kind.linear_name).weight.normal_()
    loaded = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    wanted, found = (model(input_ids=ids_of()).to_tuple()[0] for model in (tuned, loaded))
    torch.testing.assert_close(found, wanted, **CLOSE)


TUNED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "attention_norm", "mlp_norm", "norm"}


@pytest.mark.row("peft", "default targets of LoRA, IA3, norms and all that have a table, as Llama's", kind="all families")
@pytest.mark.parametrize(
    "model_class", ["RelPosDecoderForCausalLM", "RelPosEncoderForMaskedLM", "RelPosSeq2SeqForConditionalGeneration"]
)
def test_peft_finds_the_layers_to_tune(model_class: str) -> None:
    """Each method by its defaults, as for Llama: LoRA, IA3 and all that have a table."""
    peft = pytest.importorskip("peft")
    kind = getattr(hf_relpos, model_class)
    config = kind.config_class(position_scheme="alibi", **{**SIZES, "gated_mlp": True, "attn_implementation": None})
    lora = peft.get_peft_model(kind(config), peft.LoraConfig())
    assert {name.rpartition(".")[2] for name in lora.base_model.targeted_module_names} == {"q_proj", "v_proj"}
    ia3 = peft.get_peft_model(kind(config), peft.IA3Config())
    assert {name.rpartition(".")[2] for name in ia3.base_model.targeted_module_names} == {"k_proj", "v_proj", "down_proj"}
    norms = peft.get_peft_model(kind(config), peft.LNTuningConfig())
    assert {name.rpartition(".")[2] for name in norms.base_model.targeted_module_names} == {
        "attention_norm",
        "mlp_norm",
        "norm",
    }
    for table in vars(peft.utils.constants).values():
        if isinstance(table, dict) and "llama" in table:
            assert set(table[config.model_type]) <= TUNED


@pytest.mark.row("peft", "default targets of a model of remote code", kind="decoder rotary")
def test_peft_learns_of_models_of_remote_code(tmp_path: pathlib.Path) -> None:
    """A saved model's own code tells it, also where PEFT was loaded later than the model was made."""
    peft = pytest.importorskip("peft")
    Case("decoder", "rope", {}).model(head=True).save_pretrained(tmp_path)
    model_class: Any = get_class_from_dynamic_module("modeling_relpos.RelPosDecoderForCausalLM", str(tmp_path))
    model = model_class.from_pretrained(tmp_path)
    assert type(model.config).__module__.startswith("transformers_modules")
    for table in vars(peft.utils.constants).values():
        if isinstance(table, dict):
            table.pop(model.config.model_type, None)
    tuned = peft.get_peft_model(model, peft.LoraConfig()).base_model.targeted_module_names
    assert {name.rpartition(".")[2] for name in tuned} == {"q_proj", "v_proj"}
