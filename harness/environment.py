"""The NSA_* environment variables of the suites and the images; nothing else there reads them.

A command calls `check` before anything else: a name that nothing reads is a misspelt one, which would silently have no
effect. CONTRIBUTING.md has the table for users. Only the standard library is imported: noxfile.py and the host's side
of the containers run without PyTorch.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.repository import ROOT

PREFIX = "NSA_"


@dataclass(frozen=True)
class Environment:
    """One field per variable: `base_image` is NSA_BASE_IMAGE. An empty variable counts as one that is not set."""

    results: Path = ROOT / "results"
    """Where records are written and read."""
    engine: str | None = None
    """The container engine: "docker", "podman" or "none"; None takes the first that answers."""
    base_image: str | None = None
    """What images are built from, in place of the Dockerfile's nvidia/cuda."""
    wheels: Path | None = None
    """A folder of wheels that building an image takes before any others."""
    family: str | None = None
    """The GPU family of the image; the Dockerfile sets it."""
    expect: str | None = None
    """The family that must be found in the container, in place of the image's own; "gpu" is any GPU."""
    image: str | None = None
    """The image's id, which a fingerprint names."""
    commit: str | None = None
    """The commit of a copy without git, as in an image, which a fingerprint names."""
    dirty: bool | None = None
    """Whether that copy differs from its commit (1) or not (0)."""
    force_arch: str | None = None
    """Whose kernels a newer GPU runs: "sm80", "sm86", "sm89" (`harness.forced`)."""
    memory_gb: str | None = None
    """What each process may allocate on such a GPU, GB."""


NAMES = tuple(f"{PREFIX}{field.name.upper()}" for field in dataclasses.fields(Environment))
"""The variable of each field."""
OF_TRAINING = (
    "NSA_TB_DISABLE", "NSA_DISABLE_CSV_LOGS", "NSA_DISABLE_AUX_STATS", "NSA_SDPA_NO_FLASH", "NSA_PREFILL_BATCHED",
    "NSA_USE_FA2", "NSA_USE_TRITON_SEL", "NSA_FORCE_SEL_MASK", "NSA_USE_SEL_MASK", "NSA_USE_SEL_PACK",
    "NSA_FORCE_PARITY",
)  # fmt: skip
"""What `nsa.train` reads, in its own environment (docs/training.md); here these are known and have no effect."""


def read(variables: Mapping[str, str] = os.environ) -> Environment:
    """What the variables say."""

    def value(field: str) -> str | None:
        return variables.get(PREFIX + field.upper()) or None

    def folder(field: str) -> Path | None:
        return None if (text := value(field)) is None else Path(text)

    return Environment(
        results=folder("results") or Environment.results,
        engine=value("engine"),
        base_image=value("base_image"),
        wheels=folder("wheels"),
        family=value("family"),
        expect=value("expect"),
        image=value("image"),
        commit=value("commit"),
        dirty={"0": False, "1": True}.get(value("dirty") or ""),
        force_arch=value("force_arch"),
        memory_gb=value("memory_gb"),
    )


def check(variables: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError for a variable that has our prefix and that nothing reads, with the nearest name."""
    known = (*NAMES, *OF_TRAINING)
    for name in sorted(variables):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ValueError(
                f"unknown environment variable {name}; "
                + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
            )
