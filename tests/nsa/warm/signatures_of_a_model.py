"""Kernels that a training step of the decoder LM asks for and `nsa.Workload` does not name, printed as JSON.

Run as a process of its own, without Triton's interpreter: {"packed": {"asked": n, "missing": [names]}, "rows": ...,
"prompt": ...}, the last for a workload without a backward pass; and "decode", all names of a decode step. The model has
float32 weights under autocast, as a run has; kernels are told apart by what Triton's key is made of.
"""

from __future__ import annotations

import json

import torch

from nsa import NSAConfig, Workload
from nsa.loss import next_token_loss
from nsa.model import DecoderLM, ModelConfig
from nsa.triton_backend.ahead_of_time import Launch, recorded
from nsa.warm.precompile import distinct
from nsa.warm.workloads import launches

BATCH, TOKENS = 2, 160
MODEL = ModelConfig(32, 2, 4, 2, 16, 16, nsa=NSAConfig(l=16, d=8, l_sel=32, n_sel=4, w=32), backend="triton")


def asked(documents: torch.Tensor | None) -> list[Launch]:
    """By a training step."""
    shape = (BATCH, TOKENS) if documents is None else (1, BATCH * TOKENS)
    tokens = torch.zeros(shape, dtype=torch.int64)
    model = DecoderLM(MODEL)
    with recorded(90) as found:
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(model(tokens, cu_seqlens=documents), tokens, documents)
        loss.backward()
    return distinct(found)


def names(found: list[Launch]) -> dict[str, str]:
    return {f"{one.source.hash()} {sorted(one.options.items())}": one.name for one in found}


def main() -> None:
    step = Workload("decode", BATCH, TOKENS, 4, 2, 16, 16, MODEL.nsa)
    answer: dict[str, object] = {"decode": [one.name for one in launches([step], 90)]}
    for word, kind, num_documents in (("rows", "train", None), ("packed", "train", 64), ("prompt", "prefill", None)):
        documents = None
        if num_documents is not None:
            documents = torch.arange(num_documents + 1, dtype=torch.int32).clamp(max=3) * 100
            documents[3:] = BATCH * TOKENS
        workload = Workload(kind, BATCH, TOKENS, 4, 2, 16, 16, MODEL.nsa, num_documents=num_documents)
        own = names(launches([workload], 90))
        wanted = names(asked(documents))
        answer[word] = {"asked": len(wanted), "missing": [name for key, name in wanted.items() if key not in own]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
