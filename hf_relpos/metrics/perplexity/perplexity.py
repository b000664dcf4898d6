"""Perplexity from summed negative log-likelihoods."""

import math

import datasets
import evaluate

DESCRIPTION = "exp of the mean negative log-likelihood of a token; every token weighs the same, however it was batched."

INPUTS = """
Args:
    nll: summed negative log-likelihood (natural logarithm) of some tokens, one number an example.
    tokens: how many tokens each number sums over.
Returns:
    perplexity: exp(sum of nll / sum of tokens); infinite where that does not fit a float.
"""


class Perplexity(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"nll": datasets.Value("float64"), "tokens": datasets.Value("int64")}),
        )

    def _compute(self, nll, tokens):
        try:
            return {"perplexity": math.exp(math.fsum(nll) / sum(tokens))}
        except OverflowError:
            return {"perplexity": math.inf}
