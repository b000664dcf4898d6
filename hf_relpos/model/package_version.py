"""The version of this code, which every saved configuration names, and the oldest transformers that it computes right with."""

import re

import transformers
from transformers.utils import logging

logger = logging.get_logger(__name__)

VERSION = "0.1.0"
"""Of the package and of the code in a saved folder; `pyproject.toml` reads it from here."""
OLDEST_TRANSFORMERS = "5.24"
"""Before it `generate` knows the cache by another name: beams read the keys of other beams, without an error."""


def major_minor(version: str) -> list[int]:
    """Return the first two numbers of a version, which tell what its files may hold."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def require_transformers(installed: str) -> None:
    """Raise an ImportError for a version of transformers that is too old."""
    if major_minor(installed) < major_minor(OLDEST_TRANSFORMERS):
        raise ImportError(
            f"hf_relpos {VERSION} needs transformers {OLDEST_TRANSFORMERS} or newer, but {installed} is installed, whose generate "
            f"would give wrong tokens: pip install --upgrade 'transformers>={OLDEST_TRANSFORMERS}'"
        )


def warn_if_newer(saved: str | None) -> None:
    """Warn once of a folder from a newer major or minor version than this code. Older folders, also those without one, are read.

    Args:
        saved: the version that saved it.
    """
    if saved and major_minor(saved) > major_minor(VERSION):
        logger.warning_once(
            f"hf_relpos {saved} saved this model, but the code that loads it is hf_relpos {VERSION} and may not know all that the "
            "model needs. Update the package (pip install --upgrade hf_relpos); for code from the Hub, give the code_revision that "
            "belongs to the weights"
        )


require_transformers(transformers.__version__)
