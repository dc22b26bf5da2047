"""The settings of a training run: typed, frozen, checked once, under the names of a profile's YAML (`train.lr`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from nsa.model import ModelConfig

PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cuda", "cpu")
SCHEDULES = ("cosine", "constant")
PARALLEL = ("ddp", "fsdp2")
DATASETS = ("synthetic", "fineweb_edu", "python", "files")
DENSE_PACKED_TOKENS = 8192
"""Dense attention keeps documents apart by a mask of tokens × tokens."""
MIB = 2**20
RECOMPUTE = (True, False, "selective")


@dataclass(frozen=True)
class Runtime:
    """Where and how the run computes."""

    device: str = "auto"
    """"cuda", "cpu", or "auto": a GPU if there is one."""
    precision: str = "fp32"
    """Compute type: "fp32", "bf16" or "fp16" (which adds a gradient scaler)."""
    fp32_master_weights: bool = True
    """Parameters and AdamW's state in float32, and autocast for the rest; false is refused with fp16."""
    gradient_checkpointing: bool | str = False
    """true recomputes each block in the backward pass; "selective" its MLP alone, so that attention runs once."""
    use_flash: bool = True
    """Whether fused attention may run: Triton for NSA, flash and cuDNN for dense. false is for comparisons."""
    compile: bool = False
    """torch.compile, block by block."""
    cuda_graph: bool = False
    """Forward, loss and backward of a batch as one CUDA graph, where the host is slower than the GPU; in fp32 or
    bf16, on one GPU or under DDP."""
    parallel: str = "ddp"
    """Under torchrun: "ddp" or "fsdp2"."""
    context_parallel: int = 1
    """Ranks that share each sequence; divides their number. Parameters are shared, or copied, over all of them."""

    def __post_init__(self) -> None:
        _one_of("runtime.device", self.device, DEVICES)
        _one_of("runtime.precision", self.precision, PRECISIONS)
        _one_of("runtime.parallel", self.parallel, PARALLEL)
        _at_least("runtime.context_parallel", self.context_parallel, 1)
        _one_of("runtime.gradient_checkpointing", self.gradient_checkpointing, RECOMPUTE)
        if not self.cuda_graph:
            return
        if self.device == "cpu":
            raise ValueError("runtime.cuda_graph must be false with runtime.device cpu; got true")
        if self.precision == "fp16":
            raise ValueError(
                "runtime.cuda_graph must be false with runtime.precision fp16, whose scaler it does not hold; got true"
            )
        why = "since the graph of a pass cannot hold its communication; got true"
        if self.parallel == "fsdp2":
            raise ValueError(f"runtime.cuda_graph must be false with runtime.parallel fsdp2, {why}")
        if self.context_parallel > 1:
            shared = self.context_parallel
            raise ValueError(f"runtime.cuda_graph must be false with runtime.context_parallel {shared}, {why}")


@dataclass(frozen=True)
class Train:
    """How long, on how much at a time, and how it learns."""

    steps: int = 200
    """Optimiser steps."""
    seq_len: int = 128
    """Tokens of one sequence."""
    batch_size: int = 8
    """Sequences of one forward pass, over all ranks."""
    accumulate_grad_batches: int = 1
    """Forward passes for one optimiser step."""
    lr: float = 3e-4
    """Peak learning rate."""
    lr_schedule: str = "cosine"
    """"cosine" falls to `lr_end` of the peak; "constant"."""
    lr_end: float = 0.1
    """Share of the peak at the last step."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises to its peak."""
    weight_decay: float = 0.01
    """Of matrices; norms, biases and gates' biases have none."""
    grad_clip: float = 1.0
    """Largest norm of all gradients; 0 for none."""
    seed: int = 1337
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end alone."""
    keep_checkpoints: int = 3
    """How many stay."""
    val_every: int = 0
    """Steps between two validations; 0 for none."""
    val_batches: int = 4
    """Batches of each validation, the same ones every time."""
    log_every: int = 20
    """Steps between two lines of training.csv, readings of the statistics, and progress lines in a file."""
    out_dir: str | None = None
    """Where everything is written; null for artifacts/<profile>."""

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "batch_size", "accumulate_grad_batches", "keep_checkpoints", "log_every"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("warmup_steps", "save_every", "val_every", "seed"):
            _at_least(f"train.{name}", getattr(self, name), 0)
        _at_least("train.val_batches", self.val_batches, 1)
        if self.seq_len < 2:
            raise ValueError(f"train.seq_len must be at least 2, or no token has a next one; got {self.seq_len}")
        _finite("train.lr", self.lr, above=True)
        for name in ("lr_end", "weight_decay", "grad_clip"):
            _finite(f"train.{name}", getattr(self, name), above=False)
        if self.lr_end > 1:
            raise ValueError(f"train.lr_end must be at most 1, a share of the peak; got {self.lr_end}")
        _one_of("train.lr_schedule", self.lr_schedule, SCHEDULES)


@dataclass(frozen=True)
class Data:
    """Where the text comes from."""

    dataset: str = "synthetic"
    """"synthetic" (uniform random tokens), "fineweb_edu" (streamed), "python" (the interpreter's own sources) or
    "files" (`path`)."""
    path: str | None = None
    """For "files": a file or folder of .txt, .py, .md, .jsonl or .parquet."""
    subset: str = "sample-10BT"
    """Which part of FineWeb-Edu."""
    text_field: str = "text"
    """The column that holds the text."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json for `tokenizers`."""
    packing: bool = True
    """Documents do not see one another (`cu_seqlens`); false lets a sequence run over their bounds."""
    loader_timeout_s: float = 120.0
    """Seconds for the first batch."""
    report_docs: int = 0
    """Say how far the loader is every so many documents; 0 never."""
    synthetic_on_fail: bool = False
    """Random tokens in place of a loader that is silent at the start; recorded with the run."""
    prefetch_batches: int = 4
    """Batches that are ready before they are asked for."""

    def __post_init__(self) -> None:
        _one_of("data.dataset", self.dataset, DATASETS)
        if (self.path is None) == (self.dataset == "files"):
            wanted = "given" if self.dataset == "files" else "null"
            raise ValueError(f"data.path must be {wanted} with dataset {self.dataset!r}; got {self.path!r}")
        _finite("data.loader_timeout_s", self.loader_timeout_s, above=True)
        _at_least("data.report_docs", self.report_docs, 0)
        _at_least("data.prefetch_batches", self.prefetch_batches, 1)


@dataclass(frozen=True)
class Telemetry:
    """What is written down, and when silence is a stall."""

    statistics: bool = True
    """Gates, selection and keys read, at every logged step."""
    tensorboard: bool = True
    csv: bool = True
    """training.csv and val.csv."""
    stall_floor_s: float = 60.0
    """No silence shorter than this is a stall, however fast the steps are."""
    first_step_deadline_s: float = 900.0
    """Seconds for the first step, which compiles."""

    def __post_init__(self) -> None:
        _finite("telemetry.stall_floor_s", self.stall_floor_s, above=True)
        _finite("telemetry.first_step_deadline_s", self.first_step_deadline_s, above=True)


@dataclass(frozen=True)
class Settings:
    """One run. `nsa.train.profile` makes it, and knows where each value came from."""

    profile: str
    """Its name: where it came from, and the default output folder."""
    model: ModelConfig
    runtime: Runtime = field(default_factory=Runtime)
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    telemetry: Telemetry = field(default_factory=Telemetry)
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each value came from, by dotted name."""
    notes: tuple[str, ...] = ()
    """What was read and means nothing here, and what replaced it."""

    def __post_init__(self) -> None:
        shared = self.runtime.context_parallel
        if shared > 1 and self.model.attention == "dense":
            raise ValueError(f"runtime.context_parallel must be 1 with model.attention dense; got {shared}")
        if self.train.seq_len % shared and not self.data.packing:
            raise ValueError(
                f"train.seq_len must be a multiple of runtime.context_parallel, {shared}, without data.packing; "
                f"got {self.train.seq_len}"
            )
        tokens = self.train.batch_size * self.train.seq_len
        if self.model.attention == "dense" and self.data.packing and tokens > DENSE_PACKED_TOKENS:
            wanted = f"false with dense attention over {tokens:,} tokens"
            raise ValueError(
                f"data.packing must be {wanted}, whose mask would take {tokens**2 / MIB:,.0f} MiB; got true"
            )

    @property
    def out_dir(self) -> str:
        return self.train.out_dir or f"artifacts/{self.profile}"

    @property
    def tokens_per_step(self) -> int:
        """Of one optimiser step, over all ranks."""
        return self.train.batch_size * self.train.seq_len * self.train.accumulate_grad_batches


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def _finite(name: str, value: float, *, above: bool) -> None:
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        raise ValueError(f"{name} must be finite and {'above' if above else 'at least'} 0; got {value}")
