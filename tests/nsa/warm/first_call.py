"""One call of the layer on the GPU, forward and backward, in a process of its own.

Usage: python -m tests.nsa.warm.first_call HQ HKV DK DV TOKENS
"""

from __future__ import annotations

import sys

import torch

from nsa.config import NSAConfig
from nsa.workload import Workload


def main() -> None:
    num_heads, num_kv_heads, dk, dv, tokens = map(int, sys.argv[1:])
    with torch.device("cuda"):
        Workload("train", 1, tokens, num_heads, num_kv_heads, dk, dv, NSAConfig(), torch.bfloat16).call()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
