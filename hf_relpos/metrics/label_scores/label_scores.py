"""Accuracy and macro-F1 of predicted classes."""

from collections import Counter

import datasets
import evaluate

DESCRIPTION = (
    "Share of right classes, and the mean over classes of their F1: a class that is frequent does not hide the others."
)

INPUTS = """
Args:
    predictions: predicted classes.
    references: the right classes; -100 marks a place that has none and is left out.
Returns:
    accuracy: right predictions over all.
    macro_f1: unweighted mean of F1 over the classes that occur among the references or the predictions.
"""


class LabelScores(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references):
        pairs = [(guess, right) for guess, right in zip(predictions, references, strict=True) if right != -100]
        if not pairs:
            raise ValueError("there is nothing to score: every reference is -100, or there is none")
        guessed, known = Counter(guess for guess, _ in pairs), Counter(right for _, right in pairs)
        hits = Counter(right for guess, right in pairs if guess == right)
        scores = [2 * hits[label] / (guessed[label] + known[label]) for label in guessed | known]
        return {"accuracy": hits.total() / len(pairs), "macro_f1": sum(scores) / len(scores)}
