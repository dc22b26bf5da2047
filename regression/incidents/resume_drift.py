"""resume-drift: "built-in support for resuming", which nobody had ever shown.

What a resume without proof comes to: weights without the optimiser, its random numbers and its place in the data, in
a file that is written over itself.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import signal
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimiser of a process imports it: here once, else in each child that is forked

from nsa.train import checkpoint
from nsa.train.run import CHECKPOINTS
from nsa.train.settings import Settings
from nsa.train.trainer import Trainer
from regression import training
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="resume-drift",
    symptom="built-in resume, never shown",
    cause="a checkpoint that lacks what the next step depends on, written over the last one",
    detector="SIGKILL at random moments and in the middle of a write: bitwise the same losses, latest.ckpt whole",
    expects=ReproVerdict.WRONG,
)

_STEPS, _SAVE_EVERY = 28, 3
_KILLS = 3
_DELAY_STEPS = 2.0
"""A kill comes within this many steps' time after a step, whatever the child does then."""
_POLL_S = 0.002
_healthy = Trainer.restore


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
        alone, killed = (_settings(Path(folder) / name) for name in ("alone", "killed"))
        begin = time.monotonic()
        expected = dict(_live(alone, Death()))
        deaths = _deaths((time.monotonic() - begin) / _STEPS, _size_of_a_checkpoint(alone))
        step(1)
        wrong, ends = _attempts(killed, deaths, expected, step)
    return Evidence(wrong=tuple(wrong), notes=(f"attempts ended after steps {', '.join(map(str, ends))}",))


def _settings(folder: Path) -> Settings:
    return training.settings(folder, "cpu", steps=_STEPS, save_every=_SAVE_EVERY, keep_checkpoints=2)


def _checkpoints(chosen: Settings) -> Path:
    return Path(chosen.out_dir) / CHECKPOINTS


def _size_of_a_checkpoint(chosen: Settings) -> int:
    newest = checkpoint.latest(_checkpoints(chosen))
    return 0 if newest is None else newest.stat().st_size


def _attempts(
    chosen: Settings, deaths: list[Death], expected: dict[int, float], step: Step
) -> tuple[list[str], list[int]]:
    """What was broken, and after which step each attempt ended."""
    wrong: list[str] = []
    ends: list[int] = []
    for n, death in enumerate((*deaths, Death()), start=2):
        before, losses = ends[-1] if ends else 0, _live(chosen, death)
        step(n)
        wrong += [f"step {i}: loss {loss!r}, left alone {expected[i]!r}" for i, loss in losses if loss != expected[i]]
        if losses and losses[0][0] <= before - _SAVE_EVERY:
            wrong.append(f"more than {_SAVE_EVERY} steps lost: from step {before} back to {losses[0][0]}")
        ends.append(losses[-1][0] if losses else before)
        if damage := _damage(_checkpoints(chosen)):
            return [*wrong, f"after step {ends[-1]}: {damage}"], ends
    if ends[-1] != _STEPS:
        wrong.append(f"the last attempt ended at step {ends[-1]} of {_STEPS}")
    return wrong, ends


def _deaths(step_s: float, checkpoint_bytes: int) -> list[Death]:
    """A first one with a checkpoint behind it, then one at a random byte of a checkpoint, then at random moments."""
    chance, often = random.Random(), _SAVE_EVERY
    after = [chance.randint(often + 1, 2 * often), *(chance.randint(1, 2 * often) for _ in range(_KILLS - 1))]
    first, *others = (Death(steps, chance.uniform(0, _DELAY_STEPS * step_s)) for steps in after)
    at_byte = chance.randrange(checkpoint_bytes // 2, checkpoint_bytes)  # beyond what the other files have
    return [first, Death(at_byte=at_byte), *others]


def _live(chosen: Settings, death: Death) -> list[tuple[int, float]]:
    """One child that runs from the latest checkpoint on: the steps it took, with their losses, until it ended."""
    fork = multiprocessing.get_context("fork")  # what is patched in this process is patched in the child
    known = len(_steps(chosen))
    child = fork.Process(target=_train, args=(chosen, death.at_byte))
    child.start()
    while death.after_steps is not None and child.is_alive():
        if len(_steps(chosen)) - known >= death.after_steps:
            time.sleep(death.delay_s)
            child.kill()
        time.sleep(_POLL_S)
    child.join()
    return _steps(chosen)[known:]


def _steps(chosen: Settings) -> list[tuple[int, float]]:
    """(step, loss), attempt after attempt."""
    return [(record["step"], record["loss"]) for record in training.heartbeat(chosen) if "loss" in record]


def _train(chosen: Settings, at_byte: int | None) -> None:
    """The child."""
    if at_byte is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, at_byte))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and would raise
    training.run(chosen, lambda record: None, resume=True)


def _damage(folder: Path) -> str | None:
    """What is wrong with the file that latest.ckpt points at."""
    newest = checkpoint.latest(folder)
    try:
        if newest is not None:
            checkpoint.load(newest)
    except (ValueError, OSError) as error:
        return f"{checkpoint.LATEST} cannot be read: {type(error).__name__}"
    return None


def forgetful(trainer: Trainer, state: dict[str, Any]) -> None:
    """Weights and step come back, the optimiser's state and the place in the data do not."""
    _healthy(trainer, {**state, "optimizer": trainer.optimizer.state_dict()})


def written_over(folder: Path, step: int, state: dict[str, Any], keep: int | None = None) -> Path:
    """One file, written in place."""
    folder.mkdir(parents=True, exist_ok=True)
    path, link = folder / "step-00000000.ckpt", folder / checkpoint.LATEST
    if not link.is_symlink():
        link.symlink_to(path.name)
    path.write_bytes(checkpoint.encode(state))
    return path


def inject() -> AbstractContextManager[None]:
    return injected(Fault(Trainer, "restore", forgetful))


def faulty(step: Step) -> Evidence:
    """A resume that forgets, and a checkpoint that is written over itself: each must be seen."""
    with inject():
        forgot = product(step)
    with injected(Fault(checkpoint, "save", written_over)):
        half_written = product(step)
    seen = (*half_written.wrong, *forgot.wrong) if half_written.wrong and forgot.wrong else ()
    return Evidence(wrong=seen, notes=(*forgot.notes, *half_written.notes))
