"""Text sources: where the documents of a run come from, one row of the column `text` for each document.

A source is the Python standard library (on every machine, never downloaded), local files, or a dataset of the Hub.
A text file is one document with its line breaks kept; jsonl, csv and parquet hold one document a row.
"""

import codecs
import glob
import hashlib
import io
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import TypeVar

from datasets import Dataset
from datasets import IterableDataset
from datasets import concatenate_datasets
from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError

from hf_relpos.training.arguments import DataArguments

Rows = TypeVar("Rows", Dataset, IterableDataset)

STDLIB = "stdlib"
STDLIB_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
SPLITS = ("train", "validation", "test")
TABLES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# Documents of a stream that are taken for evaluation.
STREAMED_EVALUATION = 1000


@dataclass
class Documents:
    """The documents of each split that a source has, in the column `text`; only training text is ever streamed."""

    train: Dataset | IterableDataset | None = None
    validation: Dataset | None = None
    test: Dataset | None = None


def load_documents(arguments: DataArguments) -> Documents:
    """Load the text that the arguments name; without text for validation, a part of the training text is set apart."""
    files = {"train": arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}
    files = {split: names for split, names in files.items() if names}
    if files and arguments.dataset_name:
        raise ValueError(f"dataset_name={arguments.dataset_name!r} and {'_file, '.join(files)}_file exclude each other")
    if arguments.streaming and (arguments.dataset_name or "stdlib") == "stdlib":
        raise ValueError("streaming=True reads a dataset of the Hub, named by dataset_name: files and 'stdlib' are read whole")
    if files:
        found = Documents(**{split: load_files(names, arguments.text_column) for split, names in files.items()})
    elif arguments.dataset_name in (None, STDLIB):
        found = Documents(**{split: load_files(names) for split, names in stdlib_files().items()})
    else:
        found = _load_hub(arguments.dataset_name, arguments)
    if found.train is not None and found.validation is None:
        found.train, found.validation = _hold_out(found.train, arguments.validation_split_percentage)
    return found


def describe_source(arguments: DataArguments) -> str:
    """The source of the text in words, for the records of a run."""
    files = arguments.train_file or arguments.validation_file or arguments.test_file
    if files:
        return ", ".join(Path(name).name for name in files)
    if arguments.dataset_name in (None, STDLIB):
        return f"sources of the Python {platform.python_version()} standard library"
    return " ".join(filter(None, [arguments.dataset_name, arguments.dataset_config_name]))


def describe_documents(documents: Dataset) -> dict[str, int | str]:
    """Number of documents, their UTF-8 bytes and the SHA-256 of these bytes one after another."""
    digest, size = hashlib.sha256(), 0
    for text in documents["text"]:
        encoded = text.encode()
        digest.update(encoded)
        size += len(encoded)
    return {"documents": len(documents), "bytes": size, "sha256": digest.hexdigest()}


def stdlib_files() -> dict[str, list[str]]:
    """The Python standard library's own sources, split by the SHA-256 of each file's path modulo 20."""
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if STDLIB_LEFT_OUT.isdisjoint(inside.parts):
            bucket = int(hashlib.sha256(inside.as_posix().encode()).hexdigest(), 16) % 20
            splits[{0: "validation", 1: "test"}.get(bucket, "train")].append(str(path))
    return splits


def load_files(names: list[str], text_column: str = "text") -> Dataset:
    """Read local files.

    Args:
        names: files, folders (everything in them but hidden files) and glob patterns.
        text_column: the column of jsonl, csv and parquet files that holds the documents.

    Returns:
        The documents that are not empty; the files of a folder or pattern come sorted.
    """
    paths = [path for name in names for path in _find_files(name)]
    tables = {kind: [path for path in paths if TABLES.get(path.suffix.lower()) == kind] for kind in TABLES.values()}
    parts = [_load_table(kind, members, text_column) for kind, members in tables.items() if members]
    texts = [path for path in paths if path.suffix.lower() not in TABLES]
    if texts:
        parts.append(_load_texts(texts))
    documents = concatenate_datasets(parts).filter(bool, input_columns="text", desc="Leaving out empty documents")
    if len(documents) == 0:
        raise ValueError(f"{', '.join(names)}: no text found, every document is empty")
    return documents


def load_text(path: str | Path) -> list[str]:
    """The lines of one text file with their line breaks; only `\\n`, `\\r\\n` and `\\r` end a line."""
    return [line for document in load_files([str(path)])["text"] for line in io.StringIO(document)]


def _find_files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        found = [path / file for file in inside if not any(part.startswith(".") for part in file.parts)]
    else:
        found = [Path(match) for match in glob.glob(name, recursive=True) if Path(match).is_file()]
    if not found:
        raise ValueError(f"{name!r} is no file, no folder with files in it and no pattern that matches a file")
    return sorted(found)


def _load_texts(paths: list[Path]) -> Dataset:
    for path in paths:
        _check_is_text(path)
    return _load("text", paths, sample_by="document")


def _load_table(kind: str, paths: list[Path], column: str) -> Dataset:
    table = _load(kind, paths)
    if column not in table.column_names:
        raise ValueError(f"{paths[0]} has no column {column!r}; text_column may be one of {table.column_names}")
    if table.features[column].dtype not in ("string", "large_string"):
        raise ValueError(f"{paths[0]}: column {column!r} holds {table.features[column].dtype}, not text")
    return _text_only(table, column)


def _load(kind: str, paths: list[Path], **options) -> Dataset:
    files = [glob.escape(str(path)) for path in paths]  # data_files are patterns, and a name may hold brackets
    try:
        return load_dataset(kind, data_files=files, split="train", streaming=False, **options)
    except DatasetGenerationError as error:
        raise ValueError(f"{', '.join(map(str, paths))} cannot be read as {kind}: {error.__cause__}") from error


def _check_is_text(path: Path) -> None:
    """Refuse a file that is not UTF-8 text before anything is made of it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            if b"\0" in chunk:
                raise ValueError(f"{path} is a binary file: it has NUL bytes")
            try:
                decoder.decode(chunk, final=len(chunk) < 1 << 20)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is a binary file or not in UTF-8: {error}") from error


def _text_only(table: Rows, column: str) -> Rows:
    table = table.select_columns(column)
    return table if column == "text" else table.rename_column(column, "text")


def _hold_out(documents: Dataset | IterableDataset, percentage: float) -> tuple[Dataset | IterableDataset, Dataset]:
    """Split off documents drawn at random, the end of a single document, or the beginning of a stream."""
    if not 0 < percentage < 100:
        raise ValueError(f"validation_split_percentage={percentage} is not between 0 and 100")
    if isinstance(documents, IterableDataset):
        return documents.skip(STREAMED_EVALUATION), _beginning(documents)
    if len(documents) > 1:
        parts = documents.train_test_split(test_size=percentage / 100, seed=0)
        return parts["train"], parts["test"]
    text = documents[0]["text"]
    cut = int(len(text) * (100 - percentage) / 100)
    if not 0 < cut < len(text):
        raise ValueError(f"a text of {len(text)} characters is too short to split {percentage} % off for validation")
    return Dataset.from_dict({"text": [text[:cut]]}), Dataset.from_dict({"text": [text[cut:]]})


def _beginning(documents: IterableDataset) -> Dataset:
    return Dataset.from_list(list(documents.take(STREAMED_EVALUATION)))


def _load_hub(name: str, arguments: DataArguments) -> Documents:
    column = arguments.text_column
    loaded = _load_dataset(name, arguments)
    found: dict[str, Any] = {}
    for split in filter(loaded.__contains__, SPLITS):
        columns = loaded[split].column_names
        if columns is not None and column not in columns:
            raise ValueError(f"{name} has no column {column!r}; text_column may be one of {columns}")
        found[split] = _text_only(loaded[split], column)
        if split != "train" and isinstance(found[split], IterableDataset):
            found[split] = _beginning(found[split])
    if not found:
        raise ValueError(f"{name} has none of the splits {SPLITS}, only {list(loaded)}")
    return Documents(**found)


def _load_dataset(name: str, arguments: DataArguments) -> Any:
    try:
        return load_dataset(name, arguments.dataset_config_name, streaming=arguments.streaming)
    except (OSError, DatasetGenerationError) as error:
        raise ValueError(f"dataset_name={name!r} cannot be loaded: {error}") from error
