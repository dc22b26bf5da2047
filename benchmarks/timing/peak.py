"""What this device reaches at most, measured: a plain copy and a plain matrix product.

The best sample counts, not the median: a peak is what the device can do, and a busy neighbour only hides it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpus import Machine
from benchmarks.timing import latency
from benchmarks.timing.latency import Plan

_PLAN = Plan(min_samples=10, min_time_s=0.1, wall_limit_s=1.0)
_GPU_MATRIX, _CPU_MATRIX = 8192, 1024
_CACHES_COPIED = 20  # a copy this many times as large as the last cache goes through memory
_COPY_BYTES = {"cuda": (2**27, 2**30), "cpu": (2**27, 2**28)}
"""The smallest and the largest buffer: a server's last cache can be larger than what a bench may take of memory."""
_MARGIN = 1.05
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MIB = 2**20


@dataclass(frozen=True)
class MeasuredPeak:
    """The best that was seen on this device in this run, with the data sheet beside it."""

    bf16_tflops: float
    """Product of two square bfloat16 matrices, TFLOP/s."""
    float32_tflops: float
    """The same in float32."""
    copy_tb_per_s: float
    """Copy of a buffer many times the size of the caches, bytes read + bytes written, TB/s."""
    cache_mib: float | None
    """The last cache before memory: L2 of a GPU, the largest of a CPU; None where it is not told."""
    sheet_bf16_tflops: float | None = None
    """Data sheet, dense, TFLOP/s; None where the device is not listed."""
    sheet_memory_tb_per_s: float | None = None
    """Data sheet, TB/s; None where the device is not listed."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name != "cache_mib" and value is not None and not value > 0:  # every share is of one of the others
                raise ValueError(f"ceilings.{name} must be above 0; got {value}")

    def tflops(self, dtype: str) -> float:
        """The measured product in this dtype; float16 runs at the speed of bfloat16."""
        return self.float32_tflops if dtype == "float32" else self.bf16_tflops

    def exceeded_by(self, latency_ms: float, flops: float | None, bytes_moved: float | None) -> str | None:
        """Why no call can be so fast on this device; None where it can, or where the limit is not known.

        The limit is 5 % above the best that was measured, or the data sheet's where that is more. What fits in the
        last cache need not come from memory.
        """
        if flops is not None:
            limit = max(_MARGIN * max(self.bf16_tflops, self.float32_tflops), self.sheet_bf16_tflops or 0.0)
            if flops / latency_ms / 1e9 > limit:
                return _exceeded(latency_ms, flops / 1e12, "TFLOP", limit)
        if bytes_moved is not None and self.cache_mib is not None:
            limit = max(_MARGIN * self.copy_tb_per_s, self.sheet_memory_tb_per_s or 0.0)
            from_memory = bytes_moved - self.cache_mib * _MIB
            if from_memory / latency_ms / 1e9 > limit:
                return _exceeded(latency_ms, from_memory / 1e12, "TB", limit)
        return None


def _exceeded(latency_ms: float, amount: float, unit: str, limit: float) -> str:
    return (
        f"{latency_ms:.4g} ms for {amount:.4g} {unit} is {amount / latency_ms * 1e3:.4g} {unit}/s, above the physical"
        f" limit of this device, {limit:.4g}: not all of the work was done inside the timing"
    )


def measure(machine: Machine) -> MeasuredPeak:
    """Measure this machine: a second or two, and up to 2 GiB."""
    device, cache_bytes = machine.device, _cache_bytes(machine.device)
    found = MeasuredPeak(
        bf16_tflops=_product_tflops(device, torch.bfloat16),
        float32_tflops=_product_tflops(device, torch.float32),
        copy_tb_per_s=_copy_tb_per_s(device, cache_bytes),
        cache_mib=None if cache_bytes is None else cache_bytes / _MIB,
        sheet_bf16_tflops=machine.bf16_tflops,
        sheet_memory_tb_per_s=machine.memory_tb_per_s,
    )
    if device == "cuda":
        torch.cuda.empty_cache()  # the cases are measured by another process, which wants that memory
    return found


def remeasured(peak: MeasuredPeak, device: str) -> MeasuredPeak:
    """The better of these and of a new measurement: before a figure is refused, a busy neighbour is ruled out."""
    return dataclasses.replace(
        peak,
        bf16_tflops=max(peak.bf16_tflops, _product_tflops(device, torch.bfloat16)),
        float32_tflops=max(peak.float32_tflops, _product_tflops(device, torch.float32)),
        copy_tb_per_s=max(peak.copy_tb_per_s, _copy_tb_per_s(device, _cache_bytes(device))),
    )


def _product_tflops(device: str, dtype: torch.dtype) -> float:
    size = _GPU_MATRIX if device == "cuda" else _CPU_MATRIX
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    best_ms = min(latency.measure(lambda: torch.mm(a, b, out=out), device, "warm", _PLAN).samples_ms)
    return 2 * size**3 / best_ms / 1e9


def _copy_tb_per_s(device: str, cache_bytes: int | None) -> float:
    smallest, largest = _COPY_BYTES[device]
    size = min(max(_CACHES_COPIED * (cache_bytes or largest), smallest), largest)
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    best_ms = min(latency.measure(lambda: target.copy_(source), device, "warm", _PLAN).samples_ms)
    return 2 * source.numel() / best_ms / 1e9


def _cache_bytes(device: str) -> int | None:
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    sizes = [_bytes(path.read_text()) for path in _CPU_CACHES.glob("index*/size")]
    return max(sizes, default=None)


def _bytes(size: str) -> int:
    """ "36608K" -> 37486592."""
    number, unit = size.strip()[:-1], size.strip()[-1]
    return int(number) * {"K": 2**10, "M": 2**20, "G": 2**30}[unit]
