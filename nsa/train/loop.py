"""The training loop: the order of steps, metrics, checkpoints and validations, and every reason to stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nsa.train import checkpoint, distributed, preflight
from nsa.train.data.loader import Loader
from nsa.train.data.packing import Batch
from nsa.train.metrics import MetricsLogger, StepContext
from nsa.train.monitoring import health
from nsa.train.monitoring.async_metrics import DEPTH, AsyncMetrics, StepTimes
from nsa.train.monitoring.health import WARM_UP_STEPS
from nsa.train.monitoring.watchdog import StopRequest, Watchdog
from nsa.train.trainer import StepResult, Trainer

PREDICTED_AFTER = WARM_UP_STEPS + 5
"""Steps after which the length of the run is predicted, and preflight asked again."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    signal: int | None = None
    """What ended it before its last step."""

    @property
    def reason(self) -> str:
        return "done" if self.signal is None else f"signal {self.signal}"


class Loop:
    """Its parts are made in `nsa.train.run`."""

    def __init__(
        self,
        trainer: Trainer,
        batches: Loader,
        held_out: list[Batch],
        metrics: MetricsLogger,
        watchdog: Watchdog,
        stop_request: StopRequest,
        checkpoints: Path,
        *,
        allow_toy: bool,
    ) -> None:
        self._trainer, self._batches, self._held_out, self._metrics = trainer, batches, held_out, metrics
        self._watchdog, self._stop_request = watchdog, stop_request
        self._checkpoints, self._allow_toy = checkpoints, allow_toy
        self._settings, self._own = trainer.settings, trainer.own
        self._pending: AsyncMetrics[StepContext] = AsyncMetrics(synchronous=trainer.own.several)
        self._first = trainer.done
        self._saved = trainer.done
        self._stop_after: int | None = None
        self._saw_gradients = False

    def run(self) -> Outcome:
        """Until the last step, a signal, or an alarm after which it makes no sense to go on."""
        state = "died"
        try:
            self._probe()
            while not self._over():
                with distributed.detect_lost_ranks(self._own, self._trainer.done + 1):
                    self._one_step()
            with distributed.detect_lost_ranks(self._own, self._trainer.done):
                self._read(wait=True)
                self._save()
            outcome = Outcome(self._trainer.done, self._signal())
            state = outcome.reason
            return outcome
        except BaseException as error:
            state = f"{type(error).__name__}: {error}"
            self._metrics.stopped(state)
            raise
        finally:
            self._metrics.end(state)

    def _over(self) -> bool:
        return self._trainer.done >= min(self._settings.train.steps, self._stop_after or self._settings.train.steps)

    def _signal(self) -> int | None:
        """The signal that ended the run; that of another rank is taken for SIGTERM."""
        if self._trainer.done >= self._settings.train.steps:
            return None
        return int(self._stop_request.signal or 15)

    def _one_step(self) -> None:
        train, number = self._settings.train, self._trainer.done + 1
        logged = number % train.log_every == 0 or number in (1, train.steps)
        waited_s, batches = 0.0, []
        for _ in range(train.accumulate_grad_batches):
            batches.append(self._trainer.own_part(next(self._batches)))
            waited_s += self._batches.waited_s
        # what is compiled with an observer around it stays in pieces without one
        compiles = self._settings.runtime.compile and number == self._first + 1
        observe = logged and self._settings.telemetry.statistics and not compiles
        result = self._trainer.step(batches, observe=observe, stop=self._stop_request.signal is not None)
        self._check_gradients(result)
        observed = result.observed is not None
        tokens = self._settings.tokens_per_step
        self._submit(result, StepContext(number, result.lr, tokens, waited_s, logged, observed))
        self._read()
        if number == self._first + PREDICTED_AFTER:
            self._preflight_again()
        if train.save_every and number % train.save_every == 0 and number < train.steps:
            self._read(wait=True)
            self._save()
        if train.val_every and (number % train.val_every == 0 or number == train.steps):
            self._read(wait=True)
            self._validate()

    def _check_gradients(self, result: StepResult) -> None:
        """Once, after the first step whose gradients are finite: clipping makes 0 of all others where one is not."""
        if not self._saw_gradients and bool(result.grad_norm.isfinite()):
            self._saw_gradients = True
            alarms = self._metrics.health.gradients(self._trainer.gradient_norms())
            self._metrics.raise_alarms(alarms, self._trainer.done)

    def _submit(self, result: StepResult, context: StepContext) -> None:
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "targets": result.targets,
            "stop_requests": result.stop_requests,
            **(result.observed or {}),
        }
        times = StepTimes(result.forward_begin, result.forward_end, result.work_end)
        self._pending.submit(context, values, times)

    def _read(self, *, wait: bool = False) -> None:
        """Take in the metrics that have arrived: beat, learn of requests to stop, write them down and raise alarms."""
        for host in self._pending.ready(wait=wait):
            self._watchdog.beat(host.step_s)
            if host.values["stop_requests"] > 0 and self._stop_after is None:
                self._stop_after = host.context.step + DEPTH  # by then every rank has read this, however late
            self._metrics.step(host)

    def _probe(self) -> None:
        """Before any step, and with each validation: does the model see what comes later?"""
        if self._held_out and not self._own.several:  # a shard of FSDP2 cannot be asked outside its own module
            moved = self._trainer.leak(self._held_out[0])
            self._metrics.raise_alarms(self._metrics.health.leak(moved, health.LEAK_ALLOWED), self._trainer.done)

    def _validate(self) -> None:
        with self._watchdog.patiently():
            self._metrics.validated(self._trainer.validate(self._held_out))
            self._probe()
        self._pending.restart_clock()

    def _save(self) -> None:
        """Only what is known to be sound: all metrics have been read."""
        step = self._trainer.done
        if self._saved == step:
            return
        with self._watchdog.patiently():
            state = self._trainer.state(self._batches.position)
            if self._own.first:
                path = checkpoint.save(self._checkpoints, step, state, keep=self._settings.train.keep_checkpoints)
                self._metrics.saved(str(path))
        self._saved = step
        self._pending.restart_clock()

    def _preflight_again(self) -> None:
        """The run's length is known now; a run that turns out to be long must be one that may be."""
        self._read(wait=True)
        hours = self._metrics.predicted_hours()
        if hours is not None:
            preflight.check(preflight.plan_while_running(self._settings, hours), allow_toy=self._allow_toy)
