"""Compile the kernel of a cache's write, and a prefill's compression, for one architecture without a GPU.

Run as a process of its own, without Triton's interpreter, with the architecture, Dk and Dv, and "shared" for one set of
keys: `python -m tests.nsa.triton_backend.compile_cache_write 90 192 128`. It prints as JSON what each version of
`cache_write._write` needs (rows side by side, in pages), and how many sums of floats across threads the kernels have.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import torch

import nsa
from nsa import KVCache, NativeSparseAttention, NSAConfig, PagedCache
from nsa.triton_backend.ahead_of_time import Launch, recorded
from nsa.warm.precompile import distinct

TOKENS = 256
SUM = re.compile(r'"tt\.reduce"\([^)]*\) <\{[^}]*\}> \(\{[^}]*arith\.addf', re.DOTALL)


def launches(architecture: int, dk: int, dv: int, shared_kv: bool) -> list[Launch]:
    """Of a prompt and of a token behind it in both caches, and of a prefill's compression of keys and of values."""
    config = NSAConfig()
    layer = NativeSparseAttention(16, 4, 2, dk, dv, config, shared_kv=shared_kv, backend="triton", dtype=torch.bfloat16)
    side_by_side = KVCache(layer, batch_size=2, max_tokens=TOKENS)
    paged = PagedCache(layer, num_pages=40, max_tokens=TOKENS)
    rows = paged.rows([paged.new(), paged.new()])
    with recorded(architecture) as found, torch.no_grad():
        for length in (100, 1, 31):
            _, k, v, _ = layer.project(torch.zeros(2, length, 16, dtype=torch.bfloat16), torch.arange(length))
            side_by_side.stage(k, v)
            side_by_side.commit(length)
            rows.prepare(length)
            paged.stores[0].append(k, v, rows.new_tokens(length))
            rows.commit(length)
        _, k, v, _ = layer.project(torch.zeros(2, TOKENS, 16, dtype=torch.bfloat16), torch.arange(TOKENS))
        for x in (k[0], v[0]):
            nsa.compress(x, config, backend="triton")
    return [one for one in distinct(found) if one.name in ("cache_write._write", "compression._prepare")]


def main() -> None:
    architecture, dk, dv = map(int, sys.argv[1:4])
    needs: list[dict[str, int]] = []
    sums = 0
    for launch in launches(architecture, dk, dv, "shared" in sys.argv):
        if launch.name == "cache_write._write":
            needs.append(dataclasses.asdict(launch.needs()))
        sums += len(SUM.findall(launch.compiled().asm["ttgir"]))
    print(json.dumps({"needs": needs, "sums": sums}))


if __name__ == "__main__":
    main()
