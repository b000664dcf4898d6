"""Probes: seeded, with the sizes they say, and with answers that an independent solver finds from the tokens alone."""

import math
from collections import Counter
from itertools import combinations
from itertools import product

import pytest
import torch

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForMaskedLM
from hf_relpos.data.packing import IGNORED
from hf_relpos.data.probes import EVALUATION_SEED
from hf_relpos.data.probes import PROBES

NAMES = sorted(PROBES)
EVERY = pytest.mark.parametrize("name", NAMES)
MIXED = {"copy", "reverse", "sort", "parity", "addition", "indirect_indexing"}
"""Probes whose rows of a size have several lengths."""
NO, YES = 1, 2


def rows_of(name, size=None, count=50, seed=0):
    """Tokens and labels of a probe's rows."""
    table = PROBES[name].examples(size or PROBES[name].trained_size, count, seed)
    return list(zip(table["input_ids"][:], table["labels"][:], strict=True))


def asked(labels):
    return [(place, label) for place, label in enumerate(labels) if label != IGNORED]


def solve_adjacency(tokens, places):
    return [YES if places[1] - places[0] == 1 else NO] * 2


def solve_marked(tokens, places):
    assert places == [place for place, token in enumerate(tokens) if token >= 3 + 32]
    return solve_adjacency(tokens, places)


def solve_number(tokens, places):
    text = "".join(" +=0123456789"[token] for token in tokens[: places[0]])
    left, right = text.removesuffix("=").split("+")
    assert (left, right) == (str(int(left)), str(int(right)))
    return [" +=0123456789".index(digit) for digit in str(int(left) + int(right))]


def solve_mqar(tokens, places):
    dictionary = dict(zip(tokens[0:16:2], tokens[1:16:2], strict=True))
    assert len(dictionary) == 8 and all(place % 2 for place in places)
    return [dictionary.pop(tokens[place - 1]) for place in places]


def solve_passkey(tokens, places):
    start = tokens.index(2) + 1
    assert tokens.count(2) == 1 and tokens[places[0] - 1] == 1
    return tokens[start : start + 5]


def solve_indexing(tokens, places):
    letters, (source,), (sign, *digits), _ = split(tokens[: places[0]], 1)
    assert len({*letters}) == len(letters) and min(letters) >= 14
    shift = int("".join(str(digit - 4) for digit in digits)) * {2: -1, 3: 1}[sign]
    assert 0 < abs(shift) <= 15
    return [letters[letters.index(source) + shift]]


def solve_haystack(tokens, places):
    facts = [tokens[place - 1 : place + 2] for place in range(len(tokens)) if tokens[place] == 2]
    assert len(facts) == 4 and tokens[places[0] - 2] == 1
    return [[place for person, _, place in facts if person == tokens[places[0] - 1]][-1]]


def split(tokens, separator):
    parts = [[]]
    for token in tokens:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


SOLVERS = {
    "adjacency": solve_adjacency,
    "adjacency_marked": solve_marked,
    "copy": lambda tokens, places: tokens[: places[0] - 1],
    "reverse": lambda tokens, places: tokens[places[0] - 2 :: -1],
    "sort": lambda tokens, places: [token for token in range(2, 52) for _ in range(tokens[: places[0]].count(token))],
    "parity": lambda tokens, places: [2 + tokens[: places[0]].count(3) % 2],
    "addition": solve_number,
    "mqar": solve_mqar,
    "passkey": solve_passkey,
    "indirect_indexing": solve_indexing,
    "haystack": solve_haystack,
}


@EVERY
def test_answers(name: str) -> None:
    """A solver that reads the tokens, and never the answers, finds the labels at all sizes that are compared."""
    probe = PROBES[name]
    for size in probe.sizes:
        for tokens, labels in rows_of(name, size):
            places, answers = zip(*asked(labels), strict=True)
            hidden = [0 if place in places and probe.family == "decoder" else token for place, token in enumerate(tokens)]
            assert SOLVERS[name](hidden, [*places]) == [*answers]


@EVERY
def test_form(name: str) -> None:
    """Rows of a size are equally long, tokens lie within the vocabulary, and a decoder's labels repeat its tokens."""
    probe = PROBES[name]
    assert probe.name == name and probe.question and probe.source
    assert probe.trained_size == probe.sizes[0] and sorted({*probe.sizes}) == [*probe.sizes] and len(probe.sizes) > 1
    for size in probe.sizes:
        rows = rows_of(name, size)
        assert len({len(part) for row in rows for part in row}) == 1
        for tokens, labels in rows:
            assert min(tokens) >= 0 and max(tokens) < probe.vocab_size and max(labels) < probe.vocab_size
            assert asked(labels)
            if probe.family == "decoder":
                assert labels[0] == IGNORED
                assert all(tokens[place] == label for place, label in asked(labels))
                end = asked(labels)[-1][0]
                assert not any(tokens[end + 1 :])
            else:
                assert 0 not in tokens
                assert {label for _, label in asked(labels)} <= {NO, YES}


@EVERY
def test_seeds(name: str) -> None:
    """The same seed gives the same rows, fewer rows are the first ones, and no row of a training seed is evaluated."""
    size = PROBES[name].sizes[1]
    first = rows_of(name, size, 200)
    assert rows_of(name, size, 200) == first and rows_of(name, size, 20) == first[:20]
    training = {str(row) for seed in range(3) for row in rows_of(name, size, 200, seed)}
    assert len(training) == 600
    assert not training & {str(row) for row in rows_of(name, size, 200, EVALUATION_SEED)}


@EVERY
def test_rows_of_the_trained_size_seldom_come_twice(name: str) -> None:
    """Only examples of few symbols, of which there are few, come in training and in evaluation."""
    training = {str(row) for row in rows_of(name, None, 500)}
    twice = [tokens for tokens, labels in rows_of(name, None, 500, EVALUATION_SEED) if str((tokens, labels)) in training]
    assert all(len([token for token in tokens if token]) <= 15 for tokens in twice)
    assert len(twice) < 250


def length_of(name, tokens, labels):
    """The length of an example, in the unit of its probe's sizes."""
    end = asked(labels)[0][0]
    if name == "addition":
        return max(len(number) for number in split(tokens[: end - 1], 1))
    return {"parity": end - 1, "indirect_indexing": len(split(tokens, 1)[0])}.get(name, end - 1)


@pytest.mark.parametrize("name", sorted(MIXED))
def test_lengths(name: str) -> None:
    """A size has all lengths beyond the size before it; the trained one has all from the shortest."""
    probe = PROBES[name]
    least = 20 if name == "indirect_indexing" else 1
    for size in probe.sizes:
        found = Counter(length_of(name, *row) for row in rows_of(name, size, 600))
        assert {*found} == {*range(least, size + 1)}
        if name != "addition":
            assert max(found.values()) < 600 / len(found) + 6 * math.sqrt(600 / len(found))
        least = size + 1


@pytest.mark.parametrize("name", sorted({*NAMES} - MIXED))
def test_widths(name: str) -> None:
    """The size is the number of tokens."""
    for size in (*PROBES[name].sizes, 40):
        assert {len(tokens) for tokens, _ in rows_of(name, size, 2)} == {size}


UNIFORM = {"adjacency_marked": 2, "parity": 2, "copy": 50, "reverse": 50, "passkey": 10, "haystack": 8, "mqar": 64}
UNIFORM["indirect_indexing"] = 52


@pytest.mark.parametrize("name, symbols", UNIFORM.items())
def test_chance_of_uniform_answers(name: str, symbols: int) -> None:
    """All answers are equally frequent, at every size, and chance is the share of each."""
    probe = PROBES[name]
    for size in probe.sizes:
        assert probe.chance(size) == pytest.approx(1 / symbols)
    answers = Counter(label for _, labels in rows_of(name, None, 1500) for _, label in asked(labels))
    mean = answers.total() / symbols
    assert len(answers) == symbols
    assert all(abs(count - mean) < 5 * math.sqrt(mean) for count in answers.values())


def test_chance_of_adjacency() -> None:
    """2 of n pairs are adjacent as published: "no" is right for the others, but in a row of three."""
    probe = PROBES["adjacency"]
    pairs = [*combinations(range(8), 2)]
    assert probe.chance(8) == pytest.approx(sum(b - a > 1 for a, b in pairs) / len(pairs)) == 0.75
    assert probe.chance(3) == pytest.approx(2 / 3)
    share = sum(asked(labels)[0][1] == NO for _, labels in rows_of("adjacency", 8, 2000)) / 2000
    assert share == pytest.approx(0.75, abs=0.04)


def test_adjacency_as_published_cannot_be_learned() -> None:
    """Whatever each place contributes to the sum, the sign of the sum is wrong for 5 of 28 pairs.

    The pairs that a sum calls adjacent form a threshold graph: built place by place, each joined to all before it or to none.
    """
    places = range(8)
    best = {frozenset[int](): 0}
    for count in places:
        for chosen in map(frozenset, combinations(places, count + 1)):
            gains = {last: sum(1 if abs(last - other) == 1 else -1 for other in chosen - {last}) for last in chosen}
            best[chosen] = max(best[chosen - {last}] + max(0, gain) for last, gain in gains.items())
    assert 21 + best[frozenset(places)] == 23


def test_chance_of_sort_and_addition() -> None:
    """By enumeration: the most frequent symbol at each place of the answer."""
    answers = [[sorted(symbols) for symbols in product(range(50), repeat=length)] for length in (1, 2)]
    assert PROBES["sort"].chance(2) == pytest.approx(enumerated(answers))

    bins = {1: range(10), 2: range(10, 100), 3: range(100, 1000)}
    sums = {key: [str(a + b) for a in bins[key[0]] for b in bins[key[1]]] for key in product((1, 2), repeat=2)}
    assert PROBES["addition"].chance(2) == pytest.approx(enumerated([*sums.values()]))
    assert PROBES["addition"].chance(1) == pytest.approx(enumerated([sums[1, 1]]))
    single = PROBES["addition"].blind((3, 2))
    assert single[0] / single[1] == pytest.approx(enumerated([[str(a + b) for a in bins[3] for b in bins[2]]]))


def enumerated(cases):
    """Accuracy of the best guess by case, number of symbols and place; cases are equally frequent, and so are their answers."""
    right = total = 0.0
    for answers in cases:
        counts = Counter((len(answer), place, symbol) for answer in answers for place, symbol in enumerate(answer))
        best = Counter[tuple[int, int]]()
        for (length, place, _), count in counts.items():
            best[length, place] = max(best[length, place], count)
        right += best.total() / len(answers)
        total += sum(map(len, answers)) / len(answers)
    return right / total


def test_spread() -> None:
    """Gaps of queries follow the power law; keys, facts and shifts lie everywhere."""
    gaps = [[place - 17 for place, _ in asked(labels)] for _, labels in rows_of("mqar", 256, 400)]
    first = sum(0 in row for row in gaps) / 400
    assert first > 0.5 and sum(max(row) > 60 for row in gaps) / 400 > 0.5
    halves = [[token < 64 for token in tokens[:16]] for tokens, _ in rows_of("mqar")]
    assert all(row == [True, False] * 8 for row in halves)

    starts = [tokens.index(2) for tokens, _ in rows_of("passkey", 128, 1500)]
    assert {*starts} == {*range(128 - 11)}

    facts = [[place for place, token in enumerate(tokens) if token == 2] for tokens, _ in rows_of("haystack", 256, 400)]
    assert min(map(min, facts)) < 5 and max(map(max, facts)) > 245
    assert len({tokens[-2] for tokens, _ in rows_of("haystack")}) == 4

    numbers = [split(tokens, 1)[2] for tokens, _ in rows_of("indirect_indexing", 52, 1500)]
    assert len({*map(tuple, numbers)}) == 30


@EVERY
@pytest.mark.parametrize("size", [0, -8, 2.5, "8", None, True])
def test_bad_sizes(name: str, size: object) -> None:
    """A size that a probe has not is refused with its name and the sizes it has."""
    for call in (lambda probe: probe.examples(size, 2, 0), lambda probe: probe.chance(size)):
        with pytest.raises(ValueError, match=rf"^size={size!r}: the probe '{name}' has sizes .*; it is compared at \d+, "):
            call(PROBES[name])


@pytest.mark.parametrize("name", ["adjacency", "adjacency_marked", "mqar", "passkey", "haystack", "indirect_indexing"])
def test_limits(name: str) -> None:
    """The smallest and the largest size are drawn, the next ones are refused."""
    probe = PROBES[name]
    least, most = probe.limits
    for size in {least, most or 1000}:
        tokens, labels = rows_of(name, size, 1)[0]
        assert len(tokens) == len(labels) >= size and 0 < probe.chance(size) < 1
    for size in (least - 1, (most or 0) + 1):
        with pytest.raises(ValueError, match=f"size={size}: .* sizes (of|from) {least} "):
            probe.examples(size, 1, 0)


@pytest.mark.parametrize(
    "count, seed, message", [(0, 0, "count=0"), (1.5, 0, "count=1.5"), (1, -1, "seed=-1"), (1, "a", "seed")]
)
def test_bad_numbers(count: object, seed: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{message}.* is not a whole number of at least"):
        PROBES["copy"].examples(20, count, seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["copy", "adjacency_marked"])
def test_models_read_them(name: str) -> None:
    """Labels are in the convention of the models of their family: an oracle of the answers has no loss."""
    probe = PROBES[name]
    rows = probe.examples(probe.trained_size, 4, 0).with_format("torch")[:]
    decoder = probe.family == "decoder"
    config, kind = (
        (RelPosDecoderConfig, RelPosDecoderForCausalLM) if decoder else (RelPosEncoderConfig, RelPosEncoderForMaskedLM)
    )
    model = kind(config(vocab_size=probe.vocab_size, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)).eval()
    loss = model(**rows).loss
    assert loss.item() == pytest.approx(math.log(probe.vocab_size), rel=0.2)
    oracle = torch.nn.functional.one_hot(rows["labels"].clamp_min(0), probe.vocab_size) * 100.0
    oracle = oracle.roll(-1, 1) if decoder else oracle
    assert model.loss_function(logits=oracle, labels=rows["labels"], vocab_size=probe.vocab_size).item() < 1e-6
