"""missing-mask. Reported: a model inside a framework is "better than its twin".

Really (transformers issue 45811): an attention function is registered without a function that makes its masks, so that
transformers passes None where it makes a causal mask for its own; with no mask, every token attends to the future.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import nsa.layer
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors import calls
from regression.detectors.backends import interpreted
from regression.detectors.causality import changed_rows
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="missing-mask",
    symptom='a model inside a framework, "better than its twin"',
    cause="an attention registered without its mask function: the mask is None, and tokens see the future",
    detector="other tokens from any cut on, through the framework's own call: no earlier logit changes, nor their loss",
    expects=ReproVerdict.LEAK,
    fires=("future_seen",),
    floor_s=180.0,  # importing transformers, and on a GPU compiling kernels
)
_TOKENS, _VOCAB = 24, 16
_CUTS = (1, 9, 23)
_SIZES = {
    "vocab_size": _VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def unmasked(q: Tensor, k: Any, v: Any, gates: Tensor, config: object, **others: object) -> Tensor:
    """transformers' own attention in the place of NSA's, handed the mask that it makes for an unknown one: None."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    heads = SimpleNamespace(num_key_value_groups=q.shape[2] // k[1].shape[2], training=False)
    one = (x.transpose(1, 2) for x in (q, k[1], v[1]))
    o: Tensor = eager_attention_forward(heads, *one, attention_mask=None, scaling=q.shape[-1] ** -0.5)[0]
    return o


def product(step: Step) -> Evidence:
    """NSAForCausalLM as transformers builds and calls it, on each backend."""
    found: list[str] = []
    for n, backend in enumerate(step.backends):
        cuts = _CUTS[1:2] if interpreted(backend, step.device) else _CUTS
        found += _leaks(f"NSAForCausalLM, {backend}", _nsa(backend, step.device), step.device, cuts)
        step(n)
    return Evidence(future_seen=tuple(found), paths=step.backends)


def faulty(step: Step) -> Evidence:
    """The fault in transformers' own model, and in the product: both must be seen."""
    reported = _leaks("LlamaForCausalLM", _registered_without_mask(step.device), step.device)
    step(0)
    with inject():
        ours = _leaks("NSAForCausalLM, torch", _nsa("torch", step.device), step.device)
    return Evidence(future_seen=tuple(ours if reported else reported), paths=("torch",))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return injected(Fault(nsa.layer, "nsa_attention", unmasked))


def _leaks(name: str, model: Callable[..., Any], device: str, cuts: Sequence[int] = _CUTS) -> list[str]:
    """Logits, and the loss of the labels before the cut, that change with the tokens from it on; no mask is given."""
    tokens = torch.randint(0, _VOCAB, (2, _TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    found = []
    for cut in cuts:
        other = torch.cat([tokens[:, :cut], (tokens[:, cut:] + 5) % _VOCAB], 1)
        labels = tokens.masked_fill(torch.arange(_TOKENS, device=device) >= cut, -100)
        with torch.no_grad():
            a, b = (model(input_ids=x, labels=labels) for x in (tokens, other))
        if rows := changed_rows(a.logits[:, :cut], b.logits[:, :cut]):
            found.append(f"{name}: logits at {min(rows)} to {max(rows)} change with the tokens from {cut} on")
        if cut > 1 and not torch.equal(a.loss, b.loss):
            found.append(f"{name}: the loss of the first {cut} tokens changes with those behind")
    return found


def _nsa(backend: str, device: str) -> Callable[..., Any]:
    """By transformers' own way to a model. The embedding is so large that attention decides something."""
    from transformers import AutoModelForCausalLM

    from nsa.integrations.transformers import NSAConfig
    from nsa.integrations.transformers.configuration import attention_fields

    config = NSAConfig(**_SIZES, **attention_fields(calls.SMALL), nsa_backend=backend, initializer_range=1.0)
    torch.manual_seed(0)
    model: Callable[..., Any] = AutoModelForCausalLM.from_config(config).to(device).eval()
    return model


def _registered_without_mask(device: str) -> Callable[..., Any]:
    """A Llama whose attention is registered and its mask function is not: transformers makes none, and says nothing."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import eager_attention_forward

    AttentionInterface.register("without_mask_function", eager_attention_forward)
    torch.manual_seed(0)
    config = LlamaConfig(**_SIZES, initializer_range=1.0, attn_implementation="without_mask_function")
    model: Callable[..., Any] = LlamaForCausalLM(config).to(device).eval()
    return model
