"""What else happens on the GPU that is measured: other processes and heat, and what is done about them.

A session begins with `begin`, which refuses a GPU whose figures would be nobody's: a vGPU, and one on which another
process computes and goes on computing. Before each case `GpuWatch.ready` waits until nothing else computes and the GPU
is no longer hot. What cannot be waited for is written into the record by a name below, and so is what was waited for.
It all happens in the process of the command, whose children measure: every other process on the GPU is foreign.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import psutil

from harness import machines, nvml
from harness.machines import Machine
from harness.nvml import GpuProcess, GpuSettings

OTHER_PROCESS, HOT = "other_process", "hot"
UNTRUSTED = (OTHER_PROCESS, HOT)
"""Conditions under which a figure is not to be trusted."""
UNSEEN, WAITED, COOLED, RETRIED, IDLE_PROCESS = "unseen", "waited", "cooled", "retried", "idle_process"
WARMER = "warmer"
"""The GPU was much warmer than when the session began: its clocks may be lower than beside the first cases."""
TOLD = (UNSEEN, WAITED, COOLED, RETRIED, IDLE_PROCESS)
"""Conditions that take nothing of the trust in a figure."""
LONGEST_WAIT_S = 120.0
"""For one case; for the whole session `LONGEST_IN_ALL_S`."""
LONGEST_IN_ALL_S = 900.0
POLL_S = 1.0
_BUSY_PERCENT = 5
"""A process that keeps the multiprocessors no busier does not count: a desktop at rest."""
_HOT_BELOW_SLOWDOWN_C, _COOL_BELOW_SLOWDOWN_C = 8, 20
"""So near to the temperature at which it lowers its clocks a GPU is hot, and so far from it cool."""
_WARMER_C = 20
_HOT_C, _COOL_C = 82, 70
"""The same where that temperature is not told."""


class UnfitGpuError(ValueError):
    """No figure of this GPU would be its own; the message says why and what to do."""


class GpuWatch:
    """Looks at the GPU between the cases of one session, from before it is used."""

    def __init__(self) -> None:
        self._since_the_start: dict[str, str] = {}
        self._at_first = {one.pid for one in nvml.processes() or []}
        self._waited_for_in_vain: set[int] = set()
        self._left_s = LONGEST_IN_ALL_S
        self._at_first_c: int | None = None

    def ready(self) -> dict[str, str]:
        """Wait until nothing else computes and the GPU is not hot. What was noticed, by name; empty is the usual."""
        unseen = [
            what
            for what, told in (("other processes", nvml.processes()), ("its temperature", nvml.temperature_c()))
            if told is None
        ]
        noticed = {UNSEEN: f"NVML does not tell {' and '.join(unseen)}"} if unseen else {}
        noticed |= self._since_the_start | self._alone() | self._cool(self._hot_c())
        self._since_the_start = {}
        if idle := self.idle():
            noticed[IDLE_PROCESS] = f"{_named(idle)} held memory of the GPU"
        return noticed | self._warmer()

    def require_alone(self) -> None:
        """Wait in the same way, and tell the next case of it. Raises UnfitGpuError where another process goes on."""
        noticed = self.ready()
        for name in (WAITED, COOLED, HOT, IDLE_PROCESS):
            if name in noticed:
                print(f"note: {noticed[name]}", flush=True)
        if OTHER_PROCESS in noticed:
            raise UnfitGpuError(
                f"{noticed[OTHER_PROCESS]}, for as long as was waited ({LONGEST_WAIT_S:.0f} s at most). End it, or wait"
                " until it has ended, or choose another GPU with CUDA_VISIBLE_DEVICES"
            )
        self._since_the_start = {name: noticed[name] for name in (WAITED, COOLED) if name in noticed}

    def computing(self) -> list[GpuProcess]:
        """Other processes that compute on the GPU now; of one whose number means nothing here that must be told."""
        here = [one for one in self._others() if one.sm_percent is not None or psutil.pid_exists(one.pid)]
        return [one for one in here if computes(one)]

    def idle(self) -> list[GpuProcess]:
        """Other processes that hold memory of the GPU, and neither compute on it now nor draw a screen."""
        computing = {one.pid for one in self.computing()}
        return [one for one in self._others() if one.pid not in computing and not one.draws]

    def cool(self) -> dict[str, str]:
        """Wait until the GPU is cool: after a case that heat has slowed down."""
        return self._cool(self._cool_c())

    def _others(self) -> list[GpuProcess]:
        """Not this process, its children, or what cannot be told from them: in a container NVML gives the host's
        numbers, which mean nothing here, so that of these only the ones of before the session are known as others."""
        ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        listed = [one for one in nvml.processes() or [] if one.pid not in ours]
        return [one for one in listed if one.pid in self._at_first or psutil.pid_exists(one.pid)]

    def _alone(self) -> dict[str, str]:
        first = self.computing()
        if not first:
            return {}

        def others_compute() -> bool:
            return any(one.pid not in self._waited_for_in_vain for one in self.computing())

        waited_s = self._wait(others_compute)
        if left := self.computing():
            self._waited_for_in_vain |= {one.pid for one in left}
            return {OTHER_PROCESS: f"{_named(left)} computed on the GPU too"}
        return {WAITED: f"waited {waited_s:.0f} s for {_named(first)} to end"}

    def _cool(self, from_c: float) -> dict[str, str]:
        """Wait where it is hotter than that, until it is cool."""
        first = nvml.temperature_c()
        if first is None or first < from_c:
            return {}
        waited_s = self._wait(lambda: (nvml.temperature_c() or 0) > self._cool_c())
        now = nvml.temperature_c()
        if now is not None and now >= self._hot_c():
            return {HOT: f"{now} degrees C before the case, after {waited_s:.0f} s of waiting"}
        return {COOLED: f"waited {waited_s:.0f} s to cool from {first} to {now} degrees C"}

    def _warmer(self) -> dict[str, str]:
        now = nvml.temperature_c()
        if self._at_first_c is None:
            self._at_first_c = now
        if now is None or self._at_first_c is None or now < self._at_first_c + _WARMER_C:
            return {}
        return {WARMER: f"{now} degrees C before the case, {self._at_first_c} when the session began"}

    def _wait(self, goes_on: Callable[[], bool]) -> float:
        """Seconds waited, at most `LONGEST_WAIT_S` and what is left for the session."""
        begin, most_s = time.monotonic(), min(LONGEST_WAIT_S, self._left_s)
        while goes_on() and time.monotonic() - begin < most_s:
            time.sleep(POLL_S)
        waited_s = time.monotonic() - begin
        self._left_s -= waited_s
        return waited_s

    def _hot_c(self) -> int:
        slowdown_c = nvml.slowdown_c()
        return _HOT_C if slowdown_c is None else slowdown_c - _HOT_BELOW_SLOWDOWN_C

    def _cool_c(self) -> int:
        slowdown_c = nvml.slowdown_c()
        return _COOL_C if slowdown_c is None else slowdown_c - _COOL_BELOW_SLOWDOWN_C


def begin(machine: Machine) -> GpuWatch | None:
    """The watch of a session, made before the session uses the GPU; None on the CPU. Prints how the GPU is set up.

    Raises UnfitGpuError for a vGPU, and where another process goes on computing.
    """
    if machine.id == machines.CPU:
        return None
    settings = nvml.settings()
    if is_virtual(machine, settings):
        raise UnfitGpuError(
            f"{machine.title} is a vGPU: other guests use its multiprocessors in turn, unseen from here, and no latency"
            " is its own. Pass a whole GPU or a MIG slice through to this machine, or measure the CPU with --gpu cpu;"
            " tests and regressions run on a vGPU"
        )
    watch = GpuWatch()
    watch.require_alone()
    for note in notes(machine, settings):
        print(f"note: {note}", flush=True)
    return watch


def is_virtual(machine: Machine, settings: GpuSettings | None) -> bool:
    """Whether the GPU is a vGPU, by its name or by NVML's word."""
    return machines.is_virtual(machine.title) or (settings is not None and bool(settings.virtual))


def notes(machine: Machine, settings: GpuSettings | None) -> list[str]:
    """What a reader of the session's figures must know of how the GPU is set up."""
    if settings is None:
        return [
            "NVML does not answer: clocks, heat, power limit and other processes are not seen, and figures are marked."
            " Install nvidia-ml-py, and in a container give it the driver's utilities"
        ]
    found = []
    if machines.is_slice(machine.id):
        found.append("a MIG slice: clocks, power and heat are the whole board's, which other slices use too")
    if settings.capped:
        found.append(
            f"the power limit is {settings.power_limit_w:.0f} W, the board's own is"
            f" {settings.default_power_limit_w:.0f} W: this is the machine {machine.id}, and records under different"
            " limits are not compared"
        )
    if settings.display:
        found.append("this GPU draws a screen: figures are marked")
    if settings.persistence is False:
        found.append(
            "persistence mode is off, and the driver is loaded anew for each first process; `nvidia-smi"
            " --persistence-mode=1` keeps it. This session keeps it loaded too"
        )
    if settings.may_lock_clocks is False:
        found.append(
            "no right to lock the clocks: figures whose clock moved are marked. An administrator fixes them with"
            " `nvidia-smi --lock-gpu-clocks=MHZ,MHZ`"
        )
    return found


def computes(one: GpuProcess) -> bool:
    """Whether a process keeps the multiprocessors busy. Where that is not told, it does unless it draws a screen."""
    return not one.draws if one.sm_percent is None else one.sm_percent > _BUSY_PERCENT


def _named(found: Sequence[GpuProcess]) -> str:
    return ", ".join(map(str, found)) or "another process"
