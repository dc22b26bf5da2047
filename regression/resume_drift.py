"""resume-drift: "built-in support for resuming", which nobody had ever shown.

What a resume without proof comes to: weights without the optimiser, its random numbers and its place in the data, in
a file that is written over itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nsa.train import checkpoint
from regression import training
from regression.evidence import Evidence
from regression.incident import Incident, Step
from regression.training import Run, Trainer
from regression.verdict import Verdict

INCIDENT = Incident(
    id="resume-drift",
    symptom="built-in resume, never shown",
    cause="a checkpoint that lacks what the next step depends on, written over the last one",
    detector="SIGKILL at random moments and in the middle of a write: bitwise the same losses, latest.ckpt whole",
    expects=Verdict.WRONG,
)

_RUN = Run(steps=28, save_every=3)
_KILLS = 3
_DELAY_STEPS = 2.0
"""A kill comes within this many steps' time after a step, whatever the child does then."""


@dataclass(frozen=True)
class Death:
    """How a training child ends before its time."""

    after_steps: int | None = None
    """SIGKILL once it has taken this many steps, and `delay_s` later."""
    delay_s: float = 0.0
    at_byte: int | None = None
    """The kernel ends it in the middle of a write, when a file has this many bytes."""


def product(step: Step) -> Evidence:
    """Kill a training child again and again, resume it, and compare every loss with those of a run left alone.

    On the CPU whatever the device: nothing else promises the same bits.
    """
    torch.set_num_threads(1)  # threads would not survive the fork
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        expected = dict(_live(Path(folder) / "alone", Death()))
        deaths = _deaths((time.monotonic() - begin) / _RUN.steps)
        step(1)
        wrong, ends = _lives(Path(folder) / "killed", deaths, expected, step)
    return Evidence(wrong=tuple(wrong), notes=(f"lives ended after steps {', '.join(map(str, ends))}",))


def _lives(folder: Path, deaths: list[Death], expected: dict[int, float], step: Step) -> tuple[list[str], list[int]]:
    """What was broken, and after which step each life ended."""
    wrong: list[str] = []
    ends: list[int] = []
    for n, death in enumerate((*deaths, Death()), start=2):
        before, losses = ends[-1] if ends else 0, _live(folder, death)
        step(n)
        wrong += [f"step {i}: loss {loss!r}, left alone {expected[i]!r}" for i, loss in losses if loss != expected[i]]
        if losses and losses[0][0] <= before - _RUN.save_every:
            wrong.append(f"more than {_RUN.save_every} steps lost: from step {before} back to {losses[0][0]}")
        ends.append(losses[-1][0] if losses else before)
        if damage := _damage(folder):
            return [*wrong, f"after step {ends[-1]}: {damage}"], ends
    if ends[-1] != _RUN.steps:
        wrong.append(f"the last life ended at step {ends[-1]} of {_RUN.steps}")
    return wrong, ends


def _deaths(step_s: float) -> list[Death]:
    """A first one with a checkpoint behind it, then one at a random byte of a checkpoint, then at random moments."""
    chance, often = random.Random(), _RUN.save_every
    size = len(checkpoint.encode(training.Trainer(_RUN).state()))
    after = [chance.randint(often, 2 * often), *(chance.randint(1, 2 * often) for _ in range(_KILLS - 1))]
    first, *others = (Death(steps, chance.uniform(0, _DELAY_STEPS * step_s)) for steps in after)
    return [first, Death(at_byte=chance.randrange(size)), *others]


def _live(folder: Path, death: Death) -> list[tuple[int, float]]:
    """One child that trains from the latest checkpoint on: the steps it took, with their losses, until it ended."""
    fork = multiprocessing.get_context("fork")  # what is patched in this process is patched in the child
    receive, send = fork.Pipe(duplex=False)
    child = fork.Process(target=_train, args=(folder, send, death.at_byte))
    child.start()
    send.close()
    losses: list[tuple[int, float]] = []
    with contextlib.suppress(EOFError):
        while True:
            losses.append(receive.recv())
            if len(losses) == death.after_steps:
                time.sleep(death.delay_s)
                child.kill()
    child.join()
    return losses


def _train(folder: Path, send: Connection, at_byte: int | None) -> None:
    """The child."""
    if at_byte is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, at_byte))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and would raise
    for done in training.train(_RUN, folder):
        send.send(done)


def _damage(folder: Path) -> str | None:
    """What is wrong with the file that latest.ckpt points at."""
    newest = checkpoint.latest(folder)
    try:
        if newest is not None:
            checkpoint.load(newest)
    except (ValueError, OSError) as error:
        return f"{checkpoint.LATEST} cannot be read: {type(error).__name__}"
    return None


class ForgetfulTrainer(Trainer):
    """Its checkpoints hold the weights and the step, nothing else."""

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in super().state().items() if name in ("step", "model")}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore({**super().state(), **state})


def written_over(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """One file, written in place."""
    folder.mkdir(parents=True, exist_ok=True)
    path, link = folder / "model.ckpt", folder / checkpoint.LATEST
    if not link.is_symlink():
        link.symlink_to(path.name)
    path.write_bytes(checkpoint.encode(state))
    return path


@contextmanager
def inject() -> Iterator[None]:
    with mock.patch.object(training, "Trainer", ForgetfulTrainer):
        yield


def faulty(step: Step) -> Evidence:
    """A checkpoint that forgets, and one that is written over itself: each must be seen."""
    with inject():
        forgetful = product(step)
    with mock.patch.object(checkpoint, "save", written_over):
        half_written = product(step)
    seen = (*half_written.wrong, *forgetful.wrong) if half_written.wrong and forgetful.wrong else ()
    return Evidence(wrong=seen, notes=(*forgetful.notes, *half_written.notes))
