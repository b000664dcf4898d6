"""Labelled rows from files that a comparison names: tables with a text and its class, treebanks with words and their tags."""

from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from typing import NamedTuple

from hf_relpos.data.files import file_sha256
from hf_relpos.data.labelled import SPLITS
from hf_relpos.data.labelled import TREEBANK_COLUMNS
from hf_relpos.data.labelled import checksum
from hf_relpos.data.labelled import conllu_sentences
from hf_relpos.data.opening import BadFile
from hf_relpos.data.readers import read_file


class LabelledSource(NamedTuple):
    """Where labelled rows stand.

    Attributes:
        train_file: a table for classes of texts, or a CoNLL-U file (`.conllu`) for tags of words.
        validation_file: the same to evaluate on; None holds out a fifth of `train_file`, as a checksum of each text (of the name of
            each document of a treebank) decides.
        text_column, label_column: columns of the table by name, or by number from 1 in a file with tabs and without a head; columns
            of a treebank as `TREEBANK_COLUMNS` has them.
            Whole numbers in a typed table are classes by their text, as `7` for 7.
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
    rows = _rows(Path(source.train_file), source)
    if source.validation_file:
        held_out = [row for _, row in _rows(Path(source.validation_file), source)]
        found = {"train": [row for _, row in rows], "validation": held_out}
    else:
        found = {"train": [], "validation": []}
        for key, row in rows:
            found["train" if SPLITS[checksum(key) % 10] == "train" else "validation"].append(row)
    if empty := [name for name, part in found.items() if not part]:
        raise ValueError(
            f"no labelled row is for {empty[0]}: {source.train_file} has {len(rows)} in all; name a validation_file, too"
        )
    return found


def class_names(tables: Mapping[str, list[dict[str, Any]]], source: LabelledSource) -> list[str]:
    """Return the classes of rows by split, sorted.

    Args:
        tables: rows of `read_labelled`, all or some.
        source: their files, which an error names.

    Raises:
        ValueError: there is one class only.
    """
    rows = [row for part in tables.values() for row in part]
    names = {label for row in rows for label in (row["label"] if isinstance(row["label"], list) else [row["label"]])}
    if len(names) < 2:
        files = " and ".join(filter(None, (source.train_file, source.validation_file)))
        raise ValueError(
            f"{files}: all {len(rows)} rows that are used have the class {min(names)!r} in the column {source.label_column!r}; "
            "a task needs two classes or more"
        )
    return sorted(names)


def describe_labelled(source: LabelledSource) -> dict[str, Any]:
    """Return, for each file, its `bytes` and `sha256`; what cannot be read as labelled rows is refused."""
    class_names(read_labelled(source), source)
    files = {"train": source.train_file, "validation": source.validation_file}
    paths = {split: Path(file) for split, file in files.items() if file}
    return {split: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for split, path in paths.items()}


def _rows(path: Path, source: LabelledSource) -> list[tuple[str, dict[str, Any]]]:
    """Return what `_read` yields; a file without rows is refused, and one that is not in UTF-8."""
    try:
        rows = list(_read(path, source))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}, line {line} is not in UTF-8 (byte 0x{error.object[error.start]:02x}): convert the file, for example "
            "with 'iconv -f latin1 -t utf-8'"
        ) from error
    if not rows:
        raise ValueError(f"{path} holds no labelled row")
    return rows


def _read(path: Path, source: LabelledSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what decides the split of a row, and the row."""
    if not path.is_file():
        raise ValueError(f"there is no labelled file {path}: train_file and validation_file name one each")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: it should hold labelled rows")
    columns = source.text_column, source.label_column
    if path.suffix == ".conllu":
        if wrong := [name for name in columns if name not in TREEBANK_COLUMNS]:
            raise ValueError(f"{path} has no column {wrong[0]!r}; one of {', '.join(TREEBANK_COLUMNS)}")
        for document, words in conllu_sentences(path):
            text, labels = (words[str(name)] for name in columns)
            where = f"{path}, the sentence {' '.join(words['words'])[:60]!r}"
            yield document, {"text": text, "label": [_class_name(label, source, where) for label in labels]}
    else:
        cells = _numbered(path, columns) if all(isinstance(name, int) for name in columns) else _named(path, columns)
        for where, text, label in cells:
            yield text, {"text": text, "label": _class_name(label, source, f"{path}, {where}")}


def _class_name(label: str, source: LabelledSource, where: str) -> str:
    """Return the class that a label names; an empty one is refused."""
    name = label if source.label_before is None else label.partition(source.label_before)[0]
    if not name.strip():
        before = f" before {source.label_before!r}" if label.strip() else ""
        raise ValueError(
            f"{where}: the column {source.label_column!r} holds {label!r}, which names no class{before}; fill it, or leave the row out"
        )
    return name


def _numbered(path: Path, columns: tuple[Any, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield where a row stands, its text and its label."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if not 1 <= min(columns) <= max(columns) <= len(cells):
            wrong = min(columns) if min(columns) < 1 else max(columns)
            raise ValueError(
                f"{path}, line {number} has {len(cells)} columns with tabs between, but column {wrong} is asked for; "
                f"text_column and label_column may be 1 to {len(cells)}: {line[:60]!r}"
            )
        yield f"line {number}", cells[columns[0] - 1], cells[columns[1] - 1]


def _named(path: Path, columns: tuple[Any, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield where a row stands, its text and its label."""
    # Each is read to its end first: of a JSON file, only then a column is known to be missing.
    texts, labels = (list(_column(path, *option)) for option in zip(("text_column", "label_column"), columns, strict=True))
    for number, cells in enumerate(zip(texts, labels, strict=True), 1):
        text, label = cells
        if text is None or label is None:
            raise ValueError(
                f"{path}, row {number} has no value in the column {columns[cells.index(None)]!r}: it is missing or null"
            )
        yield f"row {number}", text, label


def _column(path: Path, option: str, name: str | int) -> Iterator[str | None]:
    """Yield the cells of the column that an option names."""
    try:
        yield from (piece.text for piece in read_file(path, str(name), option == "label_column") if not piece.continues)
    except BadFile as error:
        raise BadFile(str(error).replace("; text_column may be", f"; {option} may be")) from error
