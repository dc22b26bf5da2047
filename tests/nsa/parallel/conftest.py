"""The ranks that all tests here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nsa.parallel.pool import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    started = Pool(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()
