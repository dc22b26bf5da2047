"""The public face of NSA as a table: every callable, what it takes, and the values of every flag."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa import model as lm
from nsa.config import PHIS
from regression.detectors import calls
from regression.detectors.backends import interpreted

Flags = Mapping[str, Sequence[Any]]
TOKENS, _DIM = 12, 16
_SIZES = (_DIM, 2, 1, 16, 16)  # dim, heads, kv heads, head_dim_k, head_dim_v: those of `calls`, compiled once


@dataclass(frozen=True)
class PublicCall:
    """A public callable, what it takes besides its flags, and the values of every flag, the default first."""

    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    flags: Flags
    then: Callable[[Any], object] = lambda result: result
    """What is done with what it returns."""

    def missing(self) -> list[str]:
        """Flags in the signature that are not among ours."""
        parameters = inspect.signature(self.call).parameters.values()
        return [p.name for p in parameters if p.default is not p.empty and p.name not in self.flags]

    def combinations(self, *, all_of_them: bool) -> list[dict[str, Any]]:
        """Every combination, or the two ends where a call is slow."""
        if all_of_them:
            return [dict(zip(self.flags, values, strict=True)) for values in itertools.product(*self.flags.values())]
        return [{name: values[end] for name, values in self.flags.items()} for end in (0, -1)]


def functions(backend: str, device: str, documents: Tensor | None) -> dict[str, PublicCall]:
    """The functions of `nsa`, forward and backward, for one document or several packed ones."""
    x, config = calls.draw(TOKENS, device).leaves(), calls.SMALL
    k_cmp, v_cmp = (nsa.compress(y, config, cu_seqlens=documents).detach().requires_grad_() for y in (x.k, x.v))
    o, lse = nsa.compressed_attention(x.q, k_cmp, v_cmp, config, cu_seqlens=documents)
    blocks = nsa.select_blocks(x.q, k_cmp, config, cu_seqlens=documents)
    packed: Flags = {"cu_seqlens": (documents,), "backend": (backend,)}
    common: Flags = {"scale": (None, 0.3), **packed}
    keys: Flags = {"num_keys": (None, TOKENS), **common}
    given: Flags = {"k_compressed": (None, k_cmp), "v_compressed": (None, v_cmp), "return_aux": (False, True)}
    return {
        "compress": PublicCall(nsa.compress, (x.k, config), packed, _backward),
        "compressed_attention": PublicCall(nsa.compressed_attention, (x.q, k_cmp, v_cmp, config), keys, _backward),
        "select_blocks": PublicCall(nsa.select_blocks, (x.q, k_cmp, config), {"lse": (None, lse.detach()), **keys}),
        "selected_attention": PublicCall(nsa.selected_attention, (x.q, x.k, x.v, blocks, config), common, _backward),
        "window_attention": PublicCall(nsa.window_attention, (x.q, x.k, x.v, config), common, _backward),
        "combine": PublicCall(nsa.combine, ((o.detach(),) * 3, x.gates), {"backend": (backend,)}, _backward),
        "nsa_attention": PublicCall(
            nsa.nsa_attention, (x.q, x.k, x.v, x.gates, config), {**given, **common}, _backward
        ),
        "nsa_attention, keys per branch": PublicCall(
            nsa.nsa_attention, (x.q, (x.k,) * 3, (x.v,) * 3, x.gates, config), {**given, **common}, _backward
        ),
    }


def modules(backend: str, device: str, documents: Tensor | None) -> dict[str, PublicCall]:
    """The layer with its cache, and the model, each constructed in every way; one phi where a call is slow."""
    layer: Flags = {
        "shared_kv": (False, True),
        "backend": (backend,),
        "rope_base": (10000.0,),
        "device": (device,),
        "dtype": (torch.float32,),
    }
    model: Flags = {
        "nsa": (calls.SMALL,),
        "attention": lm.ATTENTIONS,
        "shared_kv": (False, True),
        "vocab_size": (16,),
        "mlp_dim": (None, 8),
        "tied_head": (True, False),
        "rope_base": (10000.0,),
        "backend": (backend,),
        "norm_eps": (None,),
    }
    phis = PHIS[-1:] if interpreted(backend, device) else PHIS
    configs = [dataclasses.replace(calls.SMALL, phi=phi) for phi in phis]
    through = functools.partial(_through_a_layer, documents=documents)
    through_model = functools.partial(_through_a_model, device=device, documents=documents)
    layers = {
        f"layer, phi={c.phi}": PublicCall(nsa.NativeSparseAttention, (*_SIZES, c), layer, through) for c in configs
    }
    return {**layers, "model": PublicCall(lm.ModelConfig, (_DIM, 1, *_SIZES[1:]), model, through_model)}


NO_ATTENTION = (nsa.tune,)
"""Functions that compute nothing of a model."""


def functions_missing_in(entries: Mapping[str, PublicCall]) -> list[str]:
    """Functions that `nsa` exports and no entry calls."""
    called = {*NO_ATTENTION, *(entry.call for entry in entries.values())}
    return [name for name in nsa.__all__ if inspect.isfunction(getattr(nsa, name)) and getattr(nsa, name) not in called]


def _backward(result: Any) -> None:
    """Sum up whatever has a gradient, and ask for it."""
    outputs = result if isinstance(result, tuple) else (result,)
    total = sum(x.sum() for x in outputs if isinstance(x, Tensor) and x.requires_grad and x.dtype == torch.float32)
    if isinstance(total, Tensor):
        total.backward()


def _through_a_layer(layer: nsa.NativeSparseAttention, documents: Tensor | None) -> None:
    """Training; and but for packed documents prefill, a chunk, decode, and a cache cut short and begun anew."""
    x = torch.randn(1, TOKENS, _DIM, device=layer.q.weight.device)
    layer(x, cu_seqlens=documents).sum().backward()
    if documents is not None:
        return
    cache = nsa.KVCache(layer, batch_size=1, max_tokens=TOKENS)
    with torch.no_grad():
        for first, last in ((0, 6), (6, 9), (9, 10)):
            layer(x[:, first:last], cache)
        cache.truncate(7)
        layer(x[:, 7:8], cache)
        cache.reset()
        layer(x, cache)
    _through_pages(layer, x)


def _through_pages(layer: nsa.NativeSparseAttention, x: Tensor) -> None:
    """Prefill, a fork, a step of both, one of them cut short and the other freed."""
    cache = nsa.PagedCache(layer, num_pages=16, max_tokens=TOKENS)
    first = cache.new()
    with torch.no_grad():
        layer(x[:, :6], cache.rows([first]).layers[0])
        second = cache.fork(first)
        layer(x[:, 6:8].expand(2, -1, -1), cache.rows([first, second], count_reads=True).layers[0])
        cache.truncate(second, 7)
        cache.free(first)
        layer(x[:, 7:], cache.rows([second]).layers[0])


def _through_a_model(config: lm.ModelConfig, device: str, documents: Tensor | None) -> None:
    """A training step; and but for packed documents and the dense twin, which has no cache, prefill and decode."""
    tokens = torch.arange(TOKENS, device=device)[None]
    model = lm.DecoderLM(config).to(device)
    lm.next_token_loss(model(tokens, cu_seqlens=documents), tokens, documents).backward()
    if documents is None and config.attention == "nsa":
        cache = model.new_cache(batch_size=1, max_tokens=TOKENS)
        with torch.no_grad():
            model(tokens[:, :-1], cache)
            model(tokens[:, -1:], cache)
