"""Rows of text to tokens: in parts of about a megabyte, by several processes if asked for."""

import hashlib
import json
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any
from typing import NamedTuple

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.readers import PIECE
from hf_relpos.data.tables import read_rows
from hf_relpos.data.tokenizers import end_token_id
from hf_relpos.data.tokenizers import pad_token_id
from hf_relpos.data.tokenizers import start_token_id

# Texts whose tokens tell whether a tokenizer treats the beginning of a text differently from what follows a line break.
PROBES = (("a b\n", "c d"), ("The end.\n", "12 3"), ("x\n", "-- y"))
# Characters of texts that are tokenized at a time: each token takes about a hundred bytes until its number is taken.
ENCODED = 1 << 17
# Parts that wait for each process, so that it is never idle.
AHEAD = 2
# A forked process need not import anything anew, nor the caller's script guard its main part.
START = "fork" if "fork" in multiprocessing.get_all_start_methods() else None


class TokenPart(NamedTuple):
    """Tokens of consecutive text; `starts` is 1 on the start token of each document."""

    tokens: np.ndarray
    starts: np.ndarray


class Rows(NamedTuple):
    """Texts of consecutive rows, and whether each goes on with the document of the row before."""

    texts: list[str]
    continues: list[bool]


def tokenize_documents(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, num_proc: int | None = None
) -> Iterator[TokenPart]:
    """Tokenize the documents of a table in their order.

    Args:
        documents: rows with a column `text`, and perhaps `continues`, as `Documents` has them.
        tokenizer: gives the tokens.
        num_proc: processes that tokenize; by default, this one.
    """
    rows = tqdm(read_rows(documents), "Tokenizing", len(documents), unit=" rows", disable=None)
    batches = batch_rows(rows if ends_tokens_at_lines(tokenizer) else join_rows(rows))
    if (num_proc or 1) == 1:
        yield from (tokenize_rows(tokenizer, *batch) for batch in batches)
    else:
        yield from _tokenize_in_processes(batches, tokenizer, num_proc or 1)


def tokenize_rows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], continues: Sequence[bool] | None = None
) -> TokenPart:
    """Tokenize consecutive rows; a start token stands before each document.

    Special tokens are split: a document that quotes "<|endoftext|>" must not end there.
    """
    begins = ~np.asarray(continues, dtype=bool) if continues is not None else np.ones(len(texts), dtype=bool)
    found = encode(tokenizer, list(texts))
    ends = np.cumsum([len(tokens) for tokens in found])
    tokens = np.concatenate([np.zeros(0, dtype=np.int32), *(np.asarray(tokens, dtype=np.int32) for tokens in found)])
    places = np.append(0, ends[:-1])[begins] if len(texts) else np.zeros(0, dtype=int)
    starts = np.insert(np.zeros(len(tokens), dtype=np.int8), places, 1)
    return TokenPart(np.insert(tokens, places, start_token_id(tokenizer)), starts)


def ends_tokens_at_lines(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer gives the same tokens for a text and for its parts, cut between two lines.

    One that puts a space before each text does not; for it, the rows of a long document are joined first.
    """
    return all(_ids(tokenizer, first + second) == _ids(tokenizer, first) + _ids(tokenizer, second) for first, second in PROBES)


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a key that is the same for tokenizers that give the same tokens, whatever they were used for before."""
    special = [start_token_id(tokenizer), end_token_id(tokenizer), pad_token_id(tokenizer), len(tokenizer)]
    if not tokenizer.is_fast:
        return Hasher.hash([special, tokenizer])
    backend: Any = tokenizer.backend_tokenizer
    backend = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return hashlib.sha256(json.dumps([special, type(tokenizer).__name__, backend]).encode()).hexdigest()


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the tokens of texts, by the quick way if it gives the same tokens as a call."""
    if not tokenizer.is_fast or not texts:
        return [_ids(tokenizer, text) for text in texts]
    probe = texts[0][:1000]
    called = _ids(tokenizer, probe)  # sets what the quick way reads: no truncation, no padding, special tokens split
    backend: Any = tokenizer.backend_tokenizer
    if backend.encode_batch_fast([probe], add_special_tokens=False)[0].ids != called:
        return [_ids(tokenizer, text) for text in texts]
    groups = (group.texts for group in batch_rows(({"text": text} for text in texts), ENCODED))
    return [encoding.ids for group in groups for encoding in backend.encode_batch_fast(group, add_special_tokens=False)]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def join_rows(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Join the rows of each document."""
    texts: list[str] = []
    for row in rows:
        if texts and not row.get("continues"):
            yield {"text": "".join(texts)}
            texts = []
        texts.append(row["text"])
    if texts:
        yield {"text": "".join(texts)}


def batch_rows(rows: Iterable[dict[str, Any]], characters: int = PIECE) -> Iterator[Rows]:
    """Gather rows until they hold about so many characters."""
    batch, size = Rows([], []), 0
    for row in rows:
        batch.texts.append(row["text"])
        batch.continues.append(bool(row.get("continues")))
        size += len(row["text"])
        if size >= characters:
            yield batch
            batch, size = Rows([], []), 0
    if batch.texts:
        yield batch


def _tokenize_in_processes(batches: Iterable[Rows], tokenizer: PreTrainedTokenizerBase, processes: int) -> Iterator[TokenPart]:
    waiting: deque[Future[TokenPart]] = deque()
    with (
        _threads_of_tokenizers_off(),
        ProcessPoolExecutor(processes, multiprocessing.get_context(START), _begin, (tokenizer,)) as pool,
    ):
        try:
            for batch in batches:
                waiting.append(pool.submit(_work, batch))
                if len(waiting) > AHEAD * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"a process that tokenizes died, or the system killed it for its memory; fewer than preprocessing_num_workers={processes} "
                f"need less ({error})"
            ) from error


@contextmanager
def _threads_of_tokenizers_off() -> Iterator[None]:
    """Let forked processes use one thread each: the threads of the `tokenizers` library do not survive a fork."""
    name, before = "TOKENIZERS_PARALLELISM", os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


_worker: list[PreTrainedTokenizerBase] = []


def _begin(tokenizer: PreTrainedTokenizerBase) -> None:
    _worker[:] = [tokenizer]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that asks it for tokens was killed: else it would wait for work for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _work(batch: Rows) -> TokenPart:
    return tokenize_rows(_worker[0], *batch)
