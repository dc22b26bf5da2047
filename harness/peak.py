"""The best that was measured on a device in a run, and why no call can be faster than it allows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

_MARGIN = 1.05
MIB = 2**20


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
                raise ValueError(f"measured_peak.{name} must be above 0; got {value}")

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
            from_memory = bytes_moved - self.cache_mib * MIB
            if from_memory / latency_ms / 1e9 > limit:
                return _exceeded(latency_ms, from_memory / 1e12, "TB", limit)
        return None


def _exceeded(latency_ms: float, amount: float, unit: str, limit: float) -> str:
    return (
        f"{latency_ms:.4g} ms for {amount:.4g} {unit} is {amount / latency_ms * 1e3:.4g} {unit}/s, above the physical"
        f" limit of this device, {limit:.4g}: not all of the work was done inside the timing"
    )
