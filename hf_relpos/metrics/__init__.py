"""The `evaluate` modules that this package ships, loaded from disk."""

from collections.abc import Sequence
from pathlib import Path

import evaluate

MODULES = Path(__file__).parent


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Load one of the package's metrics; nothing is downloaded.

    Args:
        name: "perplexity", "bits_per_byte" or "token_accuracy".
    """
    allowed = sorted(path.name for path in MODULES.iterdir() if (path / f"{path.name}.py").is_file())
    if name not in allowed:
        raise ValueError(f"unknown metric {name!r}; one of {allowed}")
    return evaluate.load(str(MODULES / name), keep_in_memory=True)


def compute_metric(name: str, **rows: Sequence[float]) -> dict[str, float]:
    """Compute one of the package's metrics at once from the rows of its features."""
    return load_metric(name).compute(**rows) or {}
