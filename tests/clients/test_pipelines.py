"""Every pipeline of transformers that reads text: batches answer as texts alone, and both as plain calls."""

from typing import Any

import pytest
import torch
from client_models import DECODERS_AND_LLAMA
from client_models import Kind
from transformers import pipeline

from hf_relpos.data.tokenizers import build_byte_tokenizer

TOKENIZER = build_byte_tokenizer()
TEXTS = ["one text", "another one, which is longer", "a third"]
LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
FIELDS = {
    "vocab_size": len(TOKENIZER),
    "pad_token_id": TOKENIZER.pad_token_id,
    "bos_token_id": TOKENIZER.bos_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "id2label": LABELS,
    "label2id": {label: number for number, label in LABELS.items()},
}


def client(task: str, kind: Kind, auto: str, **settings: Any) -> Any:
    """Return a pipeline with a tiny model and the tokenizer of bytes, which pads on the left for generation."""
    tokenizer = build_byte_tokenizer()
    tokenizer.padding_side = "left" if task == "text-generation" else "right"
    make: Any = pipeline  # which is typed for literal names
    return make(task, model=kind.model(auto, **FIELDS), tokenizer=tokenizer, **settings)


def asks(what: str) -> Any:
    return pytest.mark.row("transformers: pipelines", what, package="transformers")


GREEDY = {"do_sample": False, "max_new_tokens": 6, "return_full_text": False}


@asks("text-generation, texts of unequal lengths in one batch")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_generation_in_batches(kind: Kind) -> None:
    generate = client("text-generation", kind, "AutoModelForCausalLM")
    alone = [generate(text, **GREEDY) for text in TEXTS]
    assert generate(TEXTS, batch_size=3, **GREEDY) == alone
    ids = TOKENIZER(TEXTS[0], return_tensors="pt").input_ids
    for _ in range(6):
        ids = torch.cat([ids, generate.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert alone[0][0]["generated_text"] == TOKENIZER.decode(ids[0, -6:], skip_special_tokens=True)
