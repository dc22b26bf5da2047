"""What NSA is compared with, each implementation by name; one that is absent says what to install."""

from benchmarks.baselines import contender, fla, flash, flex, lucidrains, sdpa
from benchmarks.baselines.baseline import Baseline, NotPresentError, UnsupportedError, require_kernel
from benchmarks.baselines.contender import ContenderError

_MODULES = (sdpa, flex, flash, fla, lucidrains)
BASELINES = {baseline.name: baseline for module in _MODULES for baseline in module.BASELINES}
"""Those of this repository. Installed packages offer further ones, contenders: `find` knows them too."""


def find(name: str) -> Baseline:
    """The baseline of this name, or else the contender, whose package is imported. Raises ContenderError."""
    return BASELINES[name] if name in BASELINES else contender.load(name)


__all__ = [
    "BASELINES",
    "Baseline",
    "ContenderError",
    "NotPresentError",
    "UnsupportedError",
    "find",
    "require_kernel",
]
