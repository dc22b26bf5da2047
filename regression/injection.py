"""A fault in the place of a part of the product, and the proof that the product's run reached it.

What is never entered proves nothing: the detector would have judged a healthy product, whatever it says.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock


class NeverEnteredError(Exception):
    """The run ended, and nothing of it called the injected fault; the message names what was replaced."""


class Fault(NamedTuple):
    """What takes the place of `owner.name`: a function, a class or a property."""

    owner: Any
    """A module or a class."""
    name: str
    instead: Any
    proves: bool = True
    """Whether a call of it proves that the run reached the fault."""


@contextmanager
def injected(*faults: Fault) -> Iterator[None]:
    """All these faults in the product, in this process and in those that it forks meanwhile.

    Raises NeverEnteredError at the end if not one of them was called; another exception goes first.
    """
    entered = mmap.mmap(-1, 1)  # shared with forked processes
    with ExitStack() as stack:
        for fault in faults:
            instead = _recording_calls(fault.instead, entered) if fault.proves else fault.instead
            stack.enter_context(mock.patch.object(fault.owner, fault.name, instead))
        yield
    if not entered[0]:
        names = ", ".join(sorted({f"{_name(fault.owner)}.{fault.name}" for fault in faults}))
        raise NeverEnteredError(f"the run never entered the fault in {names or 'nothing'}")


def _recording_calls(fault: Any, entered: mmap.mmap) -> Any:
    """The same fault, which leaves a sign that it was called."""
    if isinstance(fault, property):
        assert fault.fget is not None
        return property(_recording_calls(fault.fget, entered))
    function: Callable[..., Any] = fault

    @functools.wraps(function)
    def recorded(*arguments: Any, **named: Any) -> Any:
        entered[0] = 1
        return function(*arguments, **named)

    return recorded


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))
