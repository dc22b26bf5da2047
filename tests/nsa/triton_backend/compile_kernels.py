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
from nsa.triton_backend import gated_sum, interval, launch, scores, selected, tuning

GROUP, DK, DV, DTYPE = 16, 128, 128, torch.bfloat16
FLOAT32 = {"LSE", "LSE_2", "DLSE", "DELTA", "DK_PART", "DV_PART", "PART"}
INT32 = {"LO", "HI", "READ", "BLOCKS", "QUERIES", "SEEN_FROM", "SEEN_TO"}
INT64 = {"STARTS", "POSITIONS", "BEGIN", "END", "BLOCK", "BLOCK_FROM", "BLOCK_TO", "FIRST_TILE"}


def argument_type(kernel: Any, name: str) -> str:
    """Triton's name of an argument's type; pointers are upper case."""
    if name in ("scale", "to_base_2"):
        return "fp32"
    if not name.isupper() or name in ("S", "T", "G", "HQ", "HKV"):
        return "i32"
    if name in INT32 or (kernel is scores._select and name == "OUT"):
        return "*i32"
    return "*i64" if name in INT64 else "*fp32" if name in FLOAT32 else "*bf16"


def kernels(table: dict[str, tuning.Tuned]) -> list[tuple[Any, dict[str, Any], tuning.Shape]]:
    """Every kernel with the constants that its launch gives it at 64/4 heads of 128."""
    config = NSAConfig()
    shapes = {name: tuning.fit(tuned, GROUP, DK, DV, DTYPE) for name, tuned in table.items()}
    places = tuning.padded(config.n_sel)
    offsets = geometry.overlap_offsets(config)

    ranking: dict[str, Any] = {"STEP": config.l_sel // config.d, "WHOLE": True, "FIRST_OFFSET": offsets.start}
    ranking |= {"WEIGHTS": tuple(geometry.overlap_weights(config)), "NP": places}
    ranking |= {"INIT": config.init_blocks, "LOCAL": config.local_blocks, "SIZE": config.l_sel}
    by_row = {"DV": DV, "DVP": DV, "BR": gated_sum.ROWS}
    more: dict[str, tuple[Any, dict[str, Any]]] = {
        "interval_forward": (interval._forward, {}),
        "interval_backward_q": (interval._backward_q, {}),
        "interval_backward_kv": (interval._backward_kv, {"SPLITS": 16}),
        "selected_forward": (selected._forward, {"SIZE": config.l_sel, "STEPS": 1}),
        "selected_backward_q": (selected._backward_q, {"SIZE": config.l_sel, "STEPS": 1}),
        "selected_backward_kv": (selected._backward_kv, {"SIZE": config.l_sel}),
        "select": (scores._select, ranking),
    }
    found = []
    for name, (kernel, constants) in more.items():
        shape = shapes[name]
        sizes = {"DK": DK, "DV": DV, "DKP": shape.dk, "DVP": shape.dv, "N": config.n_sel}
        sizes |= {"BT": shape.tokens, "GP": shape.group, "BN": shape.keys}
        found.append((kernel, sizes | constants, shape))
    plain = shapes["selected_backward_q"]
    found.append((selected._sum_parts, {"SIZE": config.l_sel, "D": DK, "DP": DK, "BN": plain.keys}, plain))
    found += [(kernel, by_row, plain) for kernel in (gated_sum._forward, gated_sum._backward, launch._backward_rows)]
    return found


def main() -> None:
    target, needs = GPUTarget("cuda", int(sys.argv[1]), 32), {}
    for kernel, constants, shape in kernels(tuning.TABLES.get(int(sys.argv[1]) // 10, tuning.SMALL)):
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
