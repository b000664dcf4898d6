"""Text sources: where the documents of a run come from, and what its records say of them.

A source is the Python standard library (on every machine, never downloaded), local files, or a dataset of the Hub. A text file
is one document with its line breaks kept; jsonl, csv, tsv and parquet hold one document a row. Only a dataset of the Hub makes
connections to other machines.
"""

import hashlib
import io
import logging
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any
from typing import cast

import pyarrow as pa
from datasets import Dataset
from datasets import IterableDataset
from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError
from tqdm.auto import tqdm

from hf_relpos.data.file_streams import NAMED
from hf_relpos.data.file_streams import stream_files
from hf_relpos.data.files import describe_files
from hf_relpos.data.files import file_sha256
from hf_relpos.data.files import find_files
from hf_relpos.data.files import shared_files
from hf_relpos.data.hold_out import hold_out
from hf_relpos.data.opening import BadFile
from hf_relpos.data.readers import PIECE
from hf_relpos.data.readers import Piece
from hf_relpos.data.readers import file_kind
from hf_relpos.data.readers import read_file
from hf_relpos.data.stdlib import stdlib_files
from hf_relpos.data.tables import cached_table
from hf_relpos.data.tables import read_rows
from hf_relpos.training.arguments import DataArguments

logger = logging.getLogger(__name__)

STDLIB = "stdlib"
SPLITS = ("train", "validation", "test")
# Documents of a stream that are taken for evaluation.
STREAMED_EVALUATION = 1000
DOCUMENTS = pa.schema({"text": pa.string(), "continues": pa.bool_()})


@dataclass
class Documents:
    """The documents of each split that a source has; only training text is ever streamed.

    A row of the column `text` is a document. A document of more than a million characters is cut into several rows: then there
    is a column `continues`, true where a row goes on with the document of the row before.

    Attributes:
        left_out: by split, what was left out for which reason, and how often.
        streamed: the local files that training text is streamed from.
    """

    train: Dataset | IterableDataset | None = None
    validation: Dataset | None = None
    test: Dataset | None = None
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    streamed: list[Path] = field(default_factory=list)


def load_documents(arguments: DataArguments) -> Documents:
    """Load the text that the arguments name; without text for validation, a part of the training text is set apart."""
    files = {"train": arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}
    files = {split: names for split, names in files.items() if names}
    if files and arguments.dataset_name:
        raise ValueError(f"dataset_name={arguments.dataset_name!r} and {'_file, '.join(files)}_file exclude each other")
    if arguments.streaming and not files and (arguments.dataset_name or "stdlib") == "stdlib":
        raise ValueError(
            "streaming=True reads train_file or a dataset of the Hub, named by dataset_name: 'stdlib' is read whole"
        )
    if files:
        _refuse_shared_files(files)
        found = _stream_splits(files, arguments) if arguments.streaming else _read_splits(files, arguments.text_column)
    elif arguments.dataset_name in (None, STDLIB):
        found = _read_splits(stdlib_files(), "text")
    else:
        found = _load_hub(arguments.dataset_name, arguments)
    if found.train is not None and found.validation is None:
        found.train, found.validation = _hold_out(found.train, arguments.validation_split_percentage)
    return found


def describe_source(arguments: DataArguments) -> str:
    """Describe the source of the text in words, for the records of a run."""
    files = arguments.train_file or arguments.validation_file or arguments.test_file
    if files:
        return ", ".join(Path(name).name for name in files)
    if arguments.dataset_name in (None, STDLIB):
        return f"sources of the Python {platform.python_version()} standard library"
    return " ".join(filter(None, [arguments.dataset_name, arguments.dataset_config_name]))


def describe_documents(documents: Dataset) -> dict[str, int | str]:
    """Return the number of documents, their UTF-8 bytes and the SHA-256 of these bytes one after another."""
    digest, size, count = hashlib.sha256(), 0, 0
    for row in read_rows(documents):
        encoded = row["text"].encode()
        digest.update(encoded)
        size += len(encoded)
        count += not row.get("continues")
    return {"documents": count, "bytes": size, "sha256": digest.hexdigest()}


def describe_text(documents: Documents) -> dict[str, dict[str, Any]]:
    """Describe the documents of each split, with what was left out of it and what stands in training, too; of a stream, its files.

    What was left out and what stands in training is also logged as a warning.
    """
    found: dict[str, dict[str, Any]] = {}
    if documents.streamed and isinstance(documents.train, IterableDataset):
        found["train"] = describe_files(documents.streamed)
    for split in SPLITS:
        rows = getattr(documents, split)
        if isinstance(rows, Dataset):
            found[split] = describe_documents(rows)
            if left_out := documents.left_out.get(split):
                found[split]["left_out"] = left_out
                reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
                logger.warning("left out of the %s text: %s", split, reasons)
    if isinstance(documents.train, Dataset):
        for split, shared in _also_in_training(documents).items():
            found[split]["also_in_training"] = shared
            logger.warning("%s bytes of the %s text stand in the training text, too", shared["bytes"], split)
    return found


def _also_in_training(documents: Documents) -> dict[str, dict[str, int]]:
    """Count the rows of the texts for evaluation that are rows of the training text, and their bytes, where there are any."""
    asked = {split: rows for split in SPLITS[1:] if (rows := getattr(documents, split)) is not None}
    wanted = {hash(row["text"]) for rows in asked.values() for row in read_rows(rows)}
    trained = (
        {key for row in read_rows(cast(Dataset, documents.train)) if (key := hash(row["text"])) in wanted} if wanted else set()
    )
    found: dict[str, dict[str, int]] = {}
    for split, rows in asked.items():
        sizes = [len(row["text"].encode()) for row in read_rows(rows) if hash(row["text"]) in trained] if trained else []
        if sizes:
            found[split] = {"documents": len(sizes), "bytes": sum(sizes)}
    return found


def load_files(names: list[str], text_column: str = "text") -> Dataset:
    """Read local files.

    Args:
        names: files, folders (everything in them but hidden files) and glob patterns. Files of other types than those of tables
            (.jsonl, .json, .csv, .tsv, .parquet) are text; they may be compressed (gzip, bzip2, xz, zstd, lz4).
        text_column: the column of tables that holds the documents.

    Returns:
        The documents that are not empty, as `Documents` says, mapped into memory; the files of a folder or pattern come sorted.

    Raises:
        ValueError: there is no such file, no text in them, or some are no text; all of these are named.
    """
    return _read_files(names, text_column)[0]


def load_text(path: str | Path) -> list[str]:
    """Read the lines of one text file with their line breaks; only `\\n`, `\\r\\n` and `\\r` end a line."""
    return list(io.StringIO("".join(load_files([str(path)])["text"])))


def _read_splits(files: dict[str, list[str]], text_column: str) -> Documents:
    found = Documents()
    for split, names in files.items():
        rows, left_out = _read_files(names, text_column)
        setattr(found, split, rows)
        if left_out:
            found.left_out[split] = left_out
    return found


def _stream_splits(files: dict[str, list[str]], arguments: DataArguments) -> Documents:
    """Stream the training text; texts for evaluation are read whole, into tables on the disk."""
    found = _read_splits({split: names for split, names in files.items() if split != "train"}, arguments.text_column)
    if "train" in files:
        percentage = None if found.validation is not None else arguments.validation_split_percentage
        found.streamed = find_files(files["train"])[0]
        found.train, held = stream_files(found.streamed, arguments.text_column, percentage)
        found.validation = held if held is not None else found.validation
    return found


def _read_files(names: list[str], text_column: str) -> tuple[Dataset, dict[str, int]]:
    """Read files once: the table is kept under their contents, formats and the column."""
    paths, left_out = find_files(names)
    key = [text_column, [[file_kind(path), file_sha256(path)] for path in paths]]
    documents, facts = cached_table("documents", key, DOCUMENTS, partial(_document_batches, paths, text_column))
    if len(documents) == 0:
        raise ValueError(f"{', '.join(names)}: no text found, every document is empty")
    if not facts["continues"]:
        documents = documents.remove_columns("continues")
    return documents, dict(left_out) | facts["left_out"]


def _document_batches(paths: list[Path], text_column: str, facts: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """Yield the documents of files; those that are empty or missing are left out and counted."""
    facts |= {"continues": False, "left_out": {}}
    left_out: Counter[str] = Counter()
    refused: list[str] = []
    batch: list[Piece] = []
    size = 0
    for path in tqdm(paths, desc="Reading", unit=" files", disable=None):
        try:
            for piece in read_file(path, text_column):
                if piece.text:
                    batch.append(piece)
                    size += len(piece.text)
                    facts["continues"] |= piece.continues
                else:
                    left_out["missing values" if piece.text is None else "empty documents"] += 1
                if size >= PIECE:
                    yield pa.RecordBatch.from_pylist([row._asdict() for row in batch], DOCUMENTS)
                    batch, size = [], 0
        except BadFile as error:
            refused.append(str(error))
    if refused:
        raise ValueError("; ".join(refused[:NAMED]) + (f"; and {more} more" if (more := len(refused) - NAMED) > 0 else ""))
    yield pa.RecordBatch.from_pylist([row._asdict() for row in batch], DOCUMENTS)
    facts["left_out"] = dict(left_out)


def _refuse_shared_files(files: dict[str, list[str]]) -> None:
    for split in files.keys() - {"train"} if "train" in files else ():
        if shared := shared_files(files["train"], files[split]):
            raise ValueError(
                f"{', '.join(map(str, shared[:NAMED]))} would be both trained and evaluated on (train_file and {split}_file): "
                "take it out of one of them; without validation_file, a part of the training text is set apart"
            )


def _hold_out(documents: Dataset | IterableDataset, percentage: float) -> tuple[Dataset | IterableDataset, Dataset]:
    """Set text for validation apart: a share of the bytes, or the beginning of a stream."""
    if isinstance(documents, IterableDataset):
        held = _beginning(documents)  # left out by what it says: skip() would leave out other rows of each share of the shards
        digests = {hashlib.sha256(text.encode()).digest() for text in held["text"]}
        return documents.filter(lambda text: hashlib.sha256(text.encode()).digest() not in digests, input_columns="text"), held
    return hold_out(documents, percentage)


def _beginning(documents: IterableDataset) -> Dataset:
    return Dataset.from_list(list(documents.take(STREAMED_EVALUATION)))


def _load_hub(name: str, arguments: DataArguments) -> Documents:
    loaded = _load_dataset(name, arguments)
    found = Documents()
    for split in filter(loaded.__contains__, SPLITS):
        rows = _text_column(name, loaded[split], arguments.text_column)
        filled = rows.filter(bool, input_columns="text")
        if isinstance(filled, IterableDataset):
            filled = filled if split == "train" else _beginning(filled)
        elif missing := len(rows) - len(filled):
            found.left_out[split] = {"empty documents or missing values": missing}
        setattr(found, split, filled)
    if not any(getattr(found, split) for split in SPLITS):
        raise ValueError(f"{name} has none of the splits {SPLITS}, only {list(loaded)}")
    return found


def _text_column(name: str, table: Any, column: str) -> Any:
    """Return the table with nothing but its column of documents, named "text"."""
    if table.column_names is not None and column not in table.column_names:
        raise ValueError(f"{name} has no column {column!r}; text_column may be one of {table.column_names}")
    kind = getattr((table.features or {}).get(column), "dtype", "string")
    if kind not in ("string", "large_string"):
        raise ValueError(f"{name}: column {column!r} holds {kind}, not text")
    table = table.select_columns(column)
    return table if column == "text" else table.rename_column(column, "text")


def _load_dataset(name: str, arguments: DataArguments) -> Any:
    try:
        return load_dataset(name, arguments.dataset_config_name, streaming=arguments.streaming)
    except (OSError, DatasetGenerationError) as error:
        raise ValueError(f"dataset_name={name!r} cannot be loaded: {error}") from error
