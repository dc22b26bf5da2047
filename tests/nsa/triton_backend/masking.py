"""Lets `selected_masked.py` serve calls of any size, also where no table measured it, as in the interpreter."""

from __future__ import annotations

import pytest

from nsa.triton_backend import dispatch, tuning

LAUNCH = tuning.MaskedLaunch(64, 32, 4, 1, max_keys=4096, max_group=16)


def serve(monkeypatch: pytest.MonkeyPatch, least_queries: int = 1) -> None:
    """Calls of so many queries, up to 4096 keys and 16 heads per group."""
    monkeypatch.setattr(tuning, "masked_launch", lambda *_: LAUNCH)
    monkeypatch.setattr(dispatch, "MASKED_MIN_QUERIES", least_queries)
