"""Runs as a new Python starts: where that is a command of the benches, its modules are changed once they are imported.

The processes that a command starts measure as they always do.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _is_command() -> bool:
    words = sys.orig_argv
    return "-m" in words[:-1] and words[words.index("-m") + 1] == "benchmarks"


class _Changing(importlib.abc.MetaPathFinder):
    """Finds what the usual finder finds, and changes the module once it has run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _MODULES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            from tests.fake_nvml import boards, process

            execute(module)
            process.patches(boards.BOARDS[os.environ[process.VARIABLE]])[name](module, setattr)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_MODULES = (
    "torch.cuda", "harness.machines", "harness.fingerprint", "benchmarks.timing.gpu_watch", "benchmarks.runner",
)  # fmt: skip
if _is_command():
    sys.meta_path.insert(0, _Changing())
