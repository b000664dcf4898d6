"""Run what is not training; python -m hf_relpos COMMAND --help explains a command."""

import argparse
import sys
from collections.abc import Sequence

from hf_relpos.commands.card import add_card
from hf_relpos.commands.compare import add_compare
from hf_relpos.commands.convert import add_convert
from hf_relpos.commands.evaluate import add_evaluate
from hf_relpos.commands.generate import add_generate
from hf_relpos.commands.schemes import add_schemes


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all sub-commands."""
    parser = argparse.ArgumentParser(prog="python -m hf_relpos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_evaluate(commands)
    add_generate(commands)
    add_card(commands)
    add_compare(commands)
    add_schemes(commands)
    add_convert(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the sub-commands; what is wrong with its arguments ends it with one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)  # what follows is for train_lm.py
    arguments = build_parser().parse_args(words[:cut], argparse.Namespace(rest=words[cut + 1 :]))
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as stop:
        print(f"interrupted{stop}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
