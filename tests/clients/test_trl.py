"""TRL: the loss that its trainers log is that of documents each read alone, however they are packed."""

import math
import pathlib
from typing import Any

import pytest
import torch
from client_models import DECODERS_AND_LLAMA
from client_models import Kind
from client_models import asks_of
from transformers import AutoModelForCausalLM

from hf_relpos.data.tokenizers import build_byte_tokenizer

asks = asks_of("trl")
pytestmark = pytest.mark.clients
TOKENIZER = build_byte_tokenizer()
FIELDS = {
    "vocab_size": len(TOKENIZER),
    "pad_token_id": TOKENIZER.pad_token_id,
    "bos_token_id": TOKENIZER.bos_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
}
DOCUMENTS = [
    TOKENIZER(text).input_ids for text in ("a first text", "a second one, longer than a row of packing holds", "third", "x y")
]
ROWS = [
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "capital of France? ", "completion": "Paris, on the Seine"},
    {"prompt": "say hi ", "completion": "hi hi hi"},
    {"prompt": "long ", "completion": "x" * 20},
]
LENGTH = 24


def make(kind: Kind) -> Any:
    return kind.model("AutoModelForCausalLM", dtype=torch.float32, **FIELDS)


@torch.no_grad()
def loss_of(model: Any, pieces: list[tuple[list[int], int]]) -> float:
    """Return the mean loss of a token over pieces that are read alone; of each, the first so many tokens are no targets."""
    total, count = 0.0, 0
    for tokens, skipped in pieces:
        ids = torch.tensor([tokens])
        losses = torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="none")
        total, count = total + float(losses[max(skipped - 1, 0) :].sum()), count + len(tokens) - max(skipped, 1)
    return total / count


def logged(trainer: Any, name: str = "loss") -> float:
    trainer.train()
    return float(next(row[name] for row in trainer.state.log_history if name in row))


def common(folder: pathlib.Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of one step that changes nothing, on a processor."""
    fixed = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}
    fixed |= {"max_steps": 1, "logging_steps": 1, "learning_rate": 1e-12, "disable_tqdm": True}
    return {**fixed, **settings}


def sft(model: Any, rows: list[dict[str, Any]], folder: pathlib.Path, **settings: Any) -> float:
    """Return the loss that `SFTTrainer` logs."""
    from datasets import Dataset
    from trl import SFTConfig
    from trl import SFTTrainer

    arguments = SFTConfig(**common(folder, **settings))
    return logged(SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=build_byte_tokenizer()))


@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"per_device_train_batch_size": 4}, id="batch", marks=asks("SFT of prompts and completions, padded")),
        pytest.param(
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
            id="accumulated",
            marks=asks("SFT, one row at a time, accumulated"),
        ),
        pytest.param(
            {"per_device_train_batch_size": 4, "padding_free": True, "max_length": None},
            id="padding_free",
            marks=asks("SFT, padding_free"),
        ),
        pytest.param(
            {"per_device_train_batch_size": 1, "packing": True, "max_length": 128},
            id="packed",
            marks=asks("SFT of prompts and completions, packed"),
        ),
        pytest.param(
            {"per_device_train_batch_size": 4, "gradient_checkpointing": False, "loss_type": "chunked_nll"},
            id="chunked",
            marks=asks("SFT, loss in chunks (`chunked_nll`)"),
        ),
    ],
)
def test_completions(kind: Kind, settings: dict[str, Any], tmp_path: pathlib.Path) -> None:
    pytest.importorskip("trl")
    model = make(kind)
    pieces = []
    for row in ROWS:
        prompt = TOKENIZER(row["prompt"]).input_ids
        pieces.append(([*prompt, *TOKENIZER(row["completion"]).input_ids, TOKENIZER.eos_token_id], len(prompt)))
    wanted = loss_of(model, pieces)
    assert math.isclose(sft(model, ROWS, tmp_path, **settings), wanted, abs_tol=2e-3)


def pieces_of(strategy: str) -> list[tuple[list[int], int]]:
    """Return what each strategy keeps together: documents cut at the row's end or in fragments, or rows of all text."""
    if strategy == "wrapped":
        joined = sum(DOCUMENTS, [])
        return [(joined[start : start + LENGTH], 0) for start in range(0, len(joined), LENGTH)]
    starts = range(0, max(map(len, DOCUMENTS)), LENGTH) if strategy == "bfd_split" else [0]
    return [(document[start : start + LENGTH], 0) for document in DOCUMENTS for start in starts if document[start:]]


@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, id=name, marks=asks(f"SFT, packing by `{name}`")) for name in ("bfd", "bfd_split", "wrapped")],
)
def test_packing(kind: Kind, strategy: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("trl")
    model, rows = make(kind), [{"input_ids": document} for document in DOCUMENTS]
    settings = {"packing": True, "packing_strategy": strategy, "max_length": LENGTH, "per_device_train_batch_size": 8}
    assert math.isclose(sft(model, rows, tmp_path, **settings), loss_of(model, pieces_of(strategy)), abs_tol=2e-3)


@asks("DPO: log-probabilities as by hand, and it learns to prefer")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_dpo(kind: Kind, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import DPOConfig
    from trl import DPOTrainer

    rows = [{"prompt": "say hi ", "chosen": "hi", "rejected": "never"}, {"prompt": "2+2=", "chosen": "4", "rejected": "55"}]
    make(kind).save_pretrained(tmp_path / "model")  # the model of reference is loaded from where the model was
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompts = [TOKENIZER(row["prompt"]).input_ids for row in rows]
    ends = [[*TOKENIZER(row["chosen"]).input_ids, TOKENIZER.eos_token_id] for row in rows]
    pieces = [(prompt + end, len(prompt)) for prompt, end in zip(prompts, ends, strict=True)]
    wanted = -loss_of(model, pieces) * sum(map(len, ends)) / len(rows)
    settings = common(tmp_path, max_steps=6, learning_rate=1e-3, per_device_train_batch_size=2, lr_scheduler_type="constant")
    trainer = DPOTrainer(
        model, args=DPOConfig(**settings), train_dataset=Dataset.from_list(rows), processing_class=build_byte_tokenizer()
    )
    assert math.isclose(logged(trainer, "logps/chosen"), wanted, rel_tol=1e-3)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert math.isclose(losses[0], math.log(2), abs_tol=1e-3) and losses[-1] < losses[0] - 0.01
