"""Documents to blocks: tokenized, run on one after another, and cut into rows of one length.

A document is its start token and its tokens. `reset_mask` is 1 on the start token, so that a model can keep documents
apart; `shift_labels` holds the token to be predicted at each place, across the ends of blocks, so that no target is
lost; `labels` are the same tokens in place, as transformers has them. -100 marks padding and nothing else.

Text passes through in parts of about a megabyte, so that memory does not grow with it.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from datasets import IterableDataset
from transformers import DataCollatorForLanguageModeling
from transformers import PreTrainedTokenizerBase
from transformers import default_data_collator

from hf_relpos.data.tables import cached_table
from hf_relpos.data.tokenizers import end_token_id
from hf_relpos.data.tokenizers import pad_token_id
from hf_relpos.data.tokenizing import TokenPart
from hf_relpos.data.tokenizing import tokenize_documents
from hf_relpos.data.tokenizing import tokenize_rows
from hf_relpos.data.tokenizing import tokenizer_key

IGNORED = -100
# Tokens that are masked at a time.
MASKED = 1 << 22
Columns = dict[str, np.ndarray]


def pack(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    keep_tail: bool = False,
    num_proc: int | None = None,
) -> Dataset:
    """Tokenize documents and cut them into blocks, or take them from the cache of `datasets`.

    Args:
        documents: rows with a column `text`, and perhaps `continues`, as `Documents` has them.
        tokenizer: gives the tokens, and the tokens around a document.
        block_size: tokens in a block.
        keep_tail: pad the last block, for evaluation, instead of dropping what does not fill one, for training.
        num_proc: processes that tokenize.

    Returns:
        Rows `input_ids`, `labels`, `shift_labels`, `reset_mask`, and `attention_mask` if there is padding, mapped into memory.
        No token stands in two blocks.

    Raises:
        ValueError: the text to train on has fewer tokens than a block.
    """
    padding = pad_token_id(tokenizer) if keep_tail else None
    key = [documents._fingerprint, tokenizer_key(tokenizer), block_size, keep_tail]
    # Half the size on the disk, where that holds all tokens.
    token = pa.int16() if len(tokenizer) < np.iinfo(np.int16).max else pa.int32()
    schema = pa.schema({name: pa.list_(token) for name in ("input_ids", "labels", "shift_labels")})
    for name in ("reset_mask", "attention_mask"):
        schema = schema.append(pa.field(name, pa.list_(pa.int8())))

    def batches(facts: dict[str, int]) -> Iterator[pa.RecordBatch]:
        facts |= {"tokens": 0, "padding": 0}
        parts = tokenize_documents(documents, tokenizer, num_proc)
        for columns in cut_parts(_count(parts, facts), block_size, end_token_id(tokenizer), padding):
            facts["padding"] += int((columns["attention_mask"] == 0).sum())
            yield pa.record_batch([_lists(columns[field.name], field.type) for field in schema], schema=schema)

    blocks, facts = cached_table("blocks", key, schema, batches)
    if not len(blocks):
        raise ValueError(f"{facts['tokens']} tokens found, fewer than one block (block_size={block_size})")
    return (blocks if facts["padding"] else blocks.remove_columns("attention_mask")).with_format("torch")


def _count(parts: Iterable[TokenPart], facts: dict[str, int]) -> Iterator[TokenPart]:
    for part in parts:
        facts["tokens"] += len(part.tokens)
        yield part


def _lists(rows: np.ndarray, kind: pa.ListType) -> pa.Array:
    count, size = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * size
    return pa.ListArray.from_arrays(offsets, pa.array(rows.ravel(), kind.value_type), type=kind)


def pack_stream(documents: IterableDataset, tokenizer: PreTrainedTokenizerBase, block_size: int) -> IterableDataset:
    """Do the same for streamed training text; what does not fill a block is dropped of every thousand rows (of files: sixteen)."""
    cut = partial(_cut_rows, tokenizer=tokenizer, block_size=block_size)
    names = documents.column_names or ["text"]
    rows = 16 if "continues" in names else 1000  # those of files may have a million characters
    return documents.map(cut, batched=True, batch_size=rows, remove_columns=names).with_format("torch")


def tokenize_stream(documents: IterableDataset, tokenizer: PreTrainedTokenizerBase) -> IterableDataset:
    """Tokenize streamed documents, for lanes, which cut them into blocks."""

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        tokens, starts = tokenize_rows(tokenizer, [row["text"]], [bool(row.get("continues"))])
        return {"input_ids": tokens.tolist(), "reset_mask": starts.tolist()}

    return documents.map(tokenize, remove_columns=documents.column_names or ["text"])


def _cut_rows(rows: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, block_size: int) -> Columns:
    part = tokenize_rows(tokenizer, rows["text"], rows.get("continues"))
    return _gather(cut_parts([part], block_size, end_token_id(tokenizer)))


def cut_blocks(documents: Sequence[Any], block_size: int, end: int, padding: int | None = None) -> Columns:
    """Cut tokenized documents into blocks.

    Args:
        documents: the tokens of each document, with its start token.
        block_size: tokens in a block.
        end: the token to be predicted after the last one of a document.
        padding: the token that fills the last block; None drops what does not fill one.

    Returns:
        The columns of the blocks, each `(blocks, block_size)`.
    """
    tokens = np.concatenate([np.asarray(tokens, dtype=np.int32) for tokens in documents])
    starts = np.zeros(len(tokens), dtype=np.int8)
    starts[np.cumsum([0, *map(len, documents[:-1])])] = 1
    return _gather(cut_parts([TokenPart(tokens, starts)], block_size, end, padding))


def cut_parts(parts: Iterable[TokenPart], block_size: int, end: int, padding: int | None = None) -> Iterator[Columns]:
    """Cut text that comes in parts into blocks, as `cut_blocks` does; `attention_mask` is always there.

    A block is given away when the token after it is known.
    """
    tokens, starts = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int8)
    for part in parts:
        tokens, starts = np.append(tokens, part.tokens), np.append(starts, part.starts)
        whole = max(0, len(tokens) - 1) // block_size * block_size
        if whole:
            following = np.where(starts[1 : whole + 1] == 1, end, tokens[1 : whole + 1])
            yield _columns(tokens[:whole], following, starts[:whole], block_size, 0)
            tokens, starts = tokens[whole:], starts[whole:]
    if padding is None:
        tokens, starts, missing = *(values[: len(tokens) // block_size * block_size] for values in (tokens, starts)), 0
    else:
        missing = -len(tokens) % block_size
    following = np.append(np.where(starts[1:] == 1, end, tokens[1:]), [end] * min(1, len(tokens)))
    yield _columns(tokens, following, starts, block_size, missing, padding or 0)


def _columns(
    tokens: np.ndarray, following: np.ndarray, starts: np.ndarray, block_size: int, missing: int, padding: int = 0
) -> Columns:
    filled = {
        "input_ids": (tokens, padding),
        "labels": (tokens, IGNORED),
        "shift_labels": (following.astype(np.int32), IGNORED),
        "reset_mask": (starts, 0),
        "attention_mask": (np.ones(len(tokens), dtype=np.int8), 0),
    }
    return {
        name: np.pad(values, (0, missing), constant_values=fill).reshape(-1, block_size)
        for name, (values, fill) in filled.items()
    }


def _gather(parts: Iterable[Columns]) -> Columns:
    """Join the columns of blocks; without padding, there is no `attention_mask`."""
    gathered = list(parts)
    columns = {name: np.concatenate([part[name] for part in gathered]) for name in gathered[0]}
    if columns["attention_mask"].all():
        del columns["attention_mask"]
    return columns


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
    """Return blocks for the training of a masked language model, whose targets the collator makes anew every time."""
    return blocks.remove_columns(["labels", "shift_labels"])


def mask_once(blocks: Dataset, collator: MaskingCollator) -> Dataset:
    """Mask blocks for its evaluation, so that every evaluation asks for the same tokens, or take them from the cache."""
    plain = without_targets(blocks)
    rows = max(1, MASKED // len(plain[0]["input_ids"]))
    key = [plain._fingerprint, tokenizer_key(collator.tokenizer), collator.mlm_probability, collator.seed]
    names = dict.fromkeys([*plain.column_names, "labels"])
    schema = pa.schema({name: pa.list_(pa.int32() if name in ("input_ids", "labels") else pa.int8()) for name in names})

    def batches(facts: dict[str, int]) -> Iterator[pa.RecordBatch]:
        facts["masked"] = 0
        for start in range(0, len(plain), rows):
            batch = collator(list(plain.select(range(start, min(start + rows, len(plain))))))
            facts["masked"] += int((batch["labels"] != IGNORED).sum())
            yield pa.record_batch([_lists(batch[field.name].numpy(), field.type) for field in schema], schema=schema)

    masked, facts = cached_table("masked", key, schema, batches)
    if not facts["masked"]:
        raise ValueError(f"the text for evaluation is too short: none of its tokens was masked ({len(blocks)} blocks)")
    return masked.with_format("torch")
