"""Exact match and overlap of answers that are spans of tokens."""

import datasets
import evaluate

DESCRIPTION = "How well predicted spans meet the right ones."

INPUTS = """
Args:
    predictions: first and last index of each predicted span; a span that ends before it begins is empty.
    references: first and last index of each right span.
Returns:
    exact_match: share of spans that are right at both ends.
    f1: mean over spans of the F1 of their indices.
"""


class AnswerScores(evaluate.Metric):
    def _info(self):
        span = datasets.Sequence(datasets.Value("int64"), length=2)
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": span, "references": span}),
        )

    def _compute(self, predictions, references):
        exact, overlap = 0, 0.0
        for (start, end), (first, last) in zip(predictions, references, strict=True):
            shared = max(0, min(end, last) - max(start, first) + 1)
            exact += (start, end) == (first, last)
            overlap += 2 * shared / (max(0, end - start + 1) + last - first + 1)
        return {"exact_match": exact / len(references), "f1": overlap / len(references)}
