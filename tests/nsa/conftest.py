"""On a CPU Triton's interpreter takes tensors that a GPU's kernels do not: a test says where its kernels run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def kernels_run_where_the_test_says(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By the fixture `device`, or by the marker `interpreter`: else it fails on a GPU, where no CI runs."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    said = "device" in request.fixturenames or request.node.get_closest_marker("interpreter") is not None
    if said or interpreter is None:
        yield
        return
    run, launched = interpreter.InterpretedFunction.run, list[str]()

    def noted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        launched.append(kernel.fn.__name__)
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", noted)
    yield
    if launched:
        pytest.fail(f"runs {launched[0]}: ask for the fixture `device`, or mark the test `interpreter`")
