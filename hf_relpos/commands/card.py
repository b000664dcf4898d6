"""Add `card`, which writes the model card of a run's folder again."""

from typing import Any

from hf_relpos.training.model_card import write_model_card


def add_card(commands: Any) -> None:
    """Add `card`, which writes the model card of a run's folder again."""
    parser = commands.add_parser("card", help="write the model card of a run's folder again")
    parser.add_argument("folder", help="folder that train_lm.py made")
    parser.set_defaults(run=lambda arguments: print(write_model_card(arguments.folder)))
