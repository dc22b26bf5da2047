"""Compile a decode step in one launch for a Hopper GPU, on a machine without one, and print what it needs as JSON.

Run as a process of its own, without Triton's interpreter, with the keys of a sequence and the page size (0 for none):
`python -m tests.nsa.triton_backend.compile_hopper_decode 65536 64`.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from nsa import NSAConfig, geometry
from nsa.kv import KVView
from nsa.triton_backend.ahead_of_time import recorded
from nsa.triton_backend.hopper import decode


def main() -> None:
    keys, page = map(int, sys.argv[1:])
    config = NSAConfig()

    def view(rows: int) -> KVView:
        pages = -(-rows // page) if page else 0
        shape = (pages, page, 1, 128) if page else (1, rows, 1, 128)
        k, v = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
        return KVView(k, v, torch.zeros(1, pages, dtype=torch.int32) if page else None)

    q, gates = (torch.zeros(1, 1, 16, width, dtype=torch.bfloat16) for width in (128, 3))
    compressed, tokens = view(geometry.num_compressed_blocks(keys, config)), view(keys)
    lengths = torch.tensor([keys], dtype=torch.int32) if page else keys
    with recorded(90) as launches:
        decode.attend(q, (compressed, tokens, tokens), lengths, gates, config, 0.125)
    print(json.dumps([dataclasses.asdict(launch.needs()) for launch in launches]))


if __name__ == "__main__":
    main()
