"""Results and calibration pairs as `compare` and `calibrate` would make them, without measuring."""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.ab.calibration_samples import SLOWDOWNS, CalibrationPair, CaseSamples
from benchmarks.ab.result import CompareVerdict, ComparisonResult, Rules, Side
from tests.benchmarks.synthetic import FINGERPRINT, key

Noise = Callable[[random.Random], float]


def comparison_result(verdict: CompareVerdict) -> ComparisonResult:
    """One case of one comparison."""
    base, head = (Side(ref, ref * 10, False, ref * 4) for ref in ("a1b2", "c3d4"))
    return ComparisonResult(
        FINGERPRINT.utc, base, head, FINGERPRINT, key(), Rules(), verdict, None, "python -m benchmarks compare"
    )


def calibration_pairs(pairs: int, cases: int, noise: Noise, seed: int = 0, samples: int = 8) -> list[CalibrationPair]:
    """Pairs of identical code of 50 ms, each sample longer by the noise, the injected work too."""
    r = random.Random(seed)

    def work(share: float) -> float:
        return 50.0 * share * (1 + noise(r))

    def head_sample() -> tuple[float, ...]:
        call = work(1.0)
        return (call, *(call + work(slowdown) for slowdown in SLOWDOWNS))

    def measured(case: int) -> CaseSamples:
        return CaseSamples(
            f"case {case}", tuple(work(1.0) for _ in range(samples)), tuple(head_sample() for _ in range(samples))
        )

    return [CalibrationPair("identity", 1.0, tuple(measured(case) for case in range(cases))) for _ in range(pairs)]
