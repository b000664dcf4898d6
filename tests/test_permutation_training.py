"""Permutation language models under the stock Trainer, with the collator of transformers."""

import pathlib
from typing import Any

import pytest
import torch
import transformers
from transformers import DataCollatorForPermutationLanguageModeling

from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForPermutationLM
from hf_relpos.data.permuting import PermutationCollator
from hf_relpos.data.tokenizers import build_byte_tokenizer

TOKENIZER = build_byte_tokenizer()
TEXT = "the cat sat on the mat; the dog sat on the log. "
QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}


def rows(count: int = 64, length: int = 24) -> list[dict[str, list[int]]]:
    """Blocks of a text that repeats itself, each with a special token in its middle."""
    ids = TOKENIZER(TEXT * 40).input_ids
    blocks = [ids[17 * i : 17 * i + length] for i in range(count)]
    return [{"input_ids": [*block[:11], TOKENIZER.eos_token_id, *block[12:]]} for block in blocks]


def model_of(**fields: Any) -> RelPosEncoderForPermutationLM:
    sizes = {"vocab_size": len(TOKENIZER), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return RelPosEncoderForPermutationLM(RelPosEncoderConfig(**{**sizes, "position_scheme": "xlnet", **fields}))


@pytest.mark.parametrize("collator", [DataCollatorForPermutationLanguageModeling, PermutationCollator])
@pytest.mark.parametrize("fields", [{}, {"mem_len": 8}, {"position_scheme": "rope"}], ids=["xlnet", "memory", "rope"])
def test_loss_falls(fields: dict[str, Any], collator: type, tmp_path: pathlib.Path) -> None:
    """Stock Trainer, stock collator: evaluation before and after, over the same orders."""
    transformers.set_seed(0)
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=60, learning_rate=5e-3, **QUIET)
    trainer = transformers.Trainer(
        model_of(**fields), arguments, train_dataset=rows(), eval_dataset=rows(8), data_collator=collator(TOKENIZER)
    )
    losses = []
    for step in range(2):
        torch.manual_seed(1)
        losses.append(trainer.evaluate()["eval_loss"])
        if step == 0:
            trainer.train()
    assert 5 < losses[0] < 6 and losses[1] < losses[0] / 2, losses
    logits = trainer.predict(rows(8)).predictions
    assert logits.shape == (8, 24, len(TOKENIZER)), "memory is no prediction"


def test_the_loss_is_a_mean_over_targets() -> None:
    """Accumulated over batches with unlike numbers of targets, as Trainer counts them."""
    transformers.set_seed(0)
    collate, model = DataCollatorForPermutationLanguageModeling(TOKENIZER), model_of().eval()
    batches = [collate(rows(2)), collate(rows(6)[4:])]
    counts = [int((batch["labels"] != -100).sum()) for batch in batches]
    assert counts[0] != counts[1]
    parts = [model(**batch, num_items_in_batch=sum(counts)).loss for batch in batches]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    torch.testing.assert_close(sum(parts), model(**whole).loss, rtol=1e-5, atol=1e-5)


def test_what_the_stock_collator_shows() -> None:
    """The mask token in place of every target: nothing can leak, and targets learn nothing from one another."""
    batch = DataCollatorForPermutationLanguageModeling(TOKENIZER)(rows(3))
    target = batch["labels"] != -100
    assert (batch["input_ids"][target] == TOKENIZER.mask_token_id).all() and target.any(1).all()
    assert torch.equal(batch["target_mapping"], torch.eye(24).expand(3, -1, -1)), "every token is predicted"


@torch.no_grad()
def test_no_target_reads_itself() -> None:
    """With the tokens in their places, however deep the model: not through other targets, and not through special tokens."""
    transformers.set_seed(0)
    batch, model = PermutationCollator(TOKENIZER)(rows(3)), model_of(num_hidden_layers=4, initializer_range=0.4).eval()
    logits = model(**batch).logits
    read = []
    for row, place in (batch["labels"] != -100).nonzero().tolist():
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][row, place] = 7
        moved = (model(**changed).logits - logits)[row].abs().amax(-1)
        assert moved[place] == 0
        others = (batch["labels"][row] != -100) & (torch.arange(24) != place)
        read.append(bool(moved[others].any()))
    assert any(read), "no target reads another"
