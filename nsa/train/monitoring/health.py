"""The monitors at work in a run: which alarms stop it, and which are written down.

`future_leak` checks the model itself, on the run's own text. On real text no loss is known to be too good, so the cause
is tested: later tokens are changed, and no row before them may move.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.model import DecoderLM
from nsa.train.monitoring import monitors
from nsa.train.monitoring.attention_stats import AttentionStats
from nsa.train.monitoring.monitors import Alarm

STOPS = frozenset({"non_finite", "too_good", "missing_gradients", "selection_at_maximum", "keys_read", "future_leak"})
"""Alarms after which every further step is wasted; the others are written down and make the run a no-go."""
WARM_UP_STEPS = 5
"""Steps that compile, allocate and tune: left out of the series."""
LAWFUL_SKIPS = 4
"""Steps that an fp16 run may lose while the scaler comes down to its scale; then one for each higher one it tries."""
GROWTH_INTERVAL = 2000
"""Of torch.amp.GradScaler."""
SERIES = 20_000
"""Steps that are remembered."""
LIMIT_MIB_PER_STEP = 0.05
GROWN_MIB = {"allocated_mib": 16.0, "rss_mib": 64.0}
"""What memory must have grown by: a resident set goes up and down by tens of MiB with the allocator."""
LEAST_STEPS = 100
"""Before that a slope or a fall is the machine's."""
IN_A_ROW = 3
"""Logged steps at which a slope or a fall must be seen: a busy machine comes and goes."""


class StoppedError(RuntimeError):
    """An alarm after which it makes no sense to go on."""

    def __init__(self, alarm: Alarm, step: int) -> None:
        self.alarm, self.step = alarm, step
        super().__init__(f"stopped at step {step}: {alarm.monitor}: {alarm.why}")


@dataclass(frozen=True)
class StepMetrics:
    """What one step gave."""

    step: int
    loss: float
    grad_norm: float
    targets: int
    tokens_per_s: float | None
    memory_mib: float | None
    memory_name: str = "rss_mib"
    """What that is: "allocated_mib" on a GPU."""


def throughput(tokens_per_s: Sequence[float]) -> Alarm | None:
    """Has it fallen for good? Warm-up left out; None too where the series is short."""
    return monitors.throughput_drift(tokens_per_s) if len(tokens_per_s) >= LEAST_STEPS else None


def memory(memory_mib: Sequence[float], name: str) -> Alarm | None:
    """Does it grow from step to step? Warm-up left out; None too where the series is short."""
    if len(memory_mib) < LEAST_STEPS:
        return None
    return monitors.memory_slope(memory_mib, limit_mib_per_step=LIMIT_MIB_PER_STEP, grown_mib=GROWN_MIB[name])


class Health:
    """Asked at each step (`step`) and at each logged step (`logged`); both return the alarms that are new."""

    def __init__(self, *, random_vocab_size: int | None, fp16: bool, warmup_steps: int, fused_backend: str) -> None:
        """`random_vocab_size` where the data are fresh random tokens, whose entropy is known."""
        self._vocab_size, self._fp16, self._warmup_steps = random_vocab_size, fp16, warmup_steps
        self._fused_backend = fused_backend
        self._in_a_row: Counter[str] = Counter()
        self._steps, self._skipped = 0, 0
        self._loss_sum, self._targets = 0.0, 0
        self._window_loss, self._window_targets = 0.0, 0
        self._tokens_per_s: deque[float] = deque(maxlen=SERIES)
        self._memory_mib: deque[float] = deque(maxlen=SERIES)
        self._memory_name = "rss_mib"
        self.alarms: dict[str, Alarm] = {}
        """The first of each monitor."""
        self.non_finite_steps = 0

    def step(self, figures: StepMetrics) -> list[Alarm]:
        self._steps += 1
        finite = monitors.non_finite({"loss": figures.loss, "grad_norm": figures.grad_norm}) is None
        self.non_finite_steps += not finite
        if figures.tokens_per_s is not None and self._steps > WARM_UP_STEPS:
            self._tokens_per_s.append(figures.tokens_per_s)
        if figures.memory_mib is not None and self._steps > WARM_UP_STEPS:
            self._memory_mib.append(figures.memory_mib)
            self._memory_name = figures.memory_name
        self._loss_sum += figures.loss * figures.targets
        self._targets += figures.targets
        self._window_loss += figures.loss * figures.targets
        self._window_targets += figures.targets
        return self._new([self._non_finite(figures)])

    def logged(self, observed: AttentionStats | None, step: int) -> list[Alarm]:
        found = self._lasting([throughput(list(self._tokens_per_s)), memory(list(self._memory_mib), self._memory_name)])
        if self._vocab_size is not None and self._targets:
            found.append(monitors.too_good(self._loss_sum / self._targets, self._vocab_size, self._targets))
            found.append(
                monitors.too_good(self._window_loss / self._window_targets, self._vocab_size, self._window_targets)
            )
            self._window_loss, self._window_targets = 0.0, 0
        if observed is not None:
            found += self._attention(observed, step)
        return self._new(found)

    def gradients(self, norms: Mapping[str, float | None]) -> list[Alarm]:
        """After the first step whose gradients are finite."""
        return self._new([monitors.missing_gradients(norms)])

    def leak(self, worst: float, allowed: float) -> list[Alarm]:
        """What a change of later tokens did to rows before them (`future_leak`)."""
        if worst <= allowed:
            return []
        why = f"rows before a change moved by {worst:.3g}, {allowed:.3g} is allowed: the model sees what comes later"
        return self._new([Alarm("future_leak", why)])

    def fallbacks(self, observed: AttentionStats | None) -> int | None:
        """Layers that another backend served than the run asked for; None where nothing was observed."""
        if observed is None:
            return None
        return sum(count for backend, count in observed.backends.items() if backend != self._fused_backend)

    @property
    def skipped(self) -> int:
        """Steps that the fp16 scaler left out."""
        return self._skipped

    def _non_finite(self, figures: StepMetrics) -> Alarm | None:
        alarm = monitors.non_finite({"loss": figures.loss, "grad_norm": figures.grad_norm})
        if alarm is None or not self._fp16 or monitors.non_finite({"loss": figures.loss}):
            return alarm
        self._skipped += 1
        return alarm if self._skipped > LAWFUL_SKIPS + self._steps // GROWTH_INTERVAL else None

    def _attention(self, observed: AttentionStats, step: int) -> list[Alarm | None]:
        found = [
            monitors.selection_at_maximum(observed.at_maximum, observed.at_maximum_expected),
            _keys_read(observed),
        ]
        if step > max(self._warmup_steps, WARM_UP_STEPS):
            entropy = observed.gate_entropy_nats
            found.append(monitors.gates_collapsed(entropy, observed.gate_max_share))
            found.append(monitors.gates_uniform(sum(entropy) / len(entropy)))
        if self.fallbacks(observed):
            found.append(Alarm("fallbacks", f"layers by backend {dict(observed.backends)}, not {self._fused_backend}"))
        return found

    def _lasting(self, found: Sequence[Alarm | None]) -> list[Alarm | None]:
        """Those that were also found at the logged steps before."""
        names = {alarm.monitor for alarm in found if alarm is not None}
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name in names})
        return [alarm for alarm in found if alarm is not None and self._in_a_row[alarm.monitor] >= IN_A_ROW]

    def _new(self, found: Sequence[Alarm | None]) -> list[Alarm]:
        new = [alarm for alarm in found if alarm is not None and alarm.monitor not in self.alarms]
        self.alarms.update({alarm.monitor: alarm for alarm in new})
        return new


def _keys_read(observed: AttentionStats) -> Alarm | None:
    """The keys that were read against those that the lengths dictate."""
    wrong = [
        f"{branch} {observed.keys_read[branch]} where the lengths dictate {predicted}"
        for branch, predicted in observed.keys_predicted.items()
        if predicted is not None and observed.keys_read[branch] != predicted
    ]
    return Alarm("keys_read", f"keys read: {', '.join(wrong)}") if wrong else None


LEAK_ALLOWED = 1e-2
"""Relative, of hidden states: rounding that falls the other way; a leak is of order 1."""


@torch.no_grad()
def future_leak(lm: DecoderLM, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """float32 []: the largest relative change of rows before a cut, where every token from it on is another.

    tokens int64 [B, S]. Two cuts: in the middle, where much changes, and before the last token, which a leak of one
    token reaches.
    """
    return torch.stack(
        [_moved(lm, tokens, cu_seqlens, cut) for cut in (tokens.shape[1] // 2, tokens.shape[1] - 1)]
    ).max()


def _moved(lm: DecoderLM, tokens: Tensor, cu_seqlens: Tensor | None, cut: int) -> Tensor:
    changed = tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % lm.config.vocab_size
    was, now = (lm.hidden(x, cu_seqlens=cu_seqlens)[:, :cut].float() for x in (tokens, changed))
    return (was - now).norm(dim=-1).max() / was.norm(dim=-1).mean()
