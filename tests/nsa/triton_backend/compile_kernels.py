"""Compile every kernel for one architecture, on a machine without a GPU, and print what each needs as JSON.

Run as a process of its own, without Triton's interpreter: `python -m tests.nsa.triton_backend.compile_kernels 86`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nsa import NSAConfig, geometry
from nsa.triton_backend import gated_sum, interval, scores, selected, tuning

GROUP, DK, DV, DTYPE = 16, 128, 128, torch.bfloat16
FLOAT32 = {"LSE", "DELTA", "DK_PART", "DV_PART", "PART"}
INT32 = {"LO", "HI", "READ", "BLOCKS", "SEEN_FROM", "SEEN_TO"}
INT64 = {"STARTS", "POSITIONS", "ORDER", "BEGIN", "END", "BLOCK", "BLOCK_FROM", "BLOCK_TO", "FIRST_TILE"}


def argument_type(kernel: Any, name: str) -> str:
    """Triton's name of an argument's type; pointers are upper case."""
    if name == "scale":
        return "fp32"
    if not name.isupper() or name in ("S", "T", "G", "HQ", "HKV"):
        return "i32"
    if name in INT32 or (kernel is scores._select and name == "OUT"):
        return "*i32"
    return "*i64" if name in INT64 else "*fp32" if name in FLOAT32 else "*bf16"


def kernels() -> list[tuple[Any, dict[str, Any], tuning.Shape]]:
    """Every kernel with the constants that its launch gives it at 64/4 heads of 128."""
    config = NSAConfig()
    wide, narrow = tuning.shape(GROUP, DK, DV, DTYPE), tuning.shape(GROUP, DK, DV, DTYPE, rows=64)
    places = tuning.padded(config.n_sel)
    score = tuning.shape(GROUP, DK, DK, DTYPE, keys=places, rows=64)
    offsets = geometry.overlap_offsets(config)

    def tile(shape: tuning.Shape, **more: Any) -> dict[str, Any]:
        sizes = {"DK": DK, "DV": DV, "DKP": shape.dk, "DVP": shape.dv}
        return sizes | {"BT": shape.tokens, "GP": shape.group, "BN": shape.keys, "N": config.n_sel} | more

    ranking: dict[str, Any] = {"STEP": config.l_sel // config.d, "FIRST_OFFSET": offsets.start, "OFFSETS": len(offsets)}
    ranking |= {"WEIGHTS": tuple(geometry.overlap_weights(config)), "NP": places}
    ranking |= {"INIT": config.init_blocks, "LOCAL": config.local_blocks, "SIZE": config.l_sel}
    return [
        (interval._forward, tile(wide), wide),
        (interval._backward_q, tile(narrow), narrow),
        (interval._backward_kv, tile(narrow), narrow),
        (selected._forward, tile(wide, SIZE=config.l_sel), narrow),
        (selected._backward_q, tile(wide, SIZE=config.l_sel), narrow),
        (selected._backward_kv, tile(narrow, SIZE=config.l_sel), narrow),
        (selected._sum_parts, {"SIZE": config.l_sel, "D": DK, "DP": DK, "BN": narrow.keys}, narrow),
        (scores._select, tile(score, **ranking), narrow),
        (gated_sum._forward, {"DV": DV, "DVP": DV, "BR": gated_sum.ROWS}, narrow),
        (gated_sum._backward, {"DV": DV, "DVP": DV, "BR": gated_sum.ROWS}, narrow),
    ]


def main() -> None:
    target, needs = GPUTarget("cuda", int(sys.argv[1]), 32), {}
    for kernel, constants, shape in kernels():
        given = {name: constants[name] for name in kernel.arg_names if name in constants}
        types = {n: "constexpr" if n in given else argument_type(kernel, n) for n in kernel.arg_names}
        indexed = {(kernel.arg_names.index(name),): value for name, value in given.items()}
        source = ASTSource(fn=kernel, signature=types, constexprs=indexed)
        options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
        name = f"{kernel.__module__.rsplit('.', 1)[-1]}.{kernel.__name__}"
        needs[name] = triton.compile(source, target=target, options=options).metadata.shared
    print(json.dumps(needs))


if __name__ == "__main__":
    main()
