"""The `evaluate` modules that this package ships, loaded from disk."""

from collections.abc import Sequence
from pathlib import Path

import evaluate
import numpy as np
from transformers import EvalPrediction

MODULES = Path(__file__).parent


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Load one of the package's metrics; nothing is downloaded.

    Args:
        name: of a language model "perplexity", "bits_per_byte" and "token_accuracy"; of classes "label_scores", of spans
            "answer_scores", of generated texts "text_match".
    """
    allowed = sorted(path.name for path in MODULES.iterdir() if (path / f"{path.name}.py").is_file())
    if name not in allowed:
        raise ValueError(f"unknown metric {name!r}; one of {allowed}")
    return evaluate.load(str(MODULES / name), keep_in_memory=True)


def compute_metric(name: str, **rows: Sequence[float]) -> dict[str, float]:
    """Compute one of the package's metrics at once from the rows of its features."""
    return load_metric(name).compute(**rows) or {}


def score_labels(prediction: EvalPrediction) -> dict[str, float]:
    """Compute accuracy and macro-F1 of what a Trainer predicted: of rows, tokens or choices; -100 marks no label."""
    guesses, labels = np.asarray(prediction.predictions).argmax(-1), np.asarray(prediction.label_ids)
    return compute_metric("label_scores", predictions=guesses.ravel().tolist(), references=labels.ravel().tolist())
