"""Answer MkDocs while it builds the site: folders in the navigation, and pages that come from the code.

A name that ends with a slash in `nav` stands for all pages of that folder, so that a new scheme needs no edit there.
"""

import argparse
import dataclasses
import importlib
import inspect
import os
import re
import shutil
from pathlib import Path
from typing import Any

ARGUMENTS = "<!-- arguments of train_lm.py -->"
COMMANDS = "<!-- help of the commands -->"
FIELDS = r"<!-- fields of (\w+)\.(\w+) -->"


def pages_of(folder: Path) -> list[str]:
    """Return the pages of a folder of `docs`, its index first."""
    names = sorted(path.name for path in folder.glob("*.md"))
    return [f"{folder.name}/{name}" for name in sorted(names, key=lambda name: name != "index.md")]


def expand(nav: Any, docs: Path) -> Any:
    """Replace each folder in a navigation by its pages."""
    if isinstance(nav, dict):
        return {title: expand(below, docs) for title, below in nav.items()}
    if isinstance(nav, list):
        found = []
        for entry in nav:
            found += pages_of(docs / entry) if isinstance(entry, str) and entry.endswith("/") else [expand(entry, docs)]
        return found
    return nav


def on_config(config: Any) -> Any:
    """Expand the navigation."""
    config.nav = expand(config.nav, Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Write the help of the commands in place of its marks."""
    if ARGUMENTS in markdown:
        markdown = markdown.replace(ARGUMENTS, arguments_of_training())
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, help_of_commands())
    return re.sub(FIELDS, lambda found: fields_of(*found.groups()), markdown)


def fields_of(module: str, name: str) -> str:
    """Return a table of the fields that the docstring of a configuration lists, with their defaults.

    Args:
        module: of `hf_relpos/model`.
        name: of the class.
    """
    kind = getattr(importlib.import_module(f"hf_relpos.model.{module}"), name)
    usual = {field.name: field.default for field in dataclasses.fields(kind)}
    text = inspect.cleandoc(kind.__doc__).partition("Args:\n")[2]
    lines = ["| field | meaning |", "|---|---|"]
    for names, kinds, meaning in re.findall(
        r"^ {4}(\w[\w, ]*) \((.*)\): ((?:.*\n?)(?:^ {8}.*\n?)*)", text, flags=re.MULTILINE
    ):
        for field in names.split(", "):
            default = repr(usual[field])  # a docstring that names no field fails here
            told = f"{kinds.replace(', *optional*', '')}, default `{default}`"
            lines.append(f"| `{field}` | {' '.join(meaning.split()).removesuffix('.')} ({told}). |")
    return "\n".join(lines)


def arguments_of_training() -> str:
    """Return the arguments of `train_lm.py` that are its own, a table for each group."""
    from transformers import TrainingArguments

    from hf_relpos.training import arguments

    usual = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    parts = []
    for title, group in {
        "Model": arguments.ModelArguments,
        "Text": arguments.DataArguments,
        "Run": arguments.RunArguments,
    }.items():
        lines = [f"### {title}", "", "| argument | meaning |", "|---|---|"]
        for field in dataclasses.fields(group):
            own = field.name in group.__annotations__ and field.metadata.get("help")
            if own and (group is not arguments.RunArguments or usual.get(field.name, dataclasses.MISSING) != field.default):
                default = "" if field.default in (None, dataclasses.MISSING) else f" Default: `{field.default}`."
                lines.append(f"| `--{field.name}` | {field.metadata['help'].replace('|', '/')}{default} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def help_of_commands() -> str:
    """Return what each sub-command of `python -m hf_relpos` prints for `--help`."""
    from hf_relpos.__main__ import build_parser

    os.environ["COLUMNS"] = "100"
    assert shutil.get_terminal_size().columns == 100
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    parts = [f"### {name}\n\n```text\n{parser.format_help()}```" for name, parser in commands.choices.items()]
    return "\n\n".join(parts)
