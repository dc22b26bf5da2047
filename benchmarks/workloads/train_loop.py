"""A training step in a loop of one's own, as most people write it: a model, AdamW, autocast, and no trainer.

Launched "eager", as `torch.compile(model)` ("compile"), or with `mode="reduce-overhead"`, NSA and its dense twin alike.
What is checked is what `train_step` checks, on the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.cases.key import Key
from benchmarks.cases.work import Work
from benchmarks.workloads import roofline
from benchmarks.workloads.train_step import (
    CHECKED_TOKENS,
    check_model,
    draw,
    kernel,
    model_config,
    precision,
    recheck_step,
    refusals,
)
from nsa import loss
from nsa.model import DecoderLM
from nsa.train.trainer import Batch

COMPILED = {"compile": "default", "reduce-overhead": "reduce-overhead"}
"""The mode of `torch.compile` for each way of launching; none is eager."""


def prepare(key: Key, device: str) -> Work:
    """The work of a key whose mode is train-loop; a baseline's name is the kernel of the dense twin."""
    torch._dynamo.reset()  # each case begins as a new process does, without the shapes that others had
    model = DecoderLM(model_config(key)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    tokens = torch.randint(model.config.vocab_size, (key.batch, key.num_queries), device=device)
    batch = Batch(tokens, loss.next_tokens(tokens), key.batch * (key.num_queries - 1))
    called = _compiled(model, key.launch)

    def call() -> tuple[Tensor, ...]:
        optimizer.zero_grad(set_to_none=True)
        with kernel(key.implementation), precision(key.dtype, device):
            logits = called(batch.tokens)
            mean = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=loss.IGNORED)
        mean.backward()
        optimizer.step()
        return (mean.detach(),)

    timed = tokens.clone()

    def redraw(seed: int) -> None:
        draw(batch, timed, model.config.vocab_size, seed)

    return Work(
        check_model(key, model, tokens[:1, :CHECKED_TOKENS], device),
        call,
        key.batch * key.num_queries,
        roofline.of_train_step(key, model),
        refusals=lambda: refusals(key.implementation),
        inputs={"tokens": tokens, "targets": batch.targets},
        recheck=recheck_step(key, model, batch, redraw),
        redraw=redraw,
        replays=key.replays,
    )


def _compiled(model: nn.Module, launch: str) -> Callable[..., Tensor]:
    if launch not in COMPILED:
        return model
    compiled: Callable[..., Tensor] = torch.compile(model, mode=COMPILED[launch])
    return compiled
