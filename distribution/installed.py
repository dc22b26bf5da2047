"""Is the package that this interpreter finds the installed one, whole, and does it compute? Run with -I by its path.

It imports nothing of the repository: `archives.py` runs it in a fresh environment that holds the wheel alone.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib import metadata, resources
from pathlib import Path

DISTRIBUTION = "nsa-trusted"
OPTIONAL = ("nsa.integrations.", "nsa.triton_backend", "nsa.tuner.", "nsa.warm.", "nsa.train.")
"""Modules that may need a package which is not there; a module of the package itself must be there all the same."""
DATA = (
    ("nsa", "py.typed"),
    ("nsa", "triton_backend/tables/sm86.json"),
    ("nsa.train", "profiles"),
    ("nsa.train", "page.html"),
)


def modules(package: str) -> list[str]:
    """Import every module that can be imported without running a command: their names. Raises ImportError."""
    found = []
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if not module.name.startswith(OPTIONAL) or (error.name or "").split(".")[0] == package:
                raise
        else:
            found.append(module.name)
    return found


def missing() -> list[str]:
    """Data files that the package should hold and does not."""
    return [
        f"{package}/{name}"
        for package, name in DATA
        if not (place := resources.files(package).joinpath(name)).is_file() and not place.is_dir()
    ]


def problem() -> str | None:
    """What is wrong with the installed package, or None."""
    import nsa

    if not Path(nsa.__file__).is_relative_to(sys.prefix):
        return f"nsa is not the installed one but {nsa.__file__}"
    if nsa.__version__ != metadata.version(DISTRIBUTION):
        return f"nsa.__version__ is {nsa.__version__}, that of the archive {metadata.version(DISTRIBUTION)}"
    if gone := missing():
        return f"data files are not in the wheel: {', '.join(gone)}"
    return None


def compute() -> str:
    """One call on the CPU, held to the specification. Raises AssertionError."""
    import torch

    import nsa

    config = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=16)
    q, k, v = (torch.randn(1, 40, heads, 8) for heads in (4, 2, 2))
    gates = torch.rand(1, 40, 4, 3)
    o = nsa.nsa_attention(q, k, v, gates, config)
    torch.testing.assert_close(o, nsa.reference.nsa_attention(q, k, v, gates, config), rtol=1e-4, atol=1e-4)
    return f"nsa {nsa.__version__} from {Path(nsa.__file__).parent}: {len(modules('nsa'))} modules, one call"


def main() -> int:
    """Exit code 1 where something is wrong, and what."""
    if told := problem():
        print(told)
        return 1
    print(compute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
