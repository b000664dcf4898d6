"""`convert`: turn a checkpoint of another architecture into a folder of this package."""

import argparse
from typing import Any

from hf_relpos.conversion.api import SOURCES
from hf_relpos.conversion.api import convert_folder


def add_convert(commands: Any) -> None:
    """Add `convert`, which turns a checkpoint of another architecture into a folder of this package."""
    parser = commands.add_parser("convert", help="turn a checkpoint of another architecture into a folder of this package")
    parser.add_argument("source", help="folder of the checkpoint, or its name on the Hub")
    parser.add_argument("output", help="new folder")
    parser.add_argument("--allow_pickle", action="store_true", help="read a .bin file; nothing but tensors is unpickled")
    parser.epilog = f"What can be converted, by model_type: {', '.join(SOURCES)}."
    parser.set_defaults(run=run_convert)


def run_convert(arguments: argparse.Namespace) -> None:
    """Convert, and print what became of each weight."""
    print(convert_folder(arguments.source, arguments.output, arguments.allow_pickle))
    print(f"written: {arguments.output}")
