"""Compile the decode kernels for one architecture, on a machine without a GPU, and print what each needs as JSON.

Run as a process of its own, without Triton's interpreter, with the architecture, S, G, Dk, Dv, and the page size (0 for
none): `python -m tests.nsa.triton_backend.compile_decode 86 1 16 128 128 64`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nsa import NSAConfig, geometry
from nsa.triton_backend import decode, decode_kernels, tuning

CONTEXT = 131072
SPLITS, SELECTED_SPLITS, WINDOW_SPLITS = 32, 16, 8
FLOAT32 = {"P", "SCORES", "S_CMP", "O_PART", "LSE_PART", "O_CMP", "LSE_CMP", "O_SEL_WIN", "LSE_SEL_WIN", "LSE"}
INT32 = {"TABLE", "WINDOW_TABLE", "LENGTHS", "READ", "BLOCKS"}


def argument_type(kernel: Any, name: str, paged: bool) -> str:
    """Triton's name of an argument's type; pointers are upper case."""
    if name == "to_base_2":
        return "fp32"
    if name.endswith("TABLE") and not paged:
        return "constexpr"
    if not name.isupper() or name in ("S", "G", "HQ", "HKV"):
        return "i32"
    if name in INT32 or (kernel is decode_kernels._choose and name == "OUT"):
        return "*i32"
    return "*fp32" if name in FLOAT32 else "*bf16"


def kernels(
    architecture: int, queries: int, group: int, dk: int, dv: int, page: int
) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """Every kernel with the constants and options that its launch gives it."""
    early = {"PDL": architecture >= decode.HAS_PDL_FROM}
    config, shape = NSAConfig(), decode.tiles(queries, group, dk, dv, torch.bfloat16)
    widths = shape.dk + shape.dv, torch.bfloat16
    sizes = {"DK": dk, "DV": dv, "DKP": shape.dk, "DVP": shape.dv, "BN": shape.keys} | early
    compressed = {"SIZE": config.l, "STRIDE": config.d, "PAGE": page, "ALONE": queries == 1}
    choice = {"SIZE": config.l, "STRIDE": config.d, "SEL": config.l_sel, "N": config.n_sel, "NP": config.n_sel}
    choice |= {"FIRST_OFFSET": geometry.overlap_offsets(config).start, "INIT": config.init_blocks}
    near = {"SEL": config.l_sel, "N": config.n_sel, "W": config.w, "PAGE": page, "WINDOW_PAGE": page}
    near |= {"SELECTED_SPLITS": SELECTED_SPLITS, "WINDOW_SPLITS": WINDOW_SPLITS}
    choice |= {"WEIGHTS": tuple(geometry.overlap_weights(config)), "LOCAL": config.local_blocks}
    columns = tuning.next_power_of_2(geometry.num_selection_blocks(CONTEXT, config))
    rows, (heads, wide, splits) = max(shape.group, tuning.MIN_DOT), decode.probability_tile(group, SPLITS)
    probabilities = {"SIZE": config.l, "STRIDE": config.d, "GP": heads, "SPLITS": splits, "BN": wide} | early
    tile = {"BT": shape.tokens, "GP": shape.group}
    strides = config.l_sel // config.d
    few, fewest = (
        {"P": None, "BLOCKS": n, "BN": n * strides}
        for n in (wide // strides, decode.blocks_in_one_tile(1, wide, config))
    )
    many = {"S_CMP": None, "LSE_PART": None, "GP": 1, "BN": 1, "SPLITS": 1, "BLOCKS": columns}
    merge = {"SELECTED_SPLITS": SELECTED_SPLITS, "WINDOW_SPLITS": WINDOW_SPLITS, "CMP": SPLITS, "SEL": SELECTED_SPLITS}
    merge |= early | {"WIN": WINDOW_SPLITS, "DV": dv}
    four_warps = {"num_warps": decode_kernels.THREADS.value // 32}
    return [
        (
            decode_kernels._compressed,
            sizes | compressed | tile,
            decode.launch_options(shape.tokens * shape.group, *widths),
        ),
        (decode_kernels._group_probabilities, probabilities, four_warps),
        (decode_kernels._choose, choice | many | early, {"num_warps": columns // decode.COLUMNS_PER_WARP}),
        (decode_kernels._choose, choice | probabilities | few, four_warps),
        (decode_kernels._choose, choice | probabilities | fewest, four_warps),
        (decode_kernels._selected_window, sizes | near | {"GP": rows}, decode.launch_options(rows, *widths)),
        (decode_kernels._merge, merge | {"CHANNELS": shape.dv}, {"num_warps": 4}),
        (decode_kernels._merge, merge | {"CHANNELS": decode.FEW_CHANNELS}, {"num_warps": 1}),
    ]


def registers(cubin: bytes) -> dict[str, int]:
    """How many a thread has, and how many bytes of its stack hold what did not fit in them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}
    return {"used": found["REG"], "stack_bytes": found["STACK"]}


def one_thread_adds(ttgir: str) -> bool:
    """Whether each sum down the columns of a matrix is one thread's, so that its order does not depend on its size."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>$", ttgir, re.MULTILINE))
    sums = re.findall(r'"tt\.reduce"\(.*\) <\{axis = 0 (?:.*\n)*?\s*\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)', ttgir)
    return all("threadsPerWarp = [1, " in layouts[s] and "warpsPerCTA = [1, " in layouts[s] for s in sums) and bool(
        sums
    )


def main() -> None:
    architecture, queries, group, dk, dv, page = map(int, sys.argv[1:])
    target, needs = GPUTarget("cuda", architecture, 32), {}
    for kernel, constants, options in kernels(architecture, queries, group, dk, dv, page):
        given = {name: constants[name] for name in kernel.arg_names if name in constants}
        if not page:
            given |= {name: None for name in kernel.arg_names if name.endswith("TABLE")}
        types = {n: "constexpr" if n in given else argument_type(kernel, n, page > 0) for n in kernel.arg_names}
        place = {name: kernel.arg_names.index(name) for name in kernel.arg_names}
        # as in a real launch: aligned pointers and strides, without which no loop is pipelined through shared memory
        aligned = {(place[n],): [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*" or n[-2:-1] == "_"}
        indexed = {(place[name],): value for name, value in given.items()}
        source = ASTSource(fn=kernel, signature=types, constexprs=indexed, attrs=aligned)
        compiled = triton.compile(source, target=target, options=options)
        name, ptx = f"{kernel.__module__.rsplit('.', 1)[-1]}.{kernel.__name__}", compiled.asm["ptx"]
        version = next(v for v in ("", " of few", " of fewest") if name + v not in needs)
        needs[name + version] = {
            "registers": registers(compiled.asm["cubin"]),
            "shared_bytes": compiled.metadata.shared,
            "loads_ahead": "cp.async" in ptx,
            "one_thread_adds": one_thread_adds(compiled.asm["ttgir"]),
            "waits": "griddepcontrol.wait" in ptx,
            "loads_before_waiting": ptx.partition("griddepcontrol.wait")[0].count("ld.global"),
            "launches_dependents": "griddepcontrol.launch_dependents" in ptx,
        }
    print(json.dumps(needs))


if __name__ == "__main__":
    main()
