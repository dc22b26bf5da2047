"""The model of an atlas: trained by `python -m nsa.train`, minutes at a time, in a folder that each call goes on in.

| in the folder | what it is |
|---|---|
| corpus.jsonl, corpus.json | the text (`corpus`) |
| run/ | the folder of nsa.train: checkpoints, heartbeats |
| phases.jsonl | a line per phase: its length, its profile and settings, and the step after which it began |

A call ends the training after its minutes by SIGTERM, on which it saves; what is killed goes on from the checkpoint
before.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.atlas import corpus
from harness.interrupt import INTERRUPTED
from harness.repository import ROOT
from nsa.io import append_line, read_json_lines
from nsa.model import DecoderLM, ModelConfig
from nsa.train import checkpoint, profile
from nsa.train.run import CHECKPOINTS
from nsa.train.run_folder import read_run
from nsa.train.settings import Settings

RUN, PHASES = "run", "phases.jsonl"
STEPS = 1_000_000
"""More than any call reaches: time ends it."""
SAVE_EVERY = 2000
"""Steps, some seven minutes of the 125M model on an H200: what a kill takes at most. Each takes seconds from training,
and the end of a call saves anyway."""
SAVING_S = 300
"""How long the training may take to save once it is asked to end."""
STOPPED = 128 + signal.SIGTERM
"""The exit code of a training that saved and ended."""


@dataclass(frozen=True)
class State:
    """Where the training in a folder stands."""

    step: int
    tokens: int
    minutes: float
    """In steps: without the start of each call."""
    seq_lens: tuple[int, ...]
    """In the order in which they were trained, each once."""
    settings: Settings
    """Of the newest call."""


def settings_of(folder: Path, options: Mapping[str, Any], seq_len: int, profile_name: str) -> Settings:
    """The settings of a call: the profile, at this length with as many tokens per step, on the folder's corpus.

    `options` are further settings by dotted name, which win. Raises ValueError naming one that is wrong.
    """
    base = profile.load(profile_name)
    overrides: dict[str, Any] = {
        "train.steps": STEPS,
        "train.seq_len": seq_len,
        "train.batch_size": max(1, base.train.batch_size * base.train.seq_len // seq_len),
        "train.lr_schedule": "constant",  # the last step is not known
        "train.warmup_steps": min(200, base.train.warmup_steps),
        "train.save_every": SAVE_EVERY,
        "train.keep_checkpoints": 2,
        "train.val_every": 0,  # `measure` reads held-out text; here it would be compiled for, call by call
        "train.out_dir": str(folder / RUN),
        "data.dataset": "files",
        "data.path": str(folder / corpus.CORPUS),
        "data.packing": False,  # a document is shorter than the lengths that are measured
        "telemetry.statistics": False,
        "telemetry.tensorboard": False,
    }
    return profile.load(profile_name, overrides={**overrides, **options})


def train(folder: Path, seq_len: int, minutes: float, options: Mapping[str, Any], profile_name: str) -> State:
    """Train for so many minutes, from the newest checkpoint if there is one.

    Raises ValueError where the settings are wrong, nothing was saved, or the training failed (its own words stand
    above); KeyboardInterrupt where it was interrupted, which it saves at.
    """
    text = corpus.prepare(folder)
    settings = settings_of(folder, options, seq_len, profile_name)
    before = state(folder)
    given = {name: value for name, value, origin in profile.flat(settings) if origin == "command line"}
    command = [sys.executable, "-m", "nsa.train", "run", "--profile", profile_name]
    command += [word for name, value in given.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    if (folder / RUN).is_dir():
        command.append("--resume")
    stood = before.step if before else 0
    print(f"{text.described}\n{seq_len} tokens a sequence, {minutes:g} minutes, from step {stood}", flush=True)
    phase = {"seq_len": seq_len, "profile": profile_name, "options": dict(options), "after_step": stood}
    append_line(folder / PHASES, json.dumps(phase))
    code = _run_for(command, 60 * minutes)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code not in (0, STOPPED, -signal.SIGTERM):  # the last one: before it could save
        raise ValueError(f"the training ended with exit code {code}; what it said stands above")
    after = state(folder)
    if after is None or after.step == stood:
        raise ValueError(f"--minutes must be more for this model: no step was saved within {minutes:g}")
    return after


def _run_for(command: list[str], seconds: float) -> int:
    """The exit code of a command that is asked to end after so many seconds, and is waited for: it saves first.

    A SIGTERM is passed on, a SIGINT of a terminal reaches the command by itself; either gives INTERRUPTED.
    """
    asked: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in handlers:
        signal.signal(number, lambda number, _: asked.append(number))
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end and not asked:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(1.0, max(end - time.monotonic(), 0.0)))
        if asked != [signal.SIGINT]:
            process.terminate()
        code = process.wait(SAVING_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the training had not saved {SAVING_S} s after it was asked to end, and was killed") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()
    return INTERRUPTED if asked else code


def state(folder: Path) -> State | None:
    """Where the training stands, by its newest checkpoint; None before the first."""
    newest = checkpoint.latest(folder / RUN / CHECKPOINTS)
    return None if newest is None else _state_at(folder, int(newest.stem.removeprefix("step-")))


def _state_at(folder: Path, step: int) -> State:
    steps = [record for record in read_run(folder / RUN).steps if record["step"] <= step]
    phases = list(read_json_lines(folder / PHASES))
    reached = [*(phase["after_step"] for phase in phases[1:]), step]
    taken = [phase for phase, end in zip(phases, reached, strict=True) if end > phase["after_step"]]
    last = taken[-1]
    return State(
        step,
        tokens=steps[-1]["tokens_seen"],
        minutes=sum(record["step_ms"] or 0.0 for record in steps) / 60_000,
        seq_lens=tuple(dict.fromkeys(phase["seq_len"] for phase in taken)),
        settings=settings_of(folder, last["options"], last["seq_len"], last["profile"]),
    )


def load(folder: Path, device: torch.device) -> tuple[DecoderLM, State]:
    """The newest model that is intact, for inference, and where it stands.

    Raises ValueError where there is none, DamagedCheckpointError where there is none that is intact.
    """
    found = checkpoint.newest_intact(folder / RUN / CHECKPOINTS)
    if found is None:
        raise ValueError(f"--folder {folder} holds no checkpoint yet; `atlas train` makes one")
    lm = DecoderLM(ModelConfig.from_mapping(found.state["model_config"]))
    lm.load_state_dict({name.removeprefix("lm."): value for name, value in found.state["model"].items()})
    return lm.to(device).eval().requires_grad_(False), _state_at(folder, int(found.state["step"]))
