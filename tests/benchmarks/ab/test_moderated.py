"""The moderated t-test: what it is with and without knowledge of the noise, held to scipy and to simulation."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy import stats

from benchmarks.ab import moderated
from benchmarks.ab.moderated import UNKNOWN, NoisePrior

VALUES = [0.012, 0.009, 0.011, 0.015]


def test_without_a_prior_it_is_the_t_test() -> None:
    found = moderated.estimate(VALUES, UNKNOWN)
    theirs = stats.ttest_1samp(VALUES, 0.0)
    assert found.value == pytest.approx(statistics.fmean(VALUES))
    assert found.p_value == pytest.approx(theirs.pvalue)
    low, high = theirs.confidence_interval(0.95)
    assert (found.value - found.half_width(0.05), found.value + found.half_width(0.05)) == pytest.approx((low, high))


def test_a_prior_is_averaged_with_the_pairs_own_variance() -> None:
    """By hand: 8 degrees of freedom of 0.01, and 3 of the values' own variance."""
    found = moderated.estimate(VALUES, NoisePrior(0.01, 8.0))
    variance = (8 * 0.01**2 + 3 * statistics.variance(VALUES)) / 11
    assert (found.standard_error, found.df) == (pytest.approx(math.sqrt(variance / 4)), 11.0)


def test_a_wild_pair_counts_as_three_standard_deviations() -> None:
    prior = NoisePrior(0.001, 20.0)
    wild = moderated.estimate([0.1, 0.1, 0.1, 9.0], prior)
    assert wild.value == pytest.approx(0.1 + 0.003 / 4)
    assert moderated.estimate([0.1, 0.1, 0.1, 9.0], UNKNOWN).value > 2


def test_pairs_that_agree_wholly() -> None:
    assert moderated.estimate([0.0, 0.0], UNKNOWN).p_value == 1.0
    assert moderated.estimate([0.1, 0.1], UNKNOWN).p_value == 0.0
    with pytest.raises(ValueError, match="log_ratios must be two at least; got 1"):
        moderated.estimate([0.1], UNKNOWN)


@pytest.mark.parametrize(("spread", "least", "most"), [(0.0, 15.0, 30.0), (0.5, 3.0, 12.0), (1.5, 0.3, 2.0)])
def test_the_prior_counts_for_more_where_cases_are_more_alike(spread: float, least: float, most: float) -> None:
    """Cases whose standard deviation is 0.002 times a log-normal factor."""
    r = random.Random(1)
    sds = [0.002 * math.exp(r.gauss(0.0, spread)) for _ in range(40)]
    prior = moderated.fit([[r.gauss(0.0, sd) for _ in range(12)] for sd in sds])
    assert least <= prior.df <= most
    if spread == 0.0:
        assert prior.sd == pytest.approx(0.002, rel=0.1)


def test_one_case_tells_no_prior() -> None:
    assert moderated.fit([[0.01, 0.02]]) == moderated.fit([]) == moderated.fit([[0.0, 0.0], [0.0]]) == UNKNOWN


def test_p_values_are_uniform_where_the_prior_is_true() -> None:
    """Variances drawn as the model says (scaled inverse chi-square): 5 % of the p-values lie below 0.05."""
    r, prior = random.Random(2), NoisePrior(0.002, 6.0)
    below = 0
    for _ in range(4000):
        sd = prior.sd * math.sqrt(prior.df / (2 * r.gammavariate(prior.df / 2, 1.0)))
        values = [r.gauss(0.0, sd) for _ in range(3)]
        below += moderated.estimate(values, prior).p_value < 0.05
    assert 0.03 < below / 4000 < 0.06  # clipping takes some of the wildest


def test_a_machine_as_noisy_as_at_its_calibration_is_not_corrected() -> None:
    r, prior = random.Random(3), NoisePrior(0.002, 20.0)
    cases = [[r.gauss(0.0, 0.002) for _ in range(3)] for _ in range(20)]
    assert moderated.inflation([(values, prior) for values in cases]) == moderated.Inflation()
    assert moderated.Inflation().of(prior) is prior


def test_the_factor_is_that_of_the_typical_case() -> None:
    """One wild case of twenty says nothing of the machine; three times the noise in all of them does."""
    r, prior = random.Random(4), NoisePrior(0.002, 20.0)
    noisy = [[r.gauss(0.0, 0.006) for _ in range(6)] for _ in range(40)]
    found = moderated.inflation([(values, prior) for values in noisy])
    assert (found.factor, found.df) == (pytest.approx(9.0, rel=0.35), 200)
    corrected = found.of(prior)
    assert corrected.sd == pytest.approx(0.002 * math.sqrt(found.factor))
    assert corrected.df == pytest.approx(1 / (1 / 20 + 2 / 200))
    quiet = [[0.002 * x for x in (-1.0, 1.0, -1.0, 1.0, 0.0, 0.0)] for _ in range(19)]
    assert moderated.inflation([(values, prior) for values in [*quiet, noisy[0]]]) == moderated.Inflation()


def test_what_is_not_known_is_not_corrected() -> None:
    wild = [(VALUES, UNKNOWN)] * 5
    assert moderated.inflation(wild) == moderated.inflation([]) == moderated.Inflation()
    assert moderated.inflation([([0.5], NoisePrior(0.002, 20.0))]) == moderated.Inflation(), (
        "one pair tells no variance"
    )
    assert moderated.Inflation(9.0, 10.0).of(UNKNOWN) is UNKNOWN


def test_pairs_too_few_to_tell_make_the_prior_worth_little() -> None:
    """Whatever they show: three pairs of one case leave fewer than the 5 degrees of freedom of a call."""
    prior = NoisePrior(0.002, 20.0)
    loud, quiet = [0.000, 0.003, 0.006], [0.000, 0.001, 0.002]
    assert moderated.inflation([(loud, prior)]).factor > 1.5
    assert moderated.inflation([(quiet, prior)]) == moderated.Inflation(1.0, 2)
    for values in (loud, quiet):
        assert moderated.estimate(values, moderated.inflation([(values, prior)]).of(prior)).df < 5
    assert moderated.inflation([(quiet, prior)] * 3) == moderated.Inflation()


def test_the_pseudomedian_ignores_a_quarter_of_outliers() -> None:
    assert moderated.pseudomedian([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == 3.5
    assert moderated.pseudomedian([1.0] * 7 + [99.0, -99.0]) == 1.0
