"""Launches that `nsa.tune` has found on this machine, kept in the user's cache folder and put in force.

One file for each GPU, version of Triton and state of the kernels' sources: what was measured under others is not read.
A file is replaced in one step; writers wait for one another and add to what is there. One that cannot be read is left
out with a message and replaced by the next writer.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton

from nsa.io import atomic_write
from nsa.triton_backend import tuning
from nsa.triton_backend.tuning import LaunchConfig

VERSION = 1  # of a file; another one where the tuner measures otherwise, which `sources_sha256` does not cover
Launches = Mapping[str, Mapping[str, LaunchConfig]]
"""By a width of `tuning.WIDTHS`, then by a kernel's name in a table ("scores/4": groups padded to 4 heads)."""
_MOST = 4096
"""No size of a launch is larger; one that is comes from a damaged file."""


@dataclass(frozen=True)
class Where:
    """What launches were measured on."""

    gpu: str
    """PyTorch's name of it: "NVIDIA H200"."""
    capability: int
    """90, ..."""
    sources_sha256: str
    triton: str = triton.__version__

    @property
    def file(self) -> Path:
        """In the user's cache folder: XDG_CACHE_HOME, or ~/.cache."""
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = given if given.is_absolute() else Path.home() / ".cache"  # the XDG rules: others count as not set
        slug = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return folder / "nsa" / "tuned" / f"{slug}-triton{self.triton}-{self.sources_sha256[:12]}.json"


@cache
def sources_sha256() -> str:
    """Hash of the kernels, of how they are launched, and of the tables that the tuner starts from."""
    backend, digest = tuning.TABLES.parent, hashlib.sha256()
    for file in sorted((*backend.rglob("*.py"), *tuning.TABLES.glob("*.json"))):
        digest.update(f"{file.relative_to(backend).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def read(where: Where, say: Callable[[str], object]) -> Launches:
    """What the file holds; nothing, and a message, where it is damaged or of another kind."""
    try:
        return _parsed(json.loads(where.file.read_text(encoding="utf-8")), where)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        say(f"{where.file} is left out, and written anew by the next tuning: {reason}")
        return {}


def add(where: Where, found: Launches, say: Callable[[str], object]) -> Launches:
    """Add to the file, whoever else does; what it holds then. OSError where it cannot be written."""
    where.file.parent.mkdir(parents=True, exist_ok=True)
    with where.file.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read(where, say)
        together = {
            width: {**before.get(width, {}), **found.get(width, {})}
            for width in tuning.WIDTHS
            if width in before or width in found
        }
        launches = {width: {name: _given(one) for name, one in own.items()} for width, own in together.items()}
        content = {"version": VERSION, **dataclasses.asdict(where), "launches": launches}
        atomic_write(where.file, json.dumps(content, indent=2) + "\n")
    return together


def put_in_force(capability: int, launches: Launches) -> None:
    """Let kernels on that compute capability be launched so, in this process, from the next call on."""
    shipped = tuning.shipped_table(capability)
    widths: dict[str, Any] = {
        width: {**getattr(shipped, width), **launches[width]} for width in tuning.WIDTHS if launches.get(width)
    }
    tuning.tuned[capability] = dataclasses.replace(shipped, **widths)


def _given(launch: LaunchConfig) -> dict[str, int]:
    return {name: value for name, value in dataclasses.asdict(launch).items() if value is not None}


def _parsed(content: Any, where: Where) -> Launches:
    """Raises one of what `read` catches."""
    told = {name: content[name] for name in dataclasses.asdict(where)}
    if content["version"] != VERSION or told != dataclasses.asdict(where):
        raise ValueError(f"it is of {told}, version {content['version']}")
    known, found = set(tuning.shipped_table(where.capability).narrow), dict[str, dict[str, LaunchConfig]]()
    for width, launches in content["launches"].items():
        if width not in tuning.WIDTHS:
            raise ValueError(f"unknown width {width!r}")
        for name, launch in launches.items():
            if name.partition("/")[0] not in known:
                raise ValueError(f"unknown kernel {name!r}")
            for size, value in launch.items():
                if type(value) is not int or not 1 <= value <= _MOST:
                    raise ValueError(f"{name}: {size} must be an int from 1 to {_MOST}; got {value!r}")
            found.setdefault(width, {})[name] = LaunchConfig(**launch)
    return found
