"""Exact match and character error rate of generated texts."""

import datasets
import evaluate

DESCRIPTION = "How well generated texts meet the right ones, character by character."

INPUTS = """
Args:
    predictions: generated texts.
    references: the right texts.
Returns:
    exact_match: share of texts that are right.
    character_error_rate: characters to insert, delete or replace, over the characters of the references.
"""


def edits(text, wanted):
    """Return how many characters must be inserted, deleted or replaced in `text` to make `wanted` (Levenshtein 1966)."""
    row = list(range(len(wanted) + 1))
    for place, character in enumerate(text, 1):
        corner, row[0] = row[0], place
        for at, other in enumerate(wanted, 1):
            corner, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, corner + (character != other))
    return row[-1]


class TextMatch(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")}),
        )

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references, strict=True))
        wrong = sum(edits(text, wanted) for text, wanted in pairs)
        return {
            "exact_match": sum(text == wanted for text, wanted in pairs) / len(pairs),
            "character_error_rate": wrong / sum(len(wanted) for _, wanted in pairs),
        }
