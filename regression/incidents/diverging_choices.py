"""diverging-choices. Reported (sglang #31115, Megatron #5384): replicas drift apart.

What happened: ranks, batches or chunks chose different blocks for the same tokens, since some of them went through a
kernel of lower precision. Each output is right for its own choice, so that no error budget sees it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nsa import NSAConfig, backends
from nsa.geometry import Layout
from nsa.torch_backend.scores import select_blocks as healthy
from regression.contract import Bound, Evidence, Incident, ReproVerdict, Step
from regression.detectors import dense
from regression.detectors.backends import COMPILING_S, in_every_backend, interpreted, proofs, worst
from regression.detectors.calls import Call, draw

INCIDENT = Incident(
    id="diverging-choices",
    symptom="replicas drift apart",
    cause="ranks, batches or chunks choose differently for the same tokens",
    detector="choices equal across batch, chunk, rank, graph and decode; recorded indices reproduce outputs",
    expects=ReproVerdict.WRONG,
    fires=("wrong",),
    floor_s=COMPILING_S,
)
CONFIG = NSAConfig(l=2, d=2, l_sel=2, n_sel=4, w=8, local_blocks=0)
"""Many small blocks, three of which are free: choices are close."""
TOKENS, INTERPRETED_TOKENS = 48, 14
CHUNK = 10  # more than a backend decodes in one step
RANKS = 2


def _by_the_batch(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """Anything but one sequence as a whole is scored by a coarse index: by the signs of queries."""
    if q.shape[0] > 1 or layout.num_queries < layout.num_keys:
        q, lse = q.sign(), None
    return healthy(q, k_cmp, layout, scale, lse)


def _call(device: str, backend: str, batch: int = 1) -> Call:
    """The same tokens in the last row of a batch of any size."""
    tokens = INTERPRETED_TOKENS if interpreted(backend, device) else TOKENS
    own = draw(tokens, device, config=CONFIG)
    others = [draw(tokens, device, config=CONFIG, seed=seed) for seed in range(1, batch)]
    calls = zip(*((c.q, c.k, c.v, c.gates) for c in (*others, own)), strict=True)
    q, k, v, gates = (torch.cat(rows) for rows in calls)
    return Call(q, k, v, gates, CONFIG)


def _indices(call: Call, backend: str) -> Tensor:
    """[S, Hkv, n] of the last row, as the call recorded them."""
    return call.whole(backend)[1].block_indices[-1]


def _of_rank(rank: int, device: str, backend: str, inject_fault: bool) -> list[int]:
    """One data-parallel replica: other neighbours in its batch, other seeds, other calls before. Picklable."""
    with inject() if inject_fault else contextlib.nullcontext():
        torch.manual_seed(rank)
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        call = _call(device, backend, batch=rank + 1)
        if rank:
            call.rows(0, 5).whole(backend)
        chosen: list[int] = _indices(call, backend).flatten().tolist()
        return chosen


def _ranks(device: str, names: Sequence[str]) -> dict[str, list[list[int]]]:
    """What each rank chooses, by backend, in two processes."""
    how = "fork" if device == "cpu" else "spawn"  # a process that has used CUDA cannot be forked
    with ProcessPoolExecutor(RANKS, mp_context=multiprocessing.get_context(how)) as pool:
        pending = {}
        for name in names:
            fault = vars(backends.load(name))["select_blocks"] is _by_the_batch
            pending[name] = [pool.submit(_of_rank, rank, device, name, fault) for rank in range(RANKS)]
        return {name: [future.result() for future in futures] for name, futures in pending.items()}


def _graph(call: Call, backend: str) -> Tensor:
    """The choice as one CUDA graph made it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture wants kernels that are compiled
        _indices(call, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices = _indices(call, backend)
    graph.replay()
    return indices


def _ways(call: Call, backend: str) -> dict[str, Tensor]:
    """The choices for the same tokens, each [S, Hkv, n] of the queries at the end that it has."""
    device, last = call.q.device.type, call.q.shape[1]
    earliest = last - 1 if interpreted(backend, device) else 0
    chunks = range(last - CHUNK, max(earliest - CHUNK, -1), -CHUNK)
    ways = {
        "in a batch of 2": _indices(_call(device, backend, batch=2), backend),
        f"in chunks of {CHUNK}": torch.cat([_indices(call.rows(t, t + CHUNK), backend) for t in reversed(chunks)]),
        "one token at a time": torch.cat([_indices(call.rows(t, t + 1), backend) for t in range(earliest, last)]),
        "by select_blocks alone": call.select(backend)[0],
    }
    if device == "cuda" and backend != "reference":  # which reads lengths on the host
        ways["in a graph"] = _graph(call, backend)
    return ways


def _reproduced(call: Call, backend: str) -> Bound:
    """Outputs of a prefill and of a step, against dense attention over the blocks that they recorded."""
    errors, last = [], call.q.shape[1]
    for part in (call, call.rows(last - 1, last)):
        o, aux = part.whole(backend)
        errors.append(dense.error(o, part, "whole", aux.block_indices))
    return worst(errors)


def _examine(step: Step, names: Sequence[str]) -> Evidence:
    wrong, errors, notes = [], [], []
    ranks = _ranks(step.device, [name for name in names if name != "reference"])
    step(0)
    for n, backend in enumerate(names, 1):
        call = _call(step.device, backend)
        prefill = _indices(call, backend)
        ways = _ways(call, backend)
        for rank, chosen in enumerate(ranks.get(backend, [])):
            ways[f"on rank {rank} of {RANKS}"] = torch.tensor(chosen, device=prefill.device).view(prefill.shape)
        for way, chosen_so in ways.items():
            wanted = prefill[len(prefill) - len(chosen_so) :]
            if rows := int((chosen_so != wanted).flatten(1).any(-1).sum()):
                wrong.append(f"{backend}, {way}: {rows} of {len(wanted)} rows choose otherwise than in a prefill")
        errors.append(_reproduced(call, backend))
        notes.append(f"{backend}: {', '.join(ways)}")
        step(n)
    if step.device != "cuda":
        notes.append("in a graph: needs CUDA, and was not tried")
    return Evidence(wrong=tuple(wrong), error=worst(errors), paths=tuple(names), notes=tuple(notes))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("select_blocks", _by_the_batch)


faulty, product = proofs(_examine, inject)
