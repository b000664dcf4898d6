"""Copy, reverse, sort, addition and parity at lengths beyond the trained ones.

Definitions: arXiv 2305.19466, section 3 and appendix D.1 (copy's third variant, reverse's first, sorting of single tokens).
Lengths are uniform from 1 to L = 20 in training; sorting has an order of 50 symbols; digits are tokens, the most significant
one first, and numbers of all pairs of lengths are added. What differs: no words stand around the symbols; copying and
reversing have 50 symbols as well; addition is trained to 8 digits; a size beyond the trained one has the lengths that no
smaller size has, where the paper's test mixes seen and unseen ones; the answer's end is not asked, so that an example is right
when all symbols of its answer are.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from hf_relpos.data.probes.base import Probe
from hf_relpos.data.probes.base import Row
from hf_relpos.data.probes.base import all_lengths
from hf_relpos.data.probes.base import answer_at_the_end
from hf_relpos.data.probes.base import uniform_guess

SEPARATOR, FIRST = 1, 2
SYMBOLS = 50
PLUS, EQUALS, ZERO = 1, 2, 3
SOURCE = "arXiv 2305.19466, section 3 and appendix D.1"


def _rearranged(rearrange: Callable[[list[int]], Sequence[int]]) -> Callable[[np.random.Generator, int], Row]:
    def draw(generator: np.random.Generator, length: int) -> Row:
        symbols = generator.integers(FIRST, FIRST + SYMBOLS, length).tolist()
        return answer_at_the_end([*symbols, SEPARATOR], rearrange(symbols))

    return draw


def _parity(generator: np.random.Generator, length: int) -> Row:
    bits = generator.integers(2, size=length)
    return answer_at_the_end([*(FIRST + bits).tolist(), SEPARATOR], [FIRST + int(bits.sum()) % 2])


def _number(generator: np.random.Generator, length: int) -> list[int]:
    """Draw a number with so many digits, without leading zeros."""
    digits = generator.integers(10, size=length)
    if length > 1:
        digits[0] = generator.integers(1, 10)
    return digits.tolist()


def _addition(generator: np.random.Generator, lengths: tuple[int, int]) -> Row:
    numbers = [_number(generator, length) for length in lengths]
    total = sum(int("".join(map(str, digits))) for digits in numbers)
    left, right, answer = ([ZERO + digit for digit in digits] for digits in (*numbers, map(int, str(total))))
    return answer_at_the_end([*left, PLUS, *right, EQUALS], answer)


def _pairs_of_lengths(least: int, size: int) -> list[tuple[int, int]]:
    """Return the lengths of two numbers, the longer one between the two bounds."""
    lengths = range(1, size + 1)
    return [(left, right) for left in lengths for right in lengths if max(left, right) >= least]


def _guess_sorted(length: int) -> tuple[float, float]:
    """Guess each rank's most frequent symbol: the k-th of n symbols is at most v when k of them are."""
    share = np.arange(1, SYMBOLS + 1) / SYMBOLS
    right = 0.0
    at_least = np.zeros(SYMBOLS)
    for rank in range(length, 0, -1):
        at_least += math.comb(length, rank) * share**rank * (1 - share) ** (length - rank)
        right += np.diff(at_least, prepend=0).max()
    return right, length


@cache
def _guess_sum(lengths: tuple[int, int]) -> tuple[float, float]:
    """Guess each digit of a sum by its place and the number of digits: digits are independent, and carries are a chain."""
    size = max(lengths)
    columns = [_column(*(_digits(length, place) for length in lengths)) for place in range(size)]
    carries = [np.array([1.0, 0.0])]
    for column in columns:
        carries.append((carries[-1] @ column).reshape(10, 2).sum(0))
    right = longer = carries[-1][1]  # the first digit of a longer sum is 1
    after = np.eye(2)  # (carry, whether the sum has a digit more)
    for carry, column in zip(carries[-2::-1], reversed(columns), strict=True):
        right += ((carry @ column).reshape(10, 2) @ after).max(0).sum()
        after = column.reshape(2, 10, 2).sum(1) @ after
    return float(right), float(size + longer)


def _digits(length: int, place: int) -> range:
    """Return what may stand in a number's column, the last one being 0: no zero leads, and nothing counts as zero."""
    return range(1) if place >= length else range(place == length - 1 > 0, 10)


@cache
def _column(left: range, right: range) -> np.ndarray:
    """Return the probabilities of a column, `(carry in, digit and carry out)`."""
    found = np.zeros((2, 10, 2))
    for first, second, carry in product(left, right, range(2)):
        above, digit = divmod(first + second + carry, 10)
        found[carry, digit, above] += 1 / (len(left) * len(right))
    return found.reshape(2, 20)


def _probe(name: str, question: str, **fields: Any) -> Probe:
    shared = {"sizes": (20, 40, 80), "cases": all_lengths, "width": lambda size: 2 * size + 1, "vocab_size": FIRST + SYMBOLS}
    return Probe(name=name, question=question, family="decoder", source=SOURCE, limits=(1, None), **(shared | fields))


def _guess_each(length: int) -> tuple[float, float]:
    return length / SYMBOLS, length


COPY = _probe("copy", "Can it repeat a sequence?", draw=_rearranged(list), blind=_guess_each)
REVERSE = _probe("reverse", "Can it repeat a sequence backwards?", draw=_rearranged(lambda x: x[::-1]), blind=_guess_each)
SORT = _probe("sort", "Can it sort a sequence?", draw=_rearranged(sorted), blind=_guess_sorted)
ADDITION = _probe(
    "addition",
    "Can it add two numbers?",
    vocab_size=ZERO + 10,
    sizes=(8, 16, 32),
    cases=_pairs_of_lengths,
    draw=_addition,
    width=lambda size: 3 * size + 3,
    blind=_guess_sum,
)
PARITY = _probe(
    "parity",
    "Is the number of ones odd?",
    vocab_size=FIRST + 2,
    draw=_parity,
    width=lambda size: size + 2,
    blind=uniform_guess(2),
)
