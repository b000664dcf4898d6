"""Tokenizers that need no download: single bytes, and a byte-level BPE learned from the training text.

Both are ordinary fast tokenizers: the saved folder loads with `AutoTokenizer` where this package is not installed, and
both give any text back unchanged. `<|endoftext|>` starts and ends a document, as in GPT-2, and stands between two texts that
are given as a pair.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING
from typing import Any

import tokenizers
from tokenizers import Tokenizer
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers
from transformers import AutoTokenizer
from transformers import BatchEncoding
from transformers import PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from datasets import Dataset

END_OF_TEXT, PAD, MASK = SPECIAL_TOKENS = ("<|endoftext|>", "<pad>", "<mask>")


class RelPosTokenizer(PreTrainedTokenizerFast):
    """A fast tokenizer that keeps the spaces between words which are given apart (`is_split_into_words`).

    A word after the first gets a space in front of it, as in running text. Where this package is not installed, `AutoTokenizer`
    loads the saved folder as a plain fast tokenizer, for which such words have no spaces.
    """

    def _encode_plus(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, text: Any, text_pair: Any = None, *args: Any, is_split_into_words: bool = False, **kwargs: Any
    ) -> BatchEncoding:
        if not is_split_into_words:
            return super()._encode_plus(text, text_pair, *args, **kwargs)
        spaced = _with_spaces(text), _with_spaces(text_pair)
        found = super()._encode_plus(*spaced, *args, is_split_into_words=True, **kwargs)
        if "offset_mapping" in found:
            self._count_from_the_words(found, text, text_pair)
        return found

    def _count_from_the_words(self, found: BatchEncoding, text: Any, text_pair: Any) -> None:
        """Make offsets count the characters of the words that were given, without the space in front of them."""
        batched = bool(text) and not isinstance(text[0], str)
        rows = list(zip(text, text_pair, strict=True)) if batched and text_pair else text if batched else [(text, text_pair)]
        samples = found.get("overflow_to_sample_mapping", range(len(rows)))
        table = found["offset_mapping"] if batched or "overflow_to_sample_mapping" in found else [found["offset_mapping"]]
        for number, (sample, offsets) in enumerate(zip(samples, table, strict=True)):
            row = rows[sample]
            sides: Any = (row, None) if isinstance(row[0], str) else row
            for token, (word, side) in enumerate(zip(found.word_ids(number), found.sequence_ids(number), strict=True)):
                if word and side is not None and _lacks_space(sides[side][word]):
                    offsets[token] = tuple(max(0, place - 1) for place in offsets[token])


def _with_spaces(words: Any) -> Any:
    """Put a space before each word but the first, in a list of words or of such lists."""
    if not words:
        return words
    if not isinstance(words[0], str):
        return [_with_spaces(row) for row in words]
    return [words[0], *(" " + word if _lacks_space(word) else word for word in words[1:])]


def _lacks_space(word: str) -> bool:
    return bool(word) and not word[0].isspace()


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose ids 0 to 255 are the bytes of the UTF-8 text, followed by the special tokens."""
    alphabet = bytes_to_unicode()
    backend = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrap(backend)


def train_bpe_tokenizer(texts: "Iterable[str] | Dataset", vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE; from a table of documents once, then it is taken from the cache of `datasets`.

    Args:
        texts: the training documents, or a table whose column `text` holds them.
        vocab_size: the whole vocabulary, with the 256 bytes and the special tokens; a short text may give less.

    Returns:
        The tokenizer; the same texts give the same one.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is too small for a BPE: bytes and special tokens need {smallest}")
    # Only here: the package, and with it the tokenizer of saved folders, imports where `datasets` is not installed.
    from datasets import Dataset

    from hf_relpos.data.tables import cached_facts
    from hf_relpos.data.tables import read_rows

    if not isinstance(texts, Dataset):
        return _wrap(_learn_bpe(texts, vocab_size))
    rows, key = (row["text"] for row in read_rows(texts)), [texts._fingerprint, vocab_size, tokenizers.__version__]
    return _wrap(Tokenizer.from_str(cached_facts("bpe", key, lambda: {"bpe": _learn_bpe(rows, vocab_size).to_str()})["bpe"]))


def _learn_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def load_tokenizer(name: str, texts: "Iterable[str] | Dataset" = (), vocab_size: int = 4096) -> PreTrainedTokenizerBase:
    """Build or load a tokenizer.

    Args:
        name: "byte", "bpe", or anything that `AutoTokenizer` loads (a folder, a name on the Hub).
        texts: the documents from which "bpe" learns.
        vocab_size: the vocabulary of "bpe".
    """
    if name == "byte":
        return build_byte_tokenizer()
    if name == "bpe":
        return train_bpe_tokenizer(texts, vocab_size)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer_name={name!r} is neither 'byte', 'bpe' nor a tokenizer to load: {error}") from error


def start_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that stands before a document: bos, or else eos or cls."""
    return _first_of(tokenizer, "bos_token_id", "eos_token_id", "cls_token_id")


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that is to be predicted after a document: eos, or else sep, bos or cls."""
    return _first_of(tokenizer, "eos_token_id", "sep_token_id", "bos_token_id", "cls_token_id")


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token; without one, the end token, which the attention mask hides just as well."""
    return end_token_id(tokenizer) if tokenizer.pad_token_id is None else tokenizer.pad_token_id  # pyright: ignore[reportReturnType]


def _first_of(tokenizer: PreTrainedTokenizerBase, *names: str) -> int:
    for name in names:
        token: Any = getattr(tokenizer, name)
        if token is not None:
            return token  # pyright: ignore[reportReturnType]
    raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has none of {', '.join(names)}")


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.decoder = decoders.ByteLevel()
    tokenizer = RelPosTokenizer(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        sep_token=END_OF_TEXT,
        pad_token=PAD,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair=f"$A {END_OF_TEXT} $B:1", special_tokens=[(END_OF_TEXT, tokenizer.sep_token_id)]
    )
    return tokenizer
