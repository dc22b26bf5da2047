"""The models of transformers that these tests share; nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import pytest

pytest.importorskip("transformers", reason="needs the extra 'transformers'")

import huggingface_hub.constants


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another test has imported huggingface_hub before."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
