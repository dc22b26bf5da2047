"""Triton's cache key of one kernel, alone and after another that calls the same function, printed as JSON.

Run as a process of its own, without Triton's interpreter: {"plain": [alone, after], "settled": [alone, after]}, "plain"
being kernels of `triton.jit` and "settled" those of `nsa.triton_backend.tile.kernel`.
"""

from __future__ import annotations

import json
import linecache
import sys
from types import ModuleType

SOURCE = """
import triton
import triton.language as tl
from nsa.triton_backend.tile import kernel

SCALE = tl.constexpr({scale})

@triton.jit
def inner(x):
    return x * SCALE

@{decorator}
def first(X):
    tl.store(X, inner(tl.load(X)))

@{decorator}
def second(X):
    tl.store(X, inner(tl.load(X)) + 1)
"""


def keys(decorator: str, launched: tuple[str, ...], scale: float = 2.0) -> str:
    """The key of `second` where these kernels' keys are asked for in turn."""
    name = "kernels_of_a_process"  # a new module each time, as in a new process
    source = SOURCE.format(decorator=decorator, scale=scale)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), vars(module))
    return [getattr(module, kernel).cache_key for kernel in launched][-1]


def main() -> None:
    found = {
        word: [keys(decorator, ("second",)), keys(decorator, ("first", "second")), keys(decorator, ("second",), 3.0)]
        for word, decorator in (("plain", "triton.jit"), ("settled", "kernel"))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
