"""The batches of a run: opened within a deadline, ahead of the GPU, from where the last life stopped."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from nsa.train import batches, first_batch
from nsa.train.batches import SYNTHETIC, Prefetch, Share, SyntheticBatches
from nsa.train.first_batch import Loader
from nsa.train.packing import Batch
from nsa.train.settings import Settings


class Feed:
    """Iterate over it; `waited_s` is how long the last batch was waited for, `position` where the next one begins."""

    def __init__(
        self,
        settings: Settings,
        share: Share,
        *,
        position: dict[str, Any] | None = None,
        pin: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Waits for the first batch. Raises NoFirstBatchError, or what the loader raised; ValueError for a position
        in another source."""
        name = batches.source_name(settings)
        fell_back = position is not None and position["source"] == SYNTHETIC != name
        if position is not None and not fell_back and position["source"] != name:
            raise ValueError(f"data.dataset must be that of the checkpoint, {position['source']}; got {name}")

        def prefetch(synthetic: bool) -> Prefetch:
            def opened() -> batches.Source:
                found: batches.Source = (
                    SyntheticBatches(settings, share) if synthetic else batches.source(settings, share, report=say)
                )
                if position is not None:
                    found.restore(position["at"])
                return found

            return Prefetch(opened, settings.data.prefetch_batches, pin=pin)

        self._prefetch = prefetch(synthetic=fell_back)
        self._later: Prefetch | None = None

        def instead() -> Batch:
            self._later = prefetch(synthetic=True)
            return self._later.next()

        first = first_batch.first_batch(
            Loader(SYNTHETIC if fell_back else name, self._prefetch.next),
            settings.data.loader_timeout_s,
            Loader(SYNTHETIC, instead) if settings.data.synthetic_on_fail else None,
        )
        if self._later is not None:
            self._prefetch.close()
            self._prefetch = self._later
        self.source, self.first_wait_s = first.source, first.waited_s
        self.waited_s = first.waited_s
        self.position = {"source": self.source, "at": (position or {}).get("at")}
        self._batches = itertools.chain([first.batch], iter(self._prefetch.next, None))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        batch = next(self._batches)
        assert batch is not None
        self.waited_s = time.perf_counter() - begin
        self.position = {"source": self.source, "at": batch.position}
        return batch

    def close(self) -> None:
        self._prefetch.close()


def held_out(settings: Settings, share: Share, source: str) -> list[Batch]:
    """The batches of every validation. Raises NoFirstBatchError, or what the loader raised."""

    def fetch() -> list[Batch]:
        opened: batches.Source = (
            SyntheticBatches(settings, share, held_out=True)
            if source == SYNTHETIC
            else batches.source(settings, share, held_out=True)
        )
        return [opened.next() for _ in range(settings.train.val_batches)]

    return first_batch.first_batch(Loader(f"{source} (validation)", fetch), settings.data.loader_timeout_s).batch
