"""Bits that a language model needs for a byte of text."""

import math

import datasets
import evaluate

DESCRIPTION = "Summed negative log-likelihood in bits over the bytes of the text: comparable across tokenizers."

INPUTS = """
Args:
    nll: summed negative log-likelihood (natural logarithm) of the tokens of a text, one number an example.
    bytes: UTF-8 bytes of each of these texts.
Returns:
    bits_per_byte: sum of nll / log(2) / sum of bytes.
"""


class BitsPerByte(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"nll": datasets.Value("float64"), "bytes": datasets.Value("int64")}),
        )

    def _compute(self, nll, bytes):
        return {"bits_per_byte": math.fsum(nll) / math.log(2) / sum(bytes)}
