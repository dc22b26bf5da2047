"""The moderated t-test: few pairs of processes, and what a calibration knows of the noise between them.

Three pairs tell little of their own noise, so that an ordinary t-test of three needs a change of 45 standard errors
for p = 0.0005. But the noise between pairs is much alike from case to case on one machine, and a calibration has
measured it. Its variance, worth so many degrees of freedom as the cases agree on it, is averaged with the pairs' own
(Smyth, Statistical Applications in Genetics and Molecular Biology 3, 2004). Where nothing is known (0 degrees of
freedom) this is the ordinary t-test. The distributions are scipy's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import scipy  # imports each of its parts where that is first used: they take a second, which --help need not

_CLIPPED_AT = 3.0
_CONTRADICTION = 0.01
"""How improbable a case's own variance may be under the prior before the prior is not used for it."""
_ENOUGH_DF = 5
"""Of all cases of a comparison together: so many can tell how noisy the machine is."""
_MOST_DF = 30.0
"""What a calibration may count for: its pairs are of one afternoon, so that a case's own pairs keep their say."""


@dataclass(frozen=True)
class NoisePrior:
    """What is known of the noise between pairs of processes before a case is measured."""

    sd: float = 0.0
    """Of a pair's log-ratio with identical code."""
    df: float = 0.0
    """How many pairs this knowledge is worth; 0: nothing is known."""

    def __post_init__(self) -> None:
        if not (0 <= self.sd < 10 and self.df >= 0) or (self.df > 0 and self.sd == 0):
            raise ValueError(f"noise must have an sd from 0 to 10, and above 0 where df is; got {self.sd}, {self.df}")


UNKNOWN = NoisePrior()


@dataclass(frozen=True)
class Inflation:
    """How much noisier a machine is than at its calibration, as the cases of one comparison show it."""

    factor: float = 1.0
    """Of the variance between pairs; 1 or more."""
    df: float = math.inf
    """Of what it is estimated from; infinite where there is nothing to correct."""

    def of(self, prior: NoisePrior) -> NoisePrior:
        """The prior as it holds now: a larger sd, which is known less surely."""
        if prior.df == 0 or self == Inflation():
            return prior
        return NoisePrior(prior.sd * math.sqrt(self.factor), 1 / (1 / prior.df + 2 / self.df))


@dataclass(frozen=True)
class Estimate:
    """The mean log-ratio of some pairs."""

    value: float
    standard_error: float
    df: float

    @property
    def p_value(self) -> float:
        """Two-sided, of identical code."""
        if self.standard_error == 0:
            return 1.0 if self.value == 0 else 0.0
        return float(2 * scipy.stats.t.sf(abs(self.value) / self.standard_error, self.df))

    def half_width(self, alpha: float) -> float:
        """Of the interval that misses with probability `alpha`."""
        return float(scipy.stats.t.isf(alpha / 2, self.df)) * self.standard_error


def estimate(log_ratios: Sequence[float], prior: NoisePrior) -> Estimate:
    """From two pairs on."""
    if len(log_ratios) < 2:
        raise ValueError(f"log_ratios must be two at least; got {len(log_ratios)}")
    values = _without_outliers(log_ratios, prior)
    own_df, own = len(values) - 1, statistics.variance(values)
    if prior.df > 0 and scipy.stats.f.sf(own / prior.sd**2, own_df, prior.df) < _CONTRADICTION:
        prior = UNKNOWN  # this case is noisier than any that was calibrated
    variance = (prior.df * prior.sd**2 + own_df * own) / (prior.df + own_df)
    return Estimate(statistics.fmean(values), math.sqrt(variance / len(values)), prior.df + own_df)


def inflation(cases: Sequence[tuple[Sequence[float], NoisePrior]]) -> Inflation:
    """From the log-ratios of every case of one comparison, each with its prior.

    The factor is the median over the cases of their own variance over the prior's, each over the median of that ratio
    on a machine as it was calibrated. It counts where it is above 1. Too few pairs cannot tell it, so that whatever
    they show the prior is worth little. Cases of fewer than two pairs, or of which nothing is known, say nothing.
    """
    ratios, df = list[float](), 0
    for log_ratios, prior in cases:
        if prior.df == 0 or len(log_ratios) < 2:
            continue
        own_df = len(log_ratios) - 1
        ratios.append(_own_variance(log_ratios, prior) / (prior.sd**2 * float(scipy.stats.f.median(own_df, prior.df))))
        df += own_df
    factor = max(1.0, statistics.median(ratios)) if ratios else 1.0
    return Inflation(factor, df) if ratios and (factor > 1.0 or df < _ENOUGH_DF) else Inflation()


def _own_variance(log_ratios: Sequence[float], prior: NoisePrior) -> float:
    """With a pair that is wild, by the known noise and by the median distance too, taken nearer."""
    centre = statistics.median(log_ratios)
    sd = max(prior.sd, 1.4826 * statistics.median(abs(value - centre) for value in log_ratios))
    return statistics.variance(_without_outliers(log_ratios, NoisePrior(sd, prior.df)))


def _without_outliers(log_ratios: Sequence[float], prior: NoisePrior) -> list[float]:
    """A pair further than 3 known standard deviations from the median counts as if it were there.

    Not where that is more than one pair in four: then this case is noisier than is known.
    """
    values, centre, most = list(log_ratios), statistics.median(log_ratios), _CLIPPED_AT * prior.sd
    outside = sum(abs(value - centre) > most for value in values)
    if prior.df == 0 or 4 * outside > len(values):
        return values
    return [min(max(value, centre - most), centre + most) for value in values]


def fit(log_ratios: Sequence[Sequence[float]]) -> NoisePrior:
    """The prior of cases whose pairs were of identical code, so that each case's mean is 0 (Smyth 2004, section 6.2).

    `UNKNOWN` where fewer than two cases have pairs: how much cases differ cannot be told.
    """
    measured = [values for values in log_ratios if any(values)]
    if len(measured) < 2:
        return UNKNOWN
    dfs = [len(values) for values in measured]
    logs = [
        math.log(statistics.fmean(value**2 for value in values)) - scipy.special.digamma(df / 2) + math.log(df / 2)
        for values, df in zip(measured, dfs, strict=True)
    ]
    mean = statistics.fmean(logs)
    by_chance = statistics.fmean(float(scipy.special.polygamma(1, df / 2)) for df in dfs)
    df = min(_MOST_DF, 2 * _inverse_trigamma(statistics.variance(logs) - by_chance))
    return NoisePrior(math.exp((mean + float(scipy.special.digamma(df / 2)) - math.log(df / 2)) / 2), df)


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value; the largest that is used where the cases differ by less than chance."""
    largest = _MOST_DF / 2
    if value <= scipy.special.polygamma(1, largest):
        return largest
    return float(scipy.optimize.brentq(lambda x: float(scipy.special.polygamma(1, x)) - value, 1e-3, largest))


def pseudomedian(values: Sequence[float]) -> float:
    """The Hodges-Lehmann estimate: nearly as sharp as the mean, and a quarter of the values may be outliers."""
    return statistics.median((x + y) / 2 for i, x in enumerate(values) for y in values[i:])
