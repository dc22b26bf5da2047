"""Partitions of a program's warps, for `gluon_on_cpu.py`: they run in turns; where one waits another one goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.nsa.triton_backend.gluon_memory import KernelError


class Partitions:
    """Runs functions in turns, each in a thread of its own, of which only one is ever awake."""

    def __init__(self, functions: Sequence[Callable[[], None]]) -> None:
        self._turn, self._changed = 0, threading.Condition()
        self._alive, self._in_vain = list(range(len(functions))), 0  # waits in a row that were not over
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
        while not is_over():
            self._in_vain += 1
            if self._in_vain >= len(self._alive):
                raise KernelError("a wait that never ends: every partition waits")
            with self._changed:
                self._choose_next()
            self._await_turn()
        self._in_vain = 0

    def _run(self, number: int, function: Callable[[], None]) -> None:
        self._own.number = number
        try:
            self._await_turn()
            self._in_vain = 0
            function()
        except BaseException as error:  # raised again by `run`
            self._errors.append(error)
        with self._changed:
            self._alive.remove(number)
            self._in_vain = 0
            self._choose_next()

    def _choose_next(self) -> None:
        later = [one for one in self._alive if one > self._turn]
        self._turn = (later or self._alive or [-1])[0]
        self._changed.notify_all()

    def _await_turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == self._own.number)
        if self._errors:
            raise KernelError("another partition has failed")
