"""Is a difference between schemes real? Means and intervals over seeds, paired differences, and ranks that share their ties.

A pair is two schemes with the same seed, that is the same data in the same order: what a seed makes easy or hard cancels. Three seeds
alone say little about the noise of one pair, so the noise of all pairs is pooled, as in a design of randomised blocks with seeds as
blocks; a pair that is noisier than this counts with its own noise. Tests are two-sided t-tests. The p-values of a family of
comparisons are corrected by Holm's method (1979), which holds whatever the dependence between them.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

# Error rate of a whole family of comparisons, and of an interval.
ALPHA = 0.05

Values = Mapping[str, Mapping[int, float]]
"""The values of one metric, by scheme and seed."""
Pair = tuple[str, str]


class Interval(NamedTuple):
    """A mean with its 95 % interval, which has no ends where there are fewer than two seeds."""

    mean: float
    low: float | None = None
    high: float | None = None


class Difference(NamedTuple):
    """A paired difference over the seeds that both schemes have.

    Attributes:
        interval: its mean and 95 % interval, not corrected.
        p: the p-value of "there is no difference", corrected for all comparisons of the family; None below two shared seeds.
        seeds: how many seeds both have.
    """

    interval: Interval
    p: float | None
    seeds: int

    @property
    def real(self) -> bool:
        """Return whether the corrected test finds a difference."""
        return self.p is not None and self.p < ALPHA


class Rank(NamedTuple):
    """The places that a scheme may take: `first - 1` schemes are better than it, and it is better than all behind `last`."""

    first: int
    last: int


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values and its 95 % interval by Student's t."""
    table = np.asarray(values, dtype=float)
    if len(table) < 2:
        return Interval(float(table.mean()))
    return _interval(float(table.mean()), float(table.std(ddof=1) / len(table) ** 0.5), len(table) - 1)


def _interval(mean: float, error: float, freedom: float) -> Interval:
    half = float(student.ppf(1 - ALPHA / 2, freedom)) * error
    return Interval(mean, mean - half, mean + half)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's step-down method."""
    corrected, highest = [1.0] * len(p_values), 0.0
    for place, index in enumerate(np.argsort(p_values)):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return corrected


def _gaps(values: Values, pair: Pair) -> np.ndarray:
    """Return `first - second` of each seed that both have."""
    first, second = (values[name] for name in pair)
    return np.asarray([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())], dtype=float)


def _pooled(values: Values) -> tuple[float, float]:
    """Return the variance of a paired difference, pooled over all pairs, and its degrees of freedom."""
    gaps = [found for pair in combinations(values, 2) if len(found := _gaps(values, pair)) > 1]
    if not gaps:
        return 0.0, 0.0
    weights = [len(found) - 1 for found in gaps]
    variance = float(np.average([found.var(ddof=1) for found in gaps], weights=weights))
    return variance, float(np.mean(weights)) * (sum(len(seeds) > 1 for seeds in values.values()) - 1)


def differences(values: Values, pairs: Iterable[Pair]) -> dict[Pair, Difference]:
    """Compare pairs of schemes as one family.

    Args:
        values: the metric of all schemes, whose noise is pooled.
        pairs: which to compare, as `first - second`; those that share no seed are left out.
    """
    variance, freedom = _pooled(values)
    found: dict[Pair, Difference] = {}
    for pair in pairs:
        gaps = _gaps(values, pair)
        if len(gaps) < 2:
            if len(gaps):
                found[pair] = Difference(Interval(float(gaps[0])), None, 1)
            continue
        mean, error = float(gaps.mean()), max(variance, float(gaps.var(ddof=1))) ** 0.5 / len(gaps) ** 0.5
        p = float(2 * student.sf(abs(mean) / error, freedom)) if error else 1.0  # noise that was not seen cannot be judged
        found[pair] = Difference(_interval(mean, error, freedom), p, len(gaps))
    tested = [pair for pair, one in found.items() if one.p is not None]
    corrected = dict(zip(tested, holm([found[pair].p or 0.0 for pair in tested]), strict=True))
    return {pair: one._replace(p=corrected.get(pair)) for pair, one in found.items()}


def against(values: Values, other: str) -> dict[str, Difference]:
    """Compare every scheme with one of them.

    Returns:
        By scheme, `scheme - other`, corrected for the number of schemes.
    """
    return {name: one for (name, _), one in differences(values, [(name, other) for name in values if name != other]).items()}


def best(values: Values, lower_is_better: bool) -> str:
    """Return the scheme of the best mean, which need not be better than another."""
    sign = 1 if lower_is_better else -1
    return min(sorted(values), key=lambda name: sign * float(np.mean(list(values[name].values()))))


def ranks(values: Values, lower_is_better: bool) -> dict[str, Rank]:
    """Return the places that each scheme may take, given the comparisons of all pairs at once.

    Two schemes whose difference is inside the noise may take each other's place, so they share a rank. A winner has the places 1 to 1.
    """
    better, worse = dict.fromkeys(values, 0), dict.fromkeys(values, 0)
    for (first, second), one in differences(values, combinations(values, 2)).items():
        if one.real:
            ahead, behind = (first, second) if (one.interval.mean < 0) == lower_is_better else (second, first)
            better[behind] += 1
            worse[ahead] += 1
    return {name: Rank(1 + better[name], len(values) - worse[name]) for name in values}


def winner(values: Values, lower_is_better: bool) -> str | None:
    """Return the scheme that is better than every other one, None if the noise leaves none."""
    places = ranks(values, lower_is_better)
    return next((name for name, rank in places.items() if rank == Rank(1, 1) and len(places) > 1), None)
