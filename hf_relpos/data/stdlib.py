"""The Python standard library's own sources: a text that is on every machine."""

import hashlib
import sysconfig
from pathlib import Path

# Folders that do not belong to it, or hold no program text of their own.
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


def stdlib_files() -> dict[str, list[str]]:
    """List the Python standard library's own sources, split by the SHA-256 of each file's path modulo 20."""
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if STDLIB_LEFT_OUT.isdisjoint(inside.parts):
            bucket = int(hashlib.sha256(inside.as_posix().encode()).hexdigest(), 16) % 20
            splits[{0: "validation", 1: "test"}.get(bucket, "train")].append(str(path))
    return splits
