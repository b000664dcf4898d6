"""Probes: seeded generators of examples whose answers are known."""

import operator
import zlib
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import Literal

import numpy as np
from datasets import Dataset

from hf_relpos.data.packing import IGNORED

Row = tuple[list[int], list[int]]
"""Tokens and labels of an example, equally long."""

EVALUATION_SEED = 1_000_000
"""Train with seeds below, evaluate with this one: examples of two seeds are drawn independently."""

PAD = 0
"""Fills a row behind its end; no probe uses it within an example but `mqar`, whose filler it is."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A task with known answers at a trained size and beyond.

    Rows of one size are equally long: shorter examples are filled with `PAD` behind their end, which a causal model does not
    see and which nothing asks for; encoder probes have no padding. Labels are -100 where nothing is asked. In a decoder's
    row they repeat the token, and the model shifts them; in an encoder's row they stand where the answer is read.

    The metric is exact accuracy, over asked tokens and over whole examples (all asked tokens of a row right).

    Args:
        name: the key in `PROBES`.
        family: "decoder" (causal) or "encoder".
        question: what the probe shows, in a sentence.
        source: where the task is defined.
        vocab_size: token ids are below.
        sizes: the sizes to evaluate, the trained one first, ascending.
        limits: the smallest and the largest size; None: there is no largest.
        cases: from the smallest and the largest length, the kinds of examples, equally frequent.
        draw: an example of a case.
        width: tokens of a row, from its size.
        blind: of a case, the expected number of right tokens of the best guess, and of asked tokens.
    """

    name: str
    family: Literal["decoder", "encoder"]
    question: str
    source: str
    vocab_size: int
    sizes: tuple[int, ...]
    limits: tuple[int, int | None]
    cases: Callable[[int, int], Sequence[Any]]
    draw: Callable[[np.random.Generator, Any], Row]
    width: Callable[[int], int]
    blind: Callable[[Any], tuple[float, float]]

    @property
    def trained_size(self) -> int:
        """Return the size to train on."""
        return self.sizes[0]

    def examples(self, size: int, count: int, seed: int) -> Dataset:
        """Draw examples; the same arguments give the same rows, and a larger `count` begins with the rows of a smaller one.

        Args:
            size: one of `sizes`, or any other within the limits.
            count: number of rows.
            seed: 0 or above; `EVALUATION_SEED` is set apart for evaluation.

        Returns:
            A data set with columns `input_ids` and `labels`, all rows equally long.

        Raises:
            ValueError: the probe has no such size, or a number is out of range.
        """
        cases = self._cases(size)
        for name, number, least in (("count", count, 1), ("seed", seed, 0)):
            if _whole(number) is None or number < least:
                raise ValueError(f"{name}={number!r} is not a whole number of at least {least}")
        generator = np.random.default_rng([zlib.crc32(self.name.encode()), size, seed])
        tokens = np.full((count, self.width(size)), PAD)
        labels = np.full_like(tokens, IGNORED)
        for row in range(count):
            ids, asked = self.draw(generator, cases[int(generator.integers(len(cases)))])
            tokens[row, : len(ids)], labels[row, : len(asked)] = ids, asked
        return Dataset.from_dict({"input_ids": tokens, "labels": labels})

    def chance(self, size: int) -> float:
        """Return the best accuracy over asked tokens without reading the example.

        The guess knows the size, the kind of the example and which of the answer's tokens is asked; it says what is most
        frequent there.

        Raises:
            ValueError: the probe has no such size.
        """
        right, asked = np.sum([self.blind(case) for case in self._cases(size)], axis=0)
        return float(right / asked)

    def _cases(self, size: int) -> Sequence[Any]:
        """Return the cases of a size: longer than the size evaluated before, and than nothing where it is the first."""
        least, most = self.limits
        if _whole(size) is None or size < least or (most is not None and size > most):
            allowed = f"from {least} to {most}" if most is not None else f"of {least} or more"
            raise ValueError(
                f"size={size!r}: the probe {self.name!r} has sizes {allowed}; it is compared at {', '.join(map(str, self.sizes))}"
            )
        return self.cases(max([least, *(other + 1 for other in self.sizes if other < size)]), size)


def _whole(number: Any) -> int | None:
    """Return a whole number, or None for what is not one."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def answer_at_the_end(prompt: Sequence[int], answer: Sequence[int]) -> Row:
    """Return a row of a causal model that is asked for its last tokens."""
    return [*prompt, *answer], [IGNORED] * len(prompt) + [*answer]


def all_lengths(least: int, size: int) -> Sequence[int]:
    """Return all lengths up to the size, as cases."""
    return range(least, size + 1)


def one_length(least: int, size: int) -> Sequence[int]:
    """Return the size as the only case."""
    return (size,)


def uniform_guess(symbols: int) -> Callable[[Any], tuple[float, float]]:
    """Return `blind` of a probe whose asked tokens are uniform over so many symbols."""
    return lambda case: (1 / symbols, 1)
