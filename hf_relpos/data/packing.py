"""Documents to blocks: tokenized, run on one after another, and cut into rows of one length.

A document is its start token and its tokens. `reset_mask` is 1 on the start token, so that a model can keep documents
apart; `shift_labels` holds the token to be predicted at each place, across the ends of blocks, so that no target is
lost; `labels` are the same tokens in place, as transformers has them. -100 marks padding and nothing else.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets import IterableDataset
from transformers import DataCollatorForLanguageModeling
from transformers import PreTrainedTokenizerBase
from transformers import default_data_collator

from hf_relpos.data.tokenizers import end_token_id
from hf_relpos.data.tokenizers import pad_token_id
from hf_relpos.data.tokenizers import start_token_id

IGNORED = -100
TOKENIZING: dict[str, Any] = {"input_columns": "text", "batched": True, "batch_size": 100, "remove_columns": ["text"]}


def pack(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    keep_tail: bool = False,
    num_proc: int | None = None,
) -> Dataset:
    """Tokenize documents and cut them into blocks.

    Args:
        documents: rows with a column `text`.
        tokenizer: gives the tokens, and the tokens around a document.
        block_size: tokens in a block.
        keep_tail: pad the last block, for evaluation, instead of dropping what does not fill one, for training.
        num_proc: processes that tokenize.

    Returns:
        Rows `input_ids`, `labels`, `shift_labels`, `reset_mask`, and `attention_mask` if there is padding. No token
        stands in two blocks.
    """
    tokenize = partial(_tokenize, tokenizer=tokenizer)
    rows = documents.map(tokenize, desc="Tokenizing", num_proc=num_proc, **TOKENIZING).with_format("numpy")
    tokens = list(rows["input_ids"])
    found = sum(map(len, tokens))
    if not keep_tail and found < block_size:
        raise ValueError(f"{found} tokens found, fewer than one block (block_size={block_size})")
    padding = pad_token_id(tokenizer) if keep_tail else None
    columns = cut_blocks(tokens, block_size, end_token_id(tokenizer), padding)
    return Dataset.from_dict(columns).with_format("torch")


def pack_stream(documents: IterableDataset, tokenizer: PreTrainedTokenizerBase, block_size: int) -> IterableDataset:
    """The same for streamed training text; what does not fill a block is dropped of every thousand documents."""
    cut = partial(cut_blocks, block_size=block_size, end=end_token_id(tokenizer))
    tokens = documents.map(partial(_tokenize, tokenizer=tokenizer), **TOKENIZING)
    return tokens.map(cut, input_columns="input_ids", batched=True, batch_size=1000).with_format("torch")


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    # Special tokens are split: a document that quotes "<|endoftext|>" must not end there.
    found = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
    start = start_token_id(tokenizer)
    return {"input_ids": [[start, *tokens] for tokens in found["input_ids"]]}


def cut_blocks(documents: Sequence[Any], block_size: int, end: int, padding: int | None = None) -> dict[str, np.ndarray]:
    """Cut tokenized documents into blocks.

    Args:
        documents: the tokens of each document, with its start token.
        block_size: tokens in a block.
        end: the token to be predicted after the last one of a document.
        padding: the token that fills the last block; None drops what does not fill one.

    Returns:
        The columns of the blocks, each `(blocks, block_size)`.
    """
    lengths = [len(tokens) for tokens in documents]
    tokens = np.concatenate([np.asarray(tokens, dtype=np.int32) for tokens in documents])
    reset = np.zeros(len(tokens), dtype=np.int8)
    reset[np.cumsum([0, *lengths[:-1]])] = 1
    following = np.append(tokens[1:], end).astype(np.int32)
    following[:-1][reset[1:] == 1] = end
    columns = {"input_ids": (tokens, padding), "labels": (tokens, IGNORED)}
    columns |= {"shift_labels": (following, IGNORED), "reset_mask": (reset, 0)}

    missing = -len(tokens) % block_size
    if padding is None:
        kept = len(tokens) - len(tokens) % block_size
        return {name: values[:kept].reshape(-1, block_size) for name, (values, _) in columns.items()}
    if missing:
        columns["attention_mask"] = (np.ones(len(tokens), dtype=np.int8), 0)
    return {
        name: np.pad(values, (0, missing), constant_values=fill).reshape(-1, block_size)
        for name, (values, fill) in columns.items()
    }


def count_bytes(blocks: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """UTF-8 bytes of the text that the targets of blocks spell; a tokenizer that keeps all bytes makes it exact."""
    targets = np.asarray(blocks.with_format("numpy")[:]["shift_labels"])
    text = tokenizer.decode(targets[targets != IGNORED].tolist(), skip_special_tokens=True)
    return len(str(text).encode())


class MaskingCollator(DataCollatorForLanguageModeling):
    """transformers' masking of tokens, for blocks: other columns pass through, masked blocks stay as they are."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if self.seed is not None and self.generator is None:
            self.create_rng("pt")
        batch = default_data_collator(examples)
        if "labels" not in batch:
            special = torch.isin(batch["input_ids"], torch.tensor(self.tokenizer.all_special_ids))
            masked = self.torch_mask_tokens(batch["input_ids"], special_tokens_mask=special)
            batch["input_ids"], batch["labels"] = masked
        return batch


def without_targets(blocks: Any) -> Any:
    """Blocks for the training of a masked language model, whose targets the collator makes anew every time."""
    return blocks.remove_columns(["labels", "shift_labels"])


def mask_once(blocks: Dataset, collator: MaskingCollator) -> Dataset:
    """Blocks for its evaluation: masked here, so that every evaluation asks for the same tokens."""
    batch = collator(list(without_targets(blocks)))
    if not (batch["labels"] != IGNORED).any():
        raise ValueError(f"the text for evaluation is too short: none of its tokens was masked ({len(blocks)} blocks)")
    return Dataset.from_dict({name: values.numpy() for name, values in batch.items()}).with_format("torch")
