"""Indirect indexing: which letter stands so many places left or right of a given one? For decoders.

Definition: arXiv 2509.10534, section 4 and appendix A.1. A string of 20 to 40 different letters of both cases, one of them,
a shift of at most 15 to the left or the right, and the letter there, with commas between; letters, digits, signs and the
comma are tokens, and only the last token is asked: "QEOHOUDKfeSrMVNlCzXu,z,-3,N" of the paper. A shift of 0 is left out here,
shifts are uniform over those that stay within the string, and longer strings, up to the 52 letters that there are, show how
far a trained model goes; the paper trains on 1,000,000 examples.
"""

import numpy as np

from hf_relpos.data.probes.base import Probe
from hf_relpos.data.probes.base import Row
from hf_relpos.data.probes.base import all_lengths
from hf_relpos.data.probes.base import answer_at_the_end
from hf_relpos.data.probes.base import uniform_guess

COMMA, LEFT, RIGHT, FIRST_DIGIT, FIRST_LETTER = 1, 2, 3, 4, 14
LETTERS = 52
FARTHEST = 15


def _draw(generator: np.random.Generator, length: int) -> Row:
    letters = (FIRST_LETTER + generator.choice(LETTERS, length, replace=False)).tolist()
    place = int(generator.integers(length))
    shifts = [shift for shift in range(-FARTHEST, FARTHEST + 1) if shift and 0 <= place + shift < length]
    shift = shifts[generator.integers(len(shifts))]
    number = [LEFT if shift < 0 else RIGHT, *(FIRST_DIGIT + int(digit) for digit in str(abs(shift)))]
    return answer_at_the_end([*letters, COMMA, letters[place], COMMA, *number, COMMA], [letters[place + shift]])


INDIRECT_INDEXING = Probe(
    name="indirect_indexing",
    family="decoder",
    question="Does it find the letter at a given offset from another letter, each place by content and by distance?",
    source="arXiv 2509.10534, section 4 and appendix A.1",
    vocab_size=FIRST_LETTER + LETTERS,
    sizes=(40, 52),
    limits=(20, LETTERS),
    cases=all_lengths,
    draw=_draw,
    width=lambda size: size + 8,
    blind=uniform_guess(LETTERS),
)
