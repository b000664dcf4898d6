"""Labelled real text for the tasks of `examples/`: WordNet's glosses, an English treebank, and verses.

Every reader takes a folder and returns the splits train, validation and test. Nothing is downloaded: a missing file is refused
with its address. Where a source has no split of its own, a checksum of the text decides, so that a row is in the same split
whatever the order of the file, and equal texts are never in two splits.
"""

import zlib
from collections.abc import Iterable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets import DatasetDict

WORDNET = "https://wordnetcode.princeton.edu/3.0/WNdb-3.0.tar.gz (--data is its folder dict)"
TREEBANK = "https://github.com/UniversalDependencies/UD_English-EWT"
VERSES = "the Debian package bible-kjv: bible -f gen1:1-rev22:21 > kjv.txt"
SPLITS = ("train",) * 8 + ("validation", "test")
TREEBANK_COLUMNS = ("words", "lemmas", "tags", "features", "heads", "relations")
"""What stands in the columns 2, 3, 4, 6, 7 and 8 of a CoNLL-U file."""


def read_glosses(folder: str | Path) -> DatasetDict:
    """Read WordNet: a row a synset, with `lemma`, `gloss` and `part_of_speech`; about 80, 10 and 10 % of the glosses.

    Args:
        folder: holds `glosses.tsv` (class as `noun.animal`, lemma, gloss), or else `data.noun`, `data.verb`, ... of WordNet.
    """
    rows = _tsv_glosses(folder) if Path(folder, "glosses.tsv").is_file() else _wordnet_glosses(folder)
    return _split((SPLITS[checksum(row["gloss"]) % 10], row) for row in rows)


def read_treebank(folder: str | Path, prefix: str = "en_ewt-ud") -> DatasetDict:
    """Read sentences of a treebank, a list of each of `words`, `lemmas`, `tags`, `features`, `heads` and `relations`.

    Test is `PREFIX-test.conllu`. Training and validation are `PREFIX-train.conllu` and `PREFIX-dev.conllu`; without the first, the
    documents of the second are cut into 90 % for training and 10 % for validation.

    Args:
        folder: holds the files.
        prefix: how their names begin.
    """
    test, dev = (_find(folder, f"{prefix}-{name}.conllu", TREEBANK) for name in ("test", "dev"))
    train = Path(folder, f"{prefix}-train.conllu")
    rows = [("test", row) for _, row in conllu_sentences(test)]
    if train.is_file():
        rows += [("train", row) for _, row in conllu_sentences(train)] + [
            ("validation", row) for _, row in conllu_sentences(dev)
        ]
    else:
        rows += [("train" if checksum(name) % 10 else "validation", row) for name, row in conllu_sentences(dev)]
    return _split(rows)


def read_verses(folder: str | Path) -> DatasetDict:
    """Read `kjv.txt`: a row a verse in its order, with `chapter` and `text`; 80, 10 and 10 % of the chapters."""
    path = _find(folder, "kjv.txt", VERSES)
    lines = [line.partition(" ") for line in path.read_text(encoding="utf-8").splitlines() if line]
    rows = [{"chapter": place.partition(":")[0], "text": text} for place, _, text in lines]
    return _split((SPLITS[checksum(row["chapter"]) % 10], row) for row in rows)


def _find(folder: str | Path, name: str, source: str) -> Path:
    path = Path(folder, name)
    if not path.is_file():
        raise ValueError(f"{path} is missing: it comes from {source}; --data names the folder that holds it")
    return path


def checksum(text: str) -> int:
    """Return a number of a text that decides its split: the same in every run."""
    return zlib.crc32(text.encode())


def _split(rows: Iterable[tuple[str, dict[str, Any]]]) -> DatasetDict:
    """Make a table of each split; an empty one is refused."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in dict.fromkeys(SPLITS)}
    for name, row in rows:
        found[name].append(row)
    if empty := [name for name, part in found.items() if not part]:
        raise ValueError(f"no row is in the split {empty[0]!r}: the files have too few rows")
    return DatasetDict({name: Dataset.from_list(part) for name, part in found.items()})


def _tsv_glosses(folder: str | Path) -> Iterator[dict[str, str]]:
    path = Path(folder, "glosses.tsv")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        cells = line.split("\t")
        if len(cells) != 3:
            raise ValueError(f"{path}, line {number} has {len(cells)} columns, not class, lemma and gloss with tabs between")
        yield {"lemma": cells[1], "gloss": cells[2], "part_of_speech": cells[0].partition(".")[0]}


def _wordnet_glosses(folder: str | Path) -> Iterator[dict[str, str]]:
    """Yield the synsets of WordNet's own files (`man 5 wndb`), without the examples that follow a gloss."""
    _find(folder, "data.noun", WORDNET)
    for path in sorted(Path(folder).glob("data.*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("  "):  # the licence does
                head, _, gloss = line.partition(" | ")
                lemma = head.split()[4].replace("_", " ")
                yield {"lemma": lemma, "gloss": gloss.partition('; "')[0].strip(), "part_of_speech": path.suffix[1:]}


def conllu_sentences(path: Path) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield the sentences of a CoNLL-U file, each with the name of its document."""
    document, words = "", []
    for number, line in enumerate([*path.read_text(encoding="utf-8").split("\n"), ""], 1):
        cells = line.split("\t")
        if line.startswith("# newdoc"):
            document = line
        elif line and line[0] != "#" and len(cells) != 10:
            raise ValueError(f"{path}, line {number} has {len(cells)} columns, not the 10 of CoNLL-U: {line[:60]!r}")
        elif cells[0].isdigit():  # not a contraction (1-2) or an elided word (1.1)
            words.append([cells[column] for column in (1, 2, 3, 5, 6, 7)])
        elif not line and words:
            yield document, dict(zip(TREEBANK_COLUMNS, map(list, zip(*words, strict=True)), strict=True))
            words = []
