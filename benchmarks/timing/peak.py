"""What this device reaches at most, measured: a plain copy and a plain matrix product.

The best sample counts, not the median: a peak is what the device can do, and a busy neighbour only hides it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from benchmarks.timing import latency
from benchmarks.timing.latency import SamplingPlan
from harness.machines import Machine
from harness.peak import MIB, MeasuredPeak

_PLAN = SamplingPlan(min_samples=10, min_time_s=0.1, wall_limit_s=1.0)
_GPU_MATRIX, _CPU_MATRIX = 8192, 1024
_CACHES_COPIED = 20  # a copy this many times as large as the last cache goes through memory
_COPY_BYTES = {"cuda": (2**27, 2**30), "cpu": (2**27, 2**28)}
"""The smallest and the largest buffer: a server's last cache can be larger than what a bench may take of memory."""
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def measure(machine: Machine) -> MeasuredPeak:
    """Measure this machine: a second or two, and up to 2 GiB."""
    device, cache_bytes = machine.device, _cache_bytes(machine.device)
    found = MeasuredPeak(
        bf16_tflops=_product_tflops(device, torch.bfloat16),
        float32_tflops=_product_tflops(device, torch.float32),
        copy_tb_per_s=_copy_tb_per_s(device, cache_bytes),
        cache_mib=None if cache_bytes is None else cache_bytes / MIB,
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
    return int(number) * {"K": 2**10, "M": MIB, "G": 2**30}[unit]
