"""What a new process finds in the place of pynvml: the fake, for the board that FAKE_NVML_BOARD names."""

from typing import Any

from tests.fake_nvml.process import told

_LIBRARY = told()


def __getattr__(name: str) -> Any:
    return getattr(_LIBRARY, name)
