"""Cells of a comparison: one scheme, seed and task, with a folder that says what shaped it, who works on it, and what came out.

Several processes and machines share the folder of all cells without a server. A process claims a cell by creating a file that nobody
else can create, and takes over the claim of a process of its own machine that has ended. A result is written at once or not at all,
so a cell that was stopped is a cell that was not begun.
"""

import ast
import hashlib
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.arguments import parse_arguments

RESULT, COST, ERROR, IDENTITY = "result.json", "cost.json", "error.json", "identity.json"
# Seconds after which a claim without content, of a process that was killed while it wrote it, counts for nothing.
UNWRITTEN = 60
# Modules that only read results: they shape no number of a cell.
READERS = (
    "cells",
    "comparison",
    "plan",
    "statistics",
    "table",
    "matching",
    "report",
    "findings",
    "cost_findings",
    "page",
    "plots",
)


@dataclass(frozen=True)
class Cell:
    """One scheme, seed and task.

    Attributes:
        task: the task's name in the comparison.
        kind: what the task is, one of `OPTIONS` (`plan.py`).
        scheme: the scheme's name in the comparison.
        seed: the seed of weights and data.
        settings: the arguments of `train_lm.py` that train it.
        options: the task's own options.
        text: what its text is, by digest.
        not_applicable: why the scheme cannot do the task at all.
    """

    task: str
    kind: str
    scheme: str
    seed: int
    settings: Mapping[str, Any] = field(hash=False)
    options: Mapping[str, Any] = field(hash=False)
    text: Mapping[str, Any] = field(hash=False)
    not_applicable: str | None = None

    @property
    def arguments(self) -> tuple[ModelArguments, DataArguments, RunArguments]:
        """Return the settings as `train_lm.py` reads them."""
        words = []
        for name, value in self.settings.items():
            values = value if isinstance(value, list) and name.endswith("_file") else [value]
            words += [f"--{name}", *(one if isinstance(one, str) else json.dumps(one) for one in values)]
        return parse_arguments(words)

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that shapes the numbers of the cell."""
        own = {name: getattr(self, name) for name in ("task", "kind", "scheme", "seed", "settings", "options", "text")}
        own |= {"code": code_digest(), "torch": torch.__version__, "transformers": transformers.__version__}
        return json.loads(json.dumps(own))

    @property
    def key(self) -> str:
        """Return a digest of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Return the name of the cell's folder; cells of other settings have other names, so that results never mix."""
        plain = re.sub(r"[^\w.+-]+", "_", f"{self.task}-{self.scheme}")
        return f"{plain}-seed{self.seed}-{self.key}"


@cache
def code_digest() -> str:
    """Return a digest of the code that shapes numbers: its syntax without docstrings and comments."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in ("model", "data", "training", "evaluation", "metrics"):
        for path in sorted((package / folder).rglob("*.py")):
            if folder != "evaluation" or path.stem not in READERS:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                for node in ast.walk(tree):
                    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
                        node.body = node.body[1:]
                digest.update(f"{path.relative_to(package).as_posix()}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:12]


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there, whoever else writes it at the same time."""
    part = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_bytes` does."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a file that `write_json` wrote; None if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


class CellFolder:
    """The folder of a cell.

    Args:
        root: the folder of all cells.
        cell: the cell.
    """

    def __init__(self, root: Path, cell: Cell) -> None:
        self.path, self.cell = root / cell.name, cell

    @property
    def result(self) -> dict[str, Any] | None:
        """Return what came out, None if the cell is not finished."""
        return read_json(self.path / RESULT)

    @property
    def error(self) -> str | None:
        """Return the error that stopped the last try, None if there was none or the cell is finished."""
        found = None if self.finished else read_json(self.path / ERROR)
        return found and found["error"]

    @property
    def finished(self) -> bool:
        """Return whether there is a result."""
        return (self.path / RESULT).is_file()

    def write(self, result: Mapping[str, Any], cost: Mapping[str, Any]) -> None:
        """Write what came out; what depends on time and machine goes into a file of its own."""
        write_json(self.path / IDENTITY, self.cell.identity)
        write_json(self.path / COST, cost)
        write_json(self.path / RESULT, result)  # last: it marks a finished cell

    def write_error(self, error: BaseException) -> None:
        """Write why the cell failed."""
        text = f"{type(error).__name__}: {error}"
        write_json(self.path / ERROR, {"error": text, "trace": traceback.format_exception(error)})

    def claim(self) -> bool:
        """Claim the cell for this process; false if it is finished, or a living process has it.

        Claims are numbered: who takes over a dead one creates the next number, which succeeds for one process only.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        last = self._last_claim()
        if self.finished or (last is not None and self.holder() is not None):
            return False
        try:
            with (self.path / f"claim-{0 if last is None else last + 1}").open("x", encoding="utf-8") as file:
                file.write(json.dumps(_this_process()))
        except FileExistsError:
            return False
        if self.finished:  # by who gave it back just now
            self.release()
        return not self.finished

    def release(self) -> None:
        """Give the cell back: its result or error is written."""
        for path in self.path.glob("claim-*"):
            path.unlink(missing_ok=True)

    def holder(self) -> str | None:
        """Return who works on the cell, in words; None if nobody does, as far as this machine can tell."""
        last = self._last_claim()
        if last is None:
            return None
        path = self.path / f"claim-{last}"
        try:
            text, age = path.read_text(encoding="utf-8"), time.time() - path.stat().st_mtime
        except FileNotFoundError:
            return None
        if not text:
            return "a process that begins" if age < UNWRITTEN else None
        owner = json.loads(text)
        if owner["host"] == socket.gethostname() and not _lives(owner):
            return None
        return f"process {owner['pid']} of {owner['host']} ({path}: remove it if that process is gone)"

    def _last_claim(self) -> int | None:
        return max((int(path.name.partition("-")[2]) for path in self.path.glob("claim-*")), default=None)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": psutil.Process(pid).create_time()}


def _lives(owner: Mapping[str, Any]) -> bool:
    """Return whether a process of this machine still runs; its number may have gone to another one."""
    try:
        found = psutil.Process(owner["pid"])
        return found.status() != psutil.STATUS_ZOMBIE and abs(found.create_time() - owner["started"]) < 1
    except psutil.NoSuchProcess:
        return False
