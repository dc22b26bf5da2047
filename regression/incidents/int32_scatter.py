"""int32-scatter. Reported: "scatter_add needs .long()", an immediate crash on an RTX 3090.

Really: the documented index type was int32 and a scatter that takes int64 only was fed with it, on a path that no
test ran with that type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

import nsa
from nsa.geometry import Layout
from nsa.model import SHOWCASE, DecoderLM, next_token_loss
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors import selection
from regression.detectors.backends import COMPILING_S, in_every_backend, proofs
from regression.detectors.calls import Call, draw

INCIDENT = Incident(
    id="int32-scatter",
    symptom="scatter_add needs .long()",
    cause="an int32 index where int64 is wanted",
    detector="every public function with the index types it documents, and a named refusal of the others",
    expects=ReproVerdict.CRASHED,
    fires=("end",),
    says="long tensor for index",
    floor_s=COMPILING_S,
)


def _scattered(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """Each compressed block's p added to the selection block in which it begins, through an int32 index.

    `put_` is the scatter that still refuses it; `scatter_add` learnt int32 in later versions of PyTorch.
    """
    config, p = layout.config, selection.compressed_p(q, k_cmp, layout, scale)
    begun, forced = selection.candidates(layout)
    score = torch.zeros(*p.shape[:3], layout.max_blocks, device=q.device)
    block = torch.arange(p.shape[-1], device=q.device) * config.d // config.l_sel
    row = torch.arange(p[..., 0].numel(), device=q.device) * layout.max_blocks
    score.put_((row[:, None] + block).int(), p.flatten(0, 2), accumulate=True)
    score = score.masked_fill(forced, torch.inf).masked_fill(~begun, -torch.inf)
    return selection.best(score, config.n_sel)


def _attention(call: Call, backend: str) -> list[str]:
    """Indices int32 and int64, documents int32; what is not documented is refused by name."""
    chosen = call.select(backend)
    found = [] if chosen.dtype == torch.int32 else [f"{backend}: select_blocks gives {chosen.dtype}"]

    def selected(indices: Tensor) -> Tensor:
        return nsa.selected_attention(call.q, call.k, call.v, indices, call.config, backend=backend)[0]

    def packed(documents: Tensor) -> Tensor:
        return nsa.nsa_attention(call.q, call.k, call.v, call.gates, call.config, cu_seqlens=documents, backend=backend)

    if not torch.equal(selected(chosen), selected(chosen.long())):
        found.append(f"{backend}: int32 and int64 indices give different outputs")
    documents = torch.tensor([0, 5, 5, call.q.shape[1]], dtype=torch.int32, device=call.q.device)
    if not bool(packed(documents).isfinite().all()):
        found.append(f"{backend}: int32 documents give NaN")
    found += _refused("block_indices", selected, chosen.short(), chosen.float())
    return found + _refused("cu_seqlens", packed, documents.long(), documents.float())


def _refused(name: str, function: Callable[[Tensor], Tensor], *arguments: Tensor) -> list[str]:
    """Each argument must raise a TypeError that names it."""
    found = []
    for argument in arguments:
        try:
            function(argument)
        except TypeError as error:
            if name not in str(error):
                found.append(f"{name} of {argument.dtype}: the error does not name it: {error}")
        else:
            found.append(f"{name} of {argument.dtype} is taken, though not documented")
    return found


def _model(device: str) -> list[str]:
    """Tokens of both documented types, forward and backward."""
    torch.manual_seed(0)
    model = DecoderLM(SHOWCASE).to(device)
    tokens = torch.randint(0, SHOWCASE.vocab_size, (2, 40), device=device)
    losses = [next_token_loss(model(x), x) for x in (tokens, tokens.int())]
    losses[1].backward()
    return [] if torch.equal(*losses) else ["tokens of int32 and int64 give different losses"]


def _examine(step: Step, backends: Sequence[str]) -> Evidence:
    wrong: list[str] = []
    try:
        for n, backend in enumerate(backends):
            wrong += _attention(draw(12, step.device), backend)
            step(n)
        wrong += _model(step.device)
    except RuntimeError as error:
        return Evidence(exception=f"RuntimeError: {error}", paths=tuple(backends))
    return Evidence(wrong=tuple(wrong), paths=tuple(backends))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("select_blocks", _scattered)


faulty, product = proofs(_examine, inject)
