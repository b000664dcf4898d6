"""Adjacency: are two tokens of a sequence neighbours? For encoders.

As published, two places of a sequence of 8 random tokens are drawn, the outputs at both are summed, and a linear layer says
from the sum whether they are adjacent. Nothing in the input tells the model which two places are meant. Here the labels stand
at both places, so that each output is classified by itself; a caller that sums the logits of a row's two asked places has
the published set-up, since the sum and the linear layer commute. Summed or not, it cannot be learned: an output cannot know
the other place, and for places a < b < c < d in a row, the pairs ab and cd add up to the same sum as ac and bd. The best of
all sums is right for 23 of the 28 pairs of length 8, where "no" is right for 21.

In the marked variant both tokens are taken from a second half of the alphabet, so that each of the two outputs can know where the
other place is. Half of its examples are adjacent, at every length.
"""

import numpy as np

from hf_relpos.data.packing import IGNORED
from hf_relpos.data.probes.base import Probe
from hf_relpos.data.probes.base import Row
from hf_relpos.data.probes.base import one_length

NO, YES, FIRST = 1, 2, 3
SYMBOLS = 32
SIZES = (8, 16, 32, 64)


def _pair(generator: np.random.Generator, length: int) -> np.ndarray:
    """Draw two different places, all pairs alike."""
    return np.sort(generator.choice(length, 2, replace=False))


def _published(generator: np.random.Generator, length: int) -> Row:
    tokens = generator.integers(FIRST, FIRST + SYMBOLS, length)
    first, second = _pair(generator, length)
    labels = [IGNORED] * length
    labels[first] = labels[second] = YES if second - first == 1 else NO
    return tokens.tolist(), labels


def _marked(generator: np.random.Generator, length: int) -> Row:
    tokens = generator.integers(FIRST, FIRST + SYMBOLS, length)
    adjacent = generator.integers(2)
    while True:
        pair = _pair(generator, length)
        if (pair[1] - pair[0] == 1) == adjacent:
            break
    tokens[pair] += SYMBOLS
    labels = np.full(length, IGNORED)
    labels[pair] = YES if adjacent else NO
    return tokens.tolist(), labels.tolist()


ADJACENCY = Probe(
    name="adjacency",
    family="encoder",
    question="Are two random tokens adjacent, read from the outputs at both (as published)?",
    source="the published adjacency experiment: absolute against relative positions, sequence length 8",
    vocab_size=FIRST + SYMBOLS,
    sizes=SIZES,
    limits=(3, None),
    cases=one_length,
    draw=_published,
    width=lambda size: size,
    blind=lambda length: (2 * max(2 / length, 1 - 2 / length), 2),
)
ADJACENCY_MARKED = Probe(
    name="adjacency_marked",
    family="encoder",
    question="Are the two marked tokens adjacent?",
    source="the published adjacency experiment, with both tokens marked",
    vocab_size=FIRST + 2 * SYMBOLS,
    sizes=SIZES,
    limits=(3, None),
    cases=one_length,
    draw=_marked,
    width=lambda size: size,
    blind=lambda length: (1, 2),
)
