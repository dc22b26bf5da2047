"""Partitions of a program's warps, for `gluon_on_cpu.py`: they run in turns; where one waits another one goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.nsa.triton_backend.gluon_memory import KernelError


class Partitions:
    """Runs functions, each in a thread of its own, of which only one is ever awake.

    Where it waits, the first in `order` goes on that can; the last one gets its turn as late as it may.
    """

    def __init__(self, functions: Sequence[Callable[[], None]], order: Sequence[int]) -> None:
        self._alive, self._changed = list(order), threading.Condition()
        self._waits: dict[int, Callable[[], bool]] = {}
        self._turn = order[0]
        self._errors: list[BaseException] = []
        self._own = threading.local()
        self._threads = [threading.Thread(target=self._run, args=one) for one in enumerate(functions)]

    def run(self) -> None:
        """Until all have ended; raises the first error of any."""
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Let the others go on until it is over; KernelError where all of them wait."""
        if not is_over():
            self._waits[self._own.number] = is_over
            self._pass_on()
            self._await_turn()

    def _run(self, number: int, function: Callable[[], None]) -> None:
        self._own.number = number
        try:
            self._await_turn()
            function()
        except BaseException as error:  # raised again by `run`
            self._errors.append(error)
        self._alive.remove(number)
        self._pass_on()

    def _pass_on(self) -> None:
        able = [one for one in self._alive if one not in self._waits or self._waits[one]()]
        if self._alive and not able:
            self._errors.append(KernelError("a wait that never ends: every partition waits"))
        with self._changed:
            self._turn = (able or self._alive or [-1])[0]
            self._changed.notify_all()

    def _await_turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == self._own.number)
        self._waits.pop(self._own.number, None)
        if self._errors:
            raise KernelError("another partition has failed")
