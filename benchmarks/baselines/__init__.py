"""What NSA is compared with, each implementation by name; one that is absent says what to install."""

from benchmarks.baselines import fla, flash, flex, sdpa
from benchmarks.baselines.baseline import Baseline, NotPresentError, UnsupportedError, require_kernel

BASELINES = {
    baseline.name: baseline for baseline in (*sdpa.BASELINES, *flex.BASELINES, *flash.BASELINES, *fla.BASELINES)
}

__all__ = ["BASELINES", "Baseline", "NotPresentError", "UnsupportedError", "require_kernel"]
