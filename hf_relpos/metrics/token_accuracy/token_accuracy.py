"""Share of tokens to which a language model gives the highest probability."""

import datasets
import evaluate

DESCRIPTION = "Correctly predicted tokens over all tokens to be predicted; every token weighs the same."

INPUTS = """
Args:
    correct: correctly predicted tokens, one number an example.
    tokens: tokens to be predicted in each example.
Returns:
    accuracy: sum of correct / sum of tokens.
"""


class TokenAccuracy(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"correct": datasets.Value("int64"), "tokens": datasets.Value("int64")}),
        )

    def _compute(self, correct, tokens):
        return {"accuracy": sum(correct) / sum(tokens)}
