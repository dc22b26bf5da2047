"""Both ways of the selected branch obey the laws, on every GPU and in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest

BY_BLOCK_MAX_GROUP = 8


@pytest.fixture(autouse=True)
def each_group_goes_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups by block and others by query, which the bytes of these small shapes would not always say."""
    if importlib.util.find_spec("triton") is None:
        return
    from nsa.triton_backend import dispatch  # it imports Triton

    monkeypatch.setattr(dispatch, "sooner_by_block", lambda call, **_: call.group <= BY_BLOCK_MAX_GROUP)
