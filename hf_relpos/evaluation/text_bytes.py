"""Count the bytes of text that a language model predicts, by which bits per byte are divided."""

import os
from collections.abc import Iterable
from itertools import chain
from typing import Any
from typing import NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.tables import cached_facts
from hf_relpos.data.tables import read_rows
from hf_relpos.data.tokenizing import batch_rows
from hf_relpos.data.tokenizing import encode
from hf_relpos.data.tokenizing import ends_tokens_at_lines
from hf_relpos.data.tokenizing import join_rows
from hf_relpos.data.tokenizing import tokenizer_key

# Characters that a message shows of a text.
SHOWN = 20


class TextBytes(NamedTuple):
    """The UTF-8 bytes that targets spell; None, with the reason, if the tokenizer does not give the text back.

    Tokens that stand for nothing certain (an unknown word, a letter of either case) are cheap to predict: the bits for them are
    not those that the text needs.
    """

    count: int | None
    lost: str | None = None


def count_bytes(documents: Dataset, tokenizer: PreTrainedTokenizerBase, targets: int | None = None) -> TextBytes:
    """Count the bytes of the text that is predicted, or take them from the cache of `datasets`.

    Args:
        documents: rows with a column `text`, and perhaps `continues`, as `Documents` has them.
        tokenizer: gave the targets.
        targets: count those of the first targets only, as blocks have them: a document's tokens and its end.
    """
    key = [documents._fingerprint, tokenizer_key(tokenizer), targets]
    return TextBytes(**cached_facts("bytes", key, lambda: count_row_bytes(read_rows(documents), tokenizer, targets)._asdict()))


def count_row_bytes(
    rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, targets: int | None = None
) -> TextBytes:
    """Count the bytes of the text of rows, as `count_bytes` does."""
    count, changed, shown = 0, 0, ""
    left = float("inf") if targets is None else targets
    rows = rows if ends_tokens_at_lines(tokenizer) else join_rows(rows)
    begun = False
    for text, continues, ids in chain.from_iterable(
        zip(*batch, encode(tokenizer, batch.texts), strict=True) for batch in batch_rows(rows)
    ):
        left -= begun and not continues  # the end of the document before
        begun = True
        if left <= 0:
            break
        returned = _decode(tokenizer, ids)
        if returned != text:
            changed, shown = changed + 1, shown or _difference(text, returned)
        count += len(text.encode()) if len(ids) <= left else bytes_spelled(tokenizer, ids, int(left), text)
        left -= len(ids)
    if changed:
        return TextBytes(None, f"the tokenizer does not give the text back ({changed} documents, first {shown})")
    return TextBytes(count)


def bytes_spelled(tokenizer: PreTrainedTokenizerBase, ids: list[int], kept: int, text: str) -> int:
    """Return the bytes of the beginning of a text that its first tokens spell.

    Tokens of a byte-level vocabulary have a character for each byte. Of any other, a character that is not whole is not counted.
    """
    tokens: Any = tokenizer.convert_ids_to_tokens(ids)
    if sum(map(len, tokens)) == len(text.encode()):
        return sum(map(len, tokens[:kept]))
    return len(os.path.commonprefix([_decode(tokenizer, ids[:kept]), text]).encode())


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _difference(text: str, returned: str) -> str:
    at = len(os.path.commonprefix([text, returned]))
    return f"{text[at : at + SHOWN]!r} as {returned[at : at + SHOWN]!r}"
