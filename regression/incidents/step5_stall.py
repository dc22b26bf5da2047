"""step5-stall. Reported: "hangs at step 5" on A100 and RTX 3090 with sequential prefill; batched prefill "solves" it.

Really: no hang. A prefill that goes token by token through Python costs hundreds of operators and several host syncs
per token and layer, some 51 s a step, and the log prints steps 1 to 5, then every 20th: minutes of silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nsa import layer, nsa_attention
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors import host_cost
from regression.detectors.backends import COMPILING_S
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="step5-stall",
    symptom="hangs at step 5 with sequential prefill",
    cause="per-token Python prefill, and a log that is silent from step 5 to 20: slow, no hang",
    detector="operators and host syncs of a layer's forward and backward bounded by a constant, whatever S",
    expects=ReproVerdict.SLOW,
    floor_s=COMPILING_S,
)


def token_by_token(q: Tensor, k: Any, v: Any, gates: Tensor, config: Any, **more: Any) -> Tensor:
    """Prefill as a loop of decode steps, each of which asks the GPU how much it has read."""
    rows = []
    for t in range(q.shape[1]):
        row, aux = nsa_attention(
            q[:, t : t + 1],
            tuple(x[:, : t + 1] for x in k),
            tuple(x[:, : t + 1] for x in v),
            gates[:, t : t + 1],
            config,
            return_aux=True,
            **more,
        )
        for read in aux.keys_read.values():
            read.item()
        rows.append(row)
    return torch.cat(rows, 1)


def product(step: Step) -> Evidence:
    """The host's cost of a layer."""
    return host_cost.examine(step)


def faulty(step: Step) -> Evidence:
    """The loop over tokens: both its operators and its host syncs must be seen."""
    with inject():
        found = product(step)
    unseen = [name for name in ("ops", "host_syncs") if not getattr(found, name).exceeded]
    return dataclasses.replace(found, wrong=tuple(f"the detector's {name} did not fire" for name in unseen))


@contextmanager
def inject() -> Iterator[None]:
    """Put the loop into the layer."""
    with injected(Fault(layer, "nsa_attention", token_by_token)):
        yield
