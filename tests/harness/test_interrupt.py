"""An interrupt that comes while a process is started waits until that process is known."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from harness import interrupt


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As a command has them; pytest's own come back."""
    before = {asked: signal.signal(asked, signal.default_int_handler) for asked in (signal.SIGINT, signal.SIGTERM)}
    yield
    for asked, handler in before.items():
        signal.signal(asked, handler)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_it_is_let_through(sent: signal.Signals) -> None:
    with interrupt.deferred() as let_through:
        os.kill(os.getpid(), sent)
        with pytest.raises(KeyboardInterrupt):
            let_through()
        assert signal.getsignal(sent) is signal.default_int_handler


def test_without_one_nothing_is_raised_and_a_later_one_is_as_ever() -> None:
    with interrupt.deferred() as let_through:
        let_through()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_come_back_where_the_process_could_not_be_started() -> None:
    with pytest.raises(FileNotFoundError), interrupt.deferred():
        raise FileNotFoundError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored() -> None:
    """A shell has SIGINT ignored for what runs in its background; a handler would undo that for what is started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupt.deferred() as let_through:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGINT)
        let_through()
