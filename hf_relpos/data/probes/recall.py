"""Recall at a growing distance: associative recall of many queries, a passkey, a fact in a haystack. For decoders.

The number of things to remember is the same at every size; what grows is the distance to them.
"""

import numpy as np

from hf_relpos.data.packing import IGNORED
from hf_relpos.data.probes.base import PAD
from hf_relpos.data.probes.base import Probe
from hf_relpos.data.probes.base import Row
from hf_relpos.data.probes.base import answer_at_the_end
from hf_relpos.data.probes.base import one_length
from hf_relpos.data.probes.base import uniform_guess

SIZES = (64, 128, 256, 512)

MQAR_VOCABULARY, MQAR_PAIRS, MQAR_POWER = 128, 8, 0.01
ASK, SAY = 1, 2
FIRST_DIGIT, DIGITS = 3, 5
FIRST_FILLER, FILLERS = 13, 16
WHERE, WENT, STOP = 1, 2, 3
FIRST_PERSON, PERSONS = 4, 4
FIRST_PLACE, PLACES = 8, 8
FIRST_WORD, WORDS = 16, 64
FACTS, LONGEST_SENTENCE = 4, 12


def _mqar(generator: np.random.Generator, length: int) -> Row:
    """Draw pairs of a key and a value, then the keys again, each followed by its value, at power-law gaps."""
    half = MQAR_VOCABULARY // 2
    keys = 1 + generator.choice(half - 1, MQAR_PAIRS, replace=False)
    values = half + generator.choice(half, MQAR_PAIRS, replace=False)
    slots = (length - 2 * MQAR_PAIRS) // 2
    share = np.arange(1, slots + 1) ** (MQAR_POWER - 1)
    places = 2 * (MQAR_PAIRS + generator.choice(slots, MQAR_PAIRS, replace=False, p=share / share.sum()))
    tokens, labels = np.full(length, PAD), np.full(length, IGNORED)
    tokens[: 2 * MQAR_PAIRS : 2], tokens[1 : 2 * MQAR_PAIRS : 2] = keys, values
    tokens[places], tokens[places + 1], labels[places + 1] = keys, values, values
    return tokens.tolist(), labels.tolist()


def _passkey(generator: np.random.Generator, length: int) -> Row:
    """Draw digits that stand anywhere in a text which repeats itself; the end asks for them."""
    key = generator.integers(FIRST_DIGIT, FIRST_DIGIT + 10, DIGITS).tolist()
    around = length - 2 * (DIGITS + 1)
    text = (FIRST_FILLER + np.arange(around) % FILLERS).tolist()
    place = generator.integers(around + 1)
    return answer_at_the_end([*text[:place], SAY, *key, *text[place:], ASK], key)


def _haystack(generator: np.random.Generator, length: int) -> Row:
    """Draw facts between sentences of noise; the end asks where a person went last."""
    persons = FIRST_PERSON + generator.integers(PERSONS, size=FACTS)
    places = FIRST_PLACE + generator.integers(PLACES, size=FACTS)
    sentences = _noise(generator, length - 4 * FACTS - 3)
    asked = generator.choice(np.unique(persons))
    answer = places[persons == asked][-1]
    gaps = np.sort(generator.integers(len(sentences) + 1, size=FACTS))
    for fact in reversed(range(FACTS)):
        sentences.insert(gaps[fact], [int(persons[fact]), WENT, int(places[fact]), STOP])
    return answer_at_the_end([*sum(sentences, []), WHERE, int(asked)], [int(answer)])


def _noise(generator: np.random.Generator, length: int) -> list[list[int]]:
    """Draw sentences of so many tokens together, from words whose frequencies follow Zipf's law."""
    share = 1 / np.arange(1, WORDS + 1)
    words = FIRST_WORD + generator.choice(WORDS, length, p=share / share.sum())
    sentences = []
    while len(words):
        size = int(min(generator.integers(4, LONGEST_SENTENCE + 1), len(words)))
        sentences.append([*words[: size - 1].tolist(), STOP])
        words = words[size:]
    return sentences


MQAR = Probe(
    name="mqar",
    family="decoder",
    question="Does it find the value of each of 8 keys again, at gaps that follow a power law?",
    source="multi-query associative recall, arXiv 2312.04927 and its published generator (exponent 0.01, filler 0); "
    "here the value stands behind its query, the vocabulary has 128 tokens for 8,192, and the number of pairs does not grow",
    vocab_size=MQAR_VOCABULARY,
    sizes=SIZES,
    limits=(4 * MQAR_PAIRS, None),
    cases=one_length,
    draw=_mqar,
    width=lambda size: size,
    blind=uniform_guess(MQAR_VOCABULARY // 2),
)
PASSKEY = Probe(
    name="passkey",
    family="decoder",
    question="Does it repeat five digits that stand anywhere in a text which says nothing else?",
    source="arXiv 2305.16300; here tokens stand for the words of the text, which repeats itself every 16",
    vocab_size=FIRST_FILLER + FILLERS,
    sizes=SIZES,
    limits=(2 * (DIGITS + 1), None),
    cases=one_length,
    draw=_passkey,
    width=lambda size: size,
    blind=uniform_guess(10),
)
HAYSTACK = Probe(
    name="haystack",
    family="decoder",
    question="Does it find the last of a person's facts in a growing text of other things?",
    source="in the manner of BABILong, arXiv 2406.10149, on the first task of bAbI (one supporting fact); "
    "here 4 facts on 4 persons and 8 places, between sentences of 64 words that follow Zipf's law in place of PG-19",
    vocab_size=FIRST_WORD + WORDS,
    sizes=SIZES,
    limits=(4 * FACTS + 3, None),
    cases=one_length,
    draw=_haystack,
    width=lambda size: size,
    blind=uniform_guess(PLACES),
)
