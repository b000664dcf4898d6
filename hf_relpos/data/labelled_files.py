"""Labelled rows from files that a comparison names: tables with a text and its class, treebanks with words and their tags."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from typing import NamedTuple

from hf_relpos.data.files import file_sha256
from hf_relpos.data.labelled import SPLITS
from hf_relpos.data.labelled import TREEBANK_COLUMNS
from hf_relpos.data.labelled import checksum
from hf_relpos.data.labelled import conllu_sentences
from hf_relpos.data.readers import read_file


class LabelledSource(NamedTuple):
    """Where labelled rows stand.

    Attributes:
        train_file: a table for classes of texts, or a CoNLL-U file (`.conllu`) for tags of words.
        validation_file: the same to evaluate on; None holds out a fifth of `train_file`, as a checksum of each text (of the name of
            each document of a treebank) decides.
        text_column, label_column: columns of the table by name, or by number from 1 in a file with tabs and without a head; columns
            of a treebank as `TREEBANK_COLUMNS` has them.
        label_before: a class is what stands before this text in its column, as `noun` in `noun.animal` for "."; None takes it whole.
    """

    train_file: str
    validation_file: str | None
    text_column: str | int
    label_column: str | int
    label_before: str | None = None


def read_labelled(source: LabelledSource) -> dict[str, list[dict[str, Any]]]:
    """Read rows `text` (a string, or a list of words) and `label` (a string, or a tag for each word) to train and to evaluate on.

    Returns:
        Lists of rows, under `train` and `validation`.

    Raises:
        ValueError: a file is missing, has no such column or no row.
    """
    rows = list(_read(Path(source.train_file), source))
    if source.validation_file:
        held_out = [row for _, row in _read(Path(source.validation_file), source)]
        found = {"train": [row for _, row in rows], "validation": held_out}
    else:
        found = {"train": [], "validation": []}
        for key, row in rows:
            found["train" if SPLITS[checksum(key) % 10] == "train" else "validation"].append(row)
    if empty := [name for name, part in found.items() if not part]:
        raise ValueError(f"no labelled row is for {empty[0]}: {source.train_file} has {len(rows)} in all")
    return found


def describe_labelled(source: LabelledSource) -> dict[str, Any]:
    """Return, for each file, its `bytes` and `sha256`; what cannot be read as labelled rows is refused."""
    read_labelled(source)
    files = {"train": source.train_file, "validation": source.validation_file}
    paths = {split: Path(file) for split, file in files.items() if file}
    return {split: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for split, path in paths.items()}


def _read(path: Path, source: LabelledSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what decides the split of a row, and the row."""
    if not path.is_file():
        raise ValueError(f"there is no labelled file {path}: train_file and validation_file name one each")
    columns = source.text_column, source.label_column
    if path.suffix == ".conllu":
        if wrong := [name for name in columns if name not in TREEBANK_COLUMNS]:
            raise ValueError(f"{path} has no column {wrong[0]!r}; one of {', '.join(TREEBANK_COLUMNS)}")
        for document, words in conllu_sentences(path):
            text, labels = (words[str(name)] for name in columns)
            yield document, {"text": text, "label": [_short(label, source.label_before) for label in labels]}
    else:
        cells = _numbered(path, columns) if all(isinstance(name, int) for name in columns) else _named(path, columns)
        for text, label in cells:
            yield text, {"text": text, "label": _short(label, source.label_before)}


def _short(label: str, before: str | None) -> str:
    return label if before is None else label.partition(before)[0]


def _numbered(path: Path, columns: tuple[Any, Any]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if not 1 <= min(columns) <= max(columns) <= len(cells):
            raise ValueError(
                f"{path}, line {number} has {len(cells)} columns with tabs between, but {max(columns)} are asked for"
            )
        yield cells[columns[0] - 1], cells[columns[1] - 1]


def _named(path: Path, columns: tuple[Any, Any]) -> Iterator[tuple[str, str]]:
    texts, labels = ((piece.text for piece in read_file(path, str(name)) if not piece.continues) for name in columns)
    for text, label in zip(texts, labels, strict=True):
        if text is None or label is None:
            raise ValueError(f"{path} has a row without {columns[0] if text is None else columns[1]}")
        yield text, label
