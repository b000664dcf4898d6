"""The tokenizer of a checkpoint: as transformers loads it, or made of the word list of a Transformer-XL."""

import pickle
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast

from hf_relpos.conversion.checkpoint import find_file
from hf_relpos.conversion.rules import Report

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
ABSENT = "there is no tokenizer in a format that is read here"
WORDS = "the tokenizer splits at spaces only, as WikiText-103 is written: punctuation must be set apart"


def find_tokenizer(source: str, report: Report, allow_pickle: bool = False) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or of a model of the Hub; a note says why there is none.

    Args:
        source: the folder or name.
        report: says what kind of checkpoint it is, and takes the note.
        allow_pickle: read the `vocab.bin` of a Transformer-XL; nothing but lists, numbers and words is unpickled.
    """
    if report.source == "transfo-xl":
        return _find_words(source, report, allow_pickle)
    if not any(find_file(source, name) for name in FILES):
        report.notes.append(ABSENT)
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (ValueError, OSError, ImportError, KeyError) as error:
        report.notes.append(f"the tokenizer could not be read: {error}")
        return None


def _find_words(source: str, report: Report, allow_pickle: bool) -> PreTrainedTokenizerBase | None:
    """Build the tokenizer of a Transformer-XL from `vocab.txt`, one word a line, or from `vocab.bin`."""
    lower = False
    if (path := find_file(source, "vocab.txt")) is not None:
        words = [line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    elif allow_pickle and (path := find_file(source, "vocab.bin")) is not None:
        try:
            fields = torch.load(path, map_location="cpu", weights_only=True)
            words, lower = list(fields["idx2sym"]), bool(fields.get("lower_case", False))
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged or holds more than a vocabulary: {error}") from error
    else:
        report.notes.append(ABSENT)
        return None
    report.notes.append(WORDS)
    return word_tokenizer(words, lower)


def word_tokenizer(words: Sequence[str], lower_case: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose tokens are words between spaces.

    Args:
        words: the word of each id; `<unk>` or `<UNK>` stands for unknown ones.
        lower_case: whether capital letters are made small.
    """
    unknown = next((word for word in ("<unk>", "<UNK>") if word in words), None)
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lower_case:
        backend.normalizer = normalizers.Lowercase()
    special = {"unk_token": unknown, "eos_token": "<eos>" if "<eos>" in words else None}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token},
    )
