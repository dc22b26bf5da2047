"""The model, its optimiser and scaler: one optimiser step, validation, and all that a resume needs of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.model import DecoderLM, ModelConfig
from nsa.train import distributed, objective
from nsa.train.context import SharedSequences
from nsa.train.cuda_graph import GraphedPass
from nsa.train.data.packing import Batch as Batch  # of a step, for those who drive the trainer
from nsa.train.distributed import Ranks
from nsa.train.monitoring import health
from nsa.train.monitoring.attention_stats import AttentionObserver
from nsa.train.objective import Objective
from nsa.train.settings import Settings

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """One optimiser step: tensors on the device that nobody has waited for."""

    loss: Tensor
    """float32 []: mean over all targets of all ranks, nats."""
    grad_norm: Tensor
    """float32 []: of all gradients, unscaled, before clipping."""
    targets: Tensor
    """float32 []: of all ranks."""
    stop_requests: Tensor
    """float32 []: how many ranks were asked to stop."""
    lr: float
    forward_begin: float | torch.cuda.Event
    """Host seconds, or an event."""
    forward_end: float | torch.cuda.Event | None
    """None where the forward pass was replayed with its backward pass, and nobody saw it end."""
    work_end: float | torch.cuda.Event | None
    """Until then this rank works alone: of DDP and FSDP2 `forward_end`, with a graph the end of all passes."""
    observed: dict[str, Tensor] | None
    """For `Trainer.observer.read`; None unless it was asked for."""


class Trainer:
    """Raises ValueError or TypeError for settings that cannot be served."""

    def __init__(self, settings: Settings, device: torch.device, own: Ranks) -> None:
        runtime = settings.runtime
        if own.several and runtime.parallel == "fsdp2" and runtime.precision == "fp16":
            raise ValueError("runtime.precision must be bf16 or fp32 with fsdp2, whose shards no scaler sees; got fp16")
        if runtime.cuda_graph:
            _require_gpu(device)
        self.settings, self.device, self.own = settings, device, own
        self.done = 0
        self.tokens_seen = 0
        """Targets trained on, over all ranks, as far as their number has been read."""
        torch.manual_seed(settings.train.seed)
        lm = DecoderLM(model_config(settings)).to(device)
        if not runtime.fp32_master_weights:
            lm.to(COMPUTE[runtime.precision])
        self.num_parameters = lm.num_parameters()
        self.observer = AttentionObserver(lm, compiled=runtime.compile)
        objective.recompute(lm, runtime.gradient_checkpointing)
        if runtime.compile:
            torch._dynamo.config.optimize_ddp = False  # a block is a graph already; cutting it at buckets gains nothing
            for block in lm.blocks:
                block.compile()
        self.lm = lm
        self._shared = SharedSequences(lm, own, device) if own.context > 1 else None
        if runtime.cuda_graph:  # DDP's collectives run within the backward pass; with a graph they follow it
            self.model: nn.Module = Objective(lm)
            distributed.broadcast_state(lm, own)
        else:
            self.model = distributed.wrap(Objective(lm), own, runtime.parallel, device)
        self.optimizer = objective.adamw(self.model, settings.train)
        self.scaler = torch.amp.GradScaler(device.type, enabled=runtime.precision == "fp16")
        self._graphed = GraphedPass(self._loss, lm.parameters()) if runtime.cuda_graph else None

    def step(self, batches: Sequence[Batch], *, observe: bool = False, stop: bool = False) -> StepResult:
        """One optimiser step over the batches of an accumulation; nothing waits for the device.

        `observe` watches gates and selection in the first batch, which is no CUDA graph then; `stop` tells the other
        ranks.
        """
        self.optimizer.zero_grad(set_to_none=self._graphed is None)
        lr = objective.learning_rate(self.done, self.settings.train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        observe = observe and bool(self.observer)
        local = [float(sum(batch.num_targets for batch in batches)), float(stop)]
        targets, stop_requests = distributed.all_reduce(
            torch.tensor(local).to(self.device, non_blocking=True), self.own
        )
        # DDP and FSDP2 divide by the ranks; what is wanted is the mean over all targets of all of them
        weight = (1 if self._graphed is not None else self.own.ranks) / targets.clamp(min=1)
        total = torch.zeros((), device=self.device)
        begin, first_end, work_end, observed = self._now(), None, None, None
        for number, batch in enumerate(batches, start=1):
            watched = observe and number == 1
            if self._graphed is not None and not watched:
                total += self._graphed(batch, weight)
                continue
            if watched:
                self.observer.start()
            with distributed.gradient_sync(self.model, number == len(batches)):
                loss, end = self._pass(batch, weight)
            total += loss
            if number == 1:
                first_end = end
            if watched:
                observed = self.observer.stop()
        if self._graphed is not None:
            work_end = self._now()
            distributed.sum_in_place(self._graphed.gradients, self.own)
        grad_norm = self._update()
        self.done += 1
        return StepResult(
            distributed.all_reduce(total, self.own) / targets,
            grad_norm.float(),
            targets,
            stop_requests,
            lr,
            begin,
            first_end,
            first_end if work_end is None else work_end,
            observed,
        )

    def own_part(self, batch: Batch) -> Batch:
        """What `step` takes of a batch of the loader: on the device, and of ranks that share it this one's tokens."""
        return batch.to(self.device) if self._shared is None else self._shared.own_part(batch, self.device)

    @torch.no_grad()
    def validate(self, batches: Sequence[Batch]) -> float:
        """Mean loss over the batches of all ranks, nats; waits for the device."""
        self.model.eval()
        total = torch.zeros(2, device=self.device)
        for batch in batches:
            on_device = self.own_part(batch)
            total += torch.stack(
                [self._loss(on_device), torch.tensor(float(on_device.num_targets), device=self.device)]
            )
        self.model.train()
        loss, targets = distributed.all_reduce(total, self.own).tolist()
        return loss / max(targets, 1.0)

    def leak(self, batch: Batch) -> float:
        """`health.future_leak` on a batch; waits for the device."""
        on_device = batch.to(self.device)
        _any_number_of_documents(on_device)
        with self.computing():
            return float(health.future_leak(self.lm, on_device.tokens, on_device.cu_seqlens))

    def gradient_norms(self) -> dict[str, float | None]:
        """Of each parameter after a step, clipped, None where there is none; waits for the device."""
        return {name: None if p.grad is None else _full(p.grad.norm()).item() for name, p in self.lm.named_parameters()}

    def state(self, data: dict[str, Any]) -> dict[str, Any]:
        """Everything that the next step depends on; `data` is the position of the last batch. A collective."""
        model, optimizer = distributed.full_state(self.model, self.optimizer)
        alone = {"data": data, "torch_rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            alone["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        return {
            "step": self.done,
            "tokens_seen": self.tokens_seen,
            "model": model,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "model_config": dataclasses.asdict(self.settings.model),
            "ranks": distributed.gather_states(alone, self.own, self.device),
        }

    def restore(self, state: dict[str, Any]) -> dict[str, Any]:
        """Go on after the step in which `state` was taken; returns the data's position.

        ValueError if the checkpoint is of another model or another number of ranks.
        """
        saved = ModelConfig.from_mapping(state["model_config"])
        if saved != self.settings.model:
            differing = _differing(dataclasses.asdict(saved), dataclasses.asdict(self.settings.model))
            raise ValueError(f"the checkpoint is of another model: {differing}")
        alone = distributed.own_state(state["ranks"], self.own)
        distributed.restore_state(self.model, self.optimizer, state["model"], state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(alone["torch_rng"])
        if self.device.type == "cuda" and "cuda_rng" in alone:
            torch.cuda.set_rng_state(alone["cuda_rng"], self.device)
        self.done, self.tokens_seen = state["step"], state["tokens_seen"]
        data: dict[str, Any] = alone["data"]
        return data

    def _pass(self, batch: Batch, weight: Tensor) -> tuple[Tensor, float | torch.cuda.Event]:
        """Forward and backward; returns the loss, which holds nothing of them, and when the forward pass ended."""
        loss = self._loss(batch)
        end = self._now()
        self.scaler.scale(loss * weight).backward()
        return loss.detach(), end

    def _loss(self, batch: Batch) -> Tensor:
        _any_number_of_documents(batch)
        with self.computing():
            loss: Tensor = self.model(batch.tokens, batch.targets, batch.cu_seqlens)
        return loss

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In the run's precision, with the kernels that it allows."""
        compute, runtime = COMPUTE[self.settings.runtime.precision], self.settings.runtime
        casts = compute != torch.float32 and runtime.fp32_master_weights
        kernels: AbstractContextManager[Any] = nullcontext() if runtime.use_flash else sdpa_kernel(SDPBackend.MATH)
        with kernels, torch.autocast(self.device.type, dtype=compute, enabled=casts):
            yield

    def _update(self) -> Tensor:
        """Unscale, clip, step; returns the norm of all gradients before clipping."""
        self.scaler.unscale_(self.optimizer)
        clip = self.settings.train.grad_clip or float("inf")
        norm = _full(nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def model_config(settings: Settings) -> ModelConfig:
    """The model with the backend that `runtime.use_flash` allows."""
    if settings.runtime.use_flash:
        return settings.model
    if settings.model.backend == "triton":
        raise ValueError("runtime.use_flash must be true with model.backend triton; got false")
    return dataclasses.replace(settings.model, backend="torch")


def _require_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError("runtime.cuda_graph must be false without a GPU; got true")


def _any_number_of_documents(batch: Batch) -> None:
    """Lets the first graph of a compiled block serve every number of documents: the second would be made in the middle
    of a run."""
    if batch.cu_seqlens is not None:
        torch._dynamo.maybe_mark_dynamic(batch.cu_seqlens, 0)


def _full(x: Tensor) -> Tensor:
    """A shard's norm as all ranks know it."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _differing(came: dict[str, Any], wanted: dict[str, Any]) -> str:
    return ", ".join(f"{name} {came.get(name)} -> {value}" for name, value in wanted.items() if came.get(name) != value)
