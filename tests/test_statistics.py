"""Statistics of a comparison, on made-up results whose truth is known."""

import numpy as np
import pytest
from scipy import stats

from hf_relpos.evaluation.statistics import Rank
from hf_relpos.evaluation.statistics import against
from hf_relpos.evaluation.statistics import best
from hf_relpos.evaluation.statistics import differences
from hf_relpos.evaluation.statistics import holm
from hf_relpos.evaluation.statistics import interval
from hf_relpos.evaluation.statistics import ranks
from hf_relpos.evaluation.statistics import winner

SEEDS = 3


def made_up(generator, means, noise=0.01, seed_noise=0.1):
    """Results with a known mean for each scheme, a common effect of each seed, and noise."""
    effects = generator.normal(0, seed_noise, SEEDS)
    noises = np.broadcast_to(noise, len(means))
    return {
        f"scheme {index}": {seed: mean + effects[seed] + generator.normal(0, noises[index]) for seed in range(SEEDS)}
        for index, mean in enumerate(means)
    }


def test_an_interval_is_that_of_students_t():
    found = interval([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, loc=7 / 3, scale=stats.sem([1, 2, 4]))
    assert (found.mean, found.low, found.high) == pytest.approx((7 / 3, low, high))
    assert interval([1.0]) == (1.0, None, None)


def test_an_interval_holds_the_truth_in_95_of_100():
    generator = np.random.default_rng(0)
    found = [interval(generator.normal(5, 1, SEEDS).tolist()) for _ in range(1000)]
    assert 930 <= sum(one.low <= 5 <= one.high for one in found) <= 970


def test_two_schemes_are_compared_as_by_a_paired_t_test():
    first, second = [1.0, 2.1, 3.3], [1.5, 2.2, 3.9]
    values = {"a": dict(enumerate(first)), "b": dict(enumerate(second))}
    found = against(values, "b")["a"]
    assert found.p == pytest.approx(stats.ttest_rel(first, second).pvalue) and found.seeds == 3
    assert found.interval.mean == pytest.approx(-0.4)


def test_p_values_are_corrected_by_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize("noise", [0.01, [0.05] + [0.01] * 7])
def test_without_a_difference_there_is_no_winner_in_95_of_100(noise):
    generator = np.random.default_rng(1)
    results = [made_up(generator, [2.0] * 8, noise) for _ in range(200)]
    assert sum(winner(one, True) is not None for one in results) <= 10
    assert sum(any(gap.real for gap in against(one, "scheme 3").values()) for one in results) <= 16


def test_a_real_difference_is_found():
    generator = np.random.default_rng(2)
    results = [made_up(generator, [2.0] * 5 + [1.9, 2.0, 2.0]) for _ in range(100)]
    assert sum(winner(one, True) == "scheme 5" for one in results) >= 95
    gaps = [against(one, "scheme 5")["scheme 0"] for one in results]
    assert sum(gap.real and gap.interval.mean > 0 for gap in gaps) >= 95
    assert sum(gap.interval.low <= 0.1 <= gap.interval.high for gap in gaps) >= 90


def test_schemes_inside_the_noise_share_a_rank():
    values = {
        "first": {0: 1.00, 1: 1.10, 2: 0.90},
        "as good": {0: 1.01, 1: 1.09, 2: 0.91},
        "last": {0: 2.00, 1: 2.10, 2: 1.91},
    }
    assert ranks(values, lower_is_better=True) == {"first": (1, 2), "as good": (1, 2), "last": (3, 3)}
    assert winner(values, True) is None and best(values, True) == "first"
    assert winner(values, lower_is_better=False) == "last" == best(values, False)


def test_one_seed_decides_nothing():
    values = {"a": {0: 1.0}, "b": {0: 2.0}, "c": {1: 0.0}}
    assert set(ranks(values, True).values()) == {Rank(1, 3)} and winner(values, True) is None
    assert against(values, "b")["a"].p is None and "c" not in against(values, "b")


def test_a_missing_seed_leaves_the_others():
    values = {"a": {0: 1.0, 1: 1.1, 2: 1.2}, "b": {0: 2.0, 2: 2.2}, "c": {0: 1.5, 1: 1.6, 2: 1.7001}}
    found = differences(values, [("a", "b"), ("a", "c")])
    assert found["a", "b"].seeds == 2 and found["a", "b"].real and found["a", "c"].seeds == 3


def test_noise_that_was_not_seen_decides_nothing():
    """Accuracies of few examples may be the same for all seeds by chance."""
    same = {0: 0.5, 1: 0.5}
    values = {"a": same, "b": same, "c": {0: 1.0, 1: 1.0}}
    assert set(ranks(values, lower_is_better=False).values()) == {Rank(1, 3)}
