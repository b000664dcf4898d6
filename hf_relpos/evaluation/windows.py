"""Windows of text to score: the same tokens, whatever the length at which they are read."""

from typing import NamedTuple

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.tables import read_rows
from hf_relpos.data.tokenizers import start_token_id
from hf_relpos.data.tokenizing import encode
from hf_relpos.data.tokenizing import join_rows
from hf_relpos.evaluation.text_bytes import bytes_spelled
from hf_relpos.evaluation.text_bytes import count_row_bytes


class Windows(NamedTuple):
    """Tokens to score, the same at every length.

    Attributes:
        inputs, targets: `(windows, length)` tokens, and the token that follows each.
        byte_count: UTF-8 bytes that the targets spell; None where the tokenizer does not give the text back.
        notes: what to know about them, in words.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    byte_count: int | None
    notes: list[str]


def take_windows(documents: Dataset, tokenizer: PreTrainedTokenizerBase, length: int, tokens: int) -> Windows:
    """Cut windows out of documents, evenly spread over the text.

    A window lies within one document. Where no document is as long as a window, the documents are joined, and a note says so.

    Args:
        documents: rows with a column `text`, and perhaps `continues`.
        tokenizer: gives the tokens; a start token stands before each document.
        length: tokens of a window.
        tokens: about how many to score in all; at least one window is taken.

    Raises:
        ValueError: the whole text is shorter than a window.
    """
    texts = [row["text"] for row in join_rows(read_rows(documents))]
    ids = encode(tokenizer, texts)
    notes = []
    if all(len(document) < length for document in ids):
        notes.append(f"no document has {length} tokens, so the documents were joined")
        texts, ids = ["".join(texts)], [[token for document in ids for token in document]]
    found = [(number, start) for number, one in enumerate(ids) for start in range(0, len(one) - length + 1, length)]
    if not found:
        raise ValueError(f"the text has {len(ids[0])} tokens, fewer than the length {length}: ask for less, or give more text")
    count = min(len(found), max(1, tokens // length))
    chosen = [found[index * len(found) // count] for index in range(count)]
    start = start_token_id(tokenizer)
    rows = [[start, *ids[number]][at : at + length + 1] for number, at in chosen]
    table = torch.tensor(rows)
    byte_count, lost = count_row_bytes(
        ({"text": texts[number]} for number in sorted({number for number, _ in chosen})), tokenizer
    )
    if lost:
        notes.append(f"no bits per byte: {lost}")
    else:
        ends = [
            [bytes_spelled(tokenizer, ids[number], at + more, texts[number]) for more in (0, length)] for number, at in chosen
        ]
        byte_count = sum(end - begin for begin, end in ends)
    return Windows(table[:, :-1], table[:, 1:], byte_count, notes)
