"""fake-counters: "reads_pred == reads_act_total, always".

What really happened: the count of keys read was a copy of its prediction, and could not have differed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

import nsa
from nsa import torch_backend
from nsa.geometry import Layout
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors import calls
from regression.detectors.backends import in_every_backend, interpreted

INCIDENT = Incident(
    id="fake-counters",
    symptom="reads_pred == reads_act_total, always",
    cause="the count of what was read was a copy of the prediction",
    detector="a value was read by a row if the row has a gradient for it; the counters must say the same",
    expects=ReproVerdict.WRONG,
)

_TOKENS = 21  # 6 blocks, of which 4 are chosen, the last one only begun
_healthy = torch_backend.selected_attention


def copied_from_the_prediction(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What one expects to read: n blocks of l' tokens, or all there are."""
    o, lse, read = _healthy(q, k, v, block_indices, layout, scale)
    predicted = (layout.positions + 1).clamp(max=layout.config.n_sel * layout.config.l_sel)
    return o, lse, predicted[None, :, None].expand_as(read).to(read.dtype)


def product(step: Step) -> Evidence:
    """Compare the counters of every backend with what its rows depend on, row by row and for a whole prefill."""
    prefill = calls.draw(_TOKENS, step.device)
    wrong: list[str] = []
    total: Counter[str] = Counter()
    for n, backend in enumerate(step.backends, start=1):
        rows = (2, 17, 20) if interpreted(backend, step.device) else range(_TOKENS)
        counted, seen = Counter[str](), Counter[str]()
        for t in rows:
            row_counted, row_seen = _of_one_row(prefill.rows(t, t + 1), backend)
            counted, seen = counted + row_counted, seen + row_seen
            step(n)
        total = total or seen  # of every row: the first backend is never interpreted
        whole = _counters(prefill.whole(backend)[1])
        wrong += _differences(f"{backend}, rows", counted, seen) + _differences(f"{backend}, prefill", whole, total)
    return Evidence(wrong=tuple(wrong), paths=step.backends, notes=(f"keys read: {dict(total)}",))


def _of_one_row(row: calls.Call, backend: str) -> tuple[Counter[str], Counter[str]]:
    """Keys read by one query: as counted, and as found in the gradients of each branch's own values."""
    v = {
        "compressed": nsa.compress(row.v, row.config).requires_grad_(),
        "selected": row.v.clone().requires_grad_(),
        "window": row.v.clone().requires_grad_(),
    }
    o, aux = nsa.nsa_attention(
        row.q,
        row.k,
        (None, v["selected"], v["window"]),
        row.gates,
        row.config,
        v_compressed=v["compressed"],
        backend=backend,
        return_aux=True,
    )
    o.sum().backward()
    seen = {branch: int((x.grad != 0).any(-1).sum()) for branch, x in v.items() if x.grad is not None}
    return _counters(aux), Counter(seen)


def _counters(aux: nsa.Aux) -> Counter[str]:
    return Counter({branch: int(keys) for branch, keys in aux.keys_read.items()})


def _differences(where: str, counted: Counter[str], seen: Counter[str]) -> list[str]:
    """In words, by branch."""
    branches = sorted(counted | seen)
    return [f"{where}, {b}: {counted[b]} keys counted, {seen[b]} read" for b in branches if counted[b] != seen[b]]


@contextmanager
def inject() -> Iterator[None]:
    with in_every_backend("selected_attention", copied_from_the_prediction):
        yield


def faulty(step: Step) -> Evidence:
    """The same rows with a counter of that kind."""
    with inject():
        return product(step)
