"""KVCache: the keys and values of one layer, so that prefill, chunked prefill and decode are one call.

It keeps every branch's keys and values for every token, also the compressed branch's source: `truncate` may
cut a compressed block in two, which is then compressed anew from its source when it is full again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa import backends
from nsa.attention import nsa_attention
from nsa.config import NSAConfig
from nsa.geometry import num_compressed_blocks
from nsa.kv import KVView
from nsa.layer import NativeSparseAttention, PerBranch, a_size, per_branch


class KVCache:
    """Room for `max_tokens` tokens in each of `batch_size` rows of one NativeSparseAttention, all allocated at once.

    For inference only: in grad mode a call that would need a gradient through it is refused. Its dtype is
    the one in which the layer's projections come out where it is made, so a cache for use under autocast is
    made under the same autocast; keys of another dtype are refused, not converted.

    Raises ValueError or TypeError naming the argument, what came and what is wanted.
    """

    def __init__(self, layer: NativeSparseAttention, *, batch_size: int, max_tokens: int) -> None:
        shapes = _shapes(layer, batch_size, max_tokens)
        self.layer, self.batch_size, self.max_tokens = layer, batch_size, max_tokens
        self._length = 0
        weight = layer.q.weight
        with torch.inference_mode(False):  # a buffer made in inference mode could be written only there
            buffers = {
                name: torch.empty(shape, dtype=layer.projected_dtype, device=weight.device)
                for name, shape in shapes.items()
            }
        self._k, self._v = buffers["k"], buffers["v"]
        self._k_compressed, self._v_compressed = buffers["k_compressed"], buffers["v_compressed"]

    @staticmethod
    def bytes(layer: NativeSparseAttention, *, batch_size: int, max_tokens: int) -> int:
        """Bytes that a cache made here with these arguments allocates."""
        elements = sum(math.prod(shape) for shape in _shapes(layer, batch_size, max_tokens).values())
        return elements * layer.projected_dtype.itemsize

    def __len__(self) -> int:
        """Tokens held."""
        return self._length

    def reset(self) -> None:
        """Forget every token."""
        self._length = 0

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on; ValueError if it does not hold that many."""
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length must be an int; got {length!r} ({type(length).__name__})")
        if not 0 <= length <= self._length:
            raise ValueError(f"length must be between 0 and the {self._length} tokens held; got {length}")
        self._length = length

    def admit(self, layer: NativeSparseAttention, x: Tensor) -> None:
        """Raise, with nothing written, unless the tokens x [B, S, dim] of this layer can be appended."""
        refuse_unfit(layer, x, own=self.layer, held=self._k)
        if x.shape[0] != self.batch_size:
            raise ValueError(f"x must have the cache's batch_size, {self.batch_size} rows; got {x.shape[0]}")
        if self._length + x.shape[1] > self.max_tokens:
            raise ValueError(
                f"cache has room for max_tokens={self.max_tokens}; it holds {self._length} and {x.shape[1]} more came"
            )

    def positions(self, num_tokens: int) -> Tensor:
        """int64 [S]: where the next tokens stand."""
        return torch.arange(self._length, self._length + num_tokens, device=self._k.device)

    def attend(self, q: Tensor, k: PerBranch, v: PerBranch, gates: Tensor) -> Tensor:
        """Store the new keys and values; attention of q [B, S, Hq, Dk] over all of them: o [B, S, Hq, Dv]."""
        keys, values, k_compressed, v_compressed = self.stage(k, v)
        return nsa_attention(
            q,
            (None, *keys[1:]),
            (None, *values[1:]),
            gates,
            self.layer.config,
            k_compressed=k_compressed,
            v_compressed=v_compressed,
            backend=self.layer.backend,
        )

    def stage(self, k: PerBranch, v: PerBranch) -> tuple[PerBranch, PerBranch, Tensor, Tensor]:
        """Store S new tokens beyond the end and compress the blocks they complete.

        k [B, S, Hkv, Dk] and v [B, S, Hkv, Dv] for each branch -> views of all keys and values [B, T, Hkv, D] for
        each branch and of all compressed keys and values [B, blocks, Hkv, D], T = len + S. The cache grows at
        `commit` only: if the call fails before, what was stored lies beyond the end and counts for nothing.
        """
        first, last = self._length, self._length + k[0].shape[1]
        config, sets = self.layer.config, len(self._k)
        blocks, pools = num_compressed_blocks(last, config), False
        if write := backends.cache_writer(self.layer.backend, k[0], v[0]):
            pools = config.phi == "avg"
            into = [KVView(*own) for own in zip(self._k, self._v, strict=True)]
            compressed = KVView(self._k_compressed, self._v_compressed) if pools else None
            write(k[:sets], v[:sets], into, compressed, first, config)
        else:
            for buffer, branches in ((self._k, k), (self._v, v)):
                for own, new in zip(buffer, branches[:sets], strict=True):
                    own[:, first:last] = new
        if not pools:
            self._compress(first, last)
        keys, values = (per_branch([own[:, :last] for own in buffer]) for buffer in (self._k, self._v))
        return keys, values, self._k_compressed[:, :blocks], self._v_compressed[:, :blocks]

    def commit(self, num_tokens: int) -> None:
        """Make the `num_tokens` staged last part of the cache."""
        if not 0 <= num_tokens <= self.max_tokens - self._length:
            raise ValueError(f"num_tokens must be between 0 and {self.max_tokens - self._length}; got {num_tokens}")
        self._length += num_tokens

    def _compress(self, first: int, last: int) -> None:
        """Compress the blocks that end among the tokens first <= t < last."""
        config = self.layer.config
        done, blocks = num_compressed_blocks(first, config), num_compressed_blocks(last, config)
        if blocks > done:
            source = slice(done * config.d, (blocks - 1) * config.d + config.l)
            self._k_compressed[:, done:blocks] = self.layer.compress_k(self._k[0][:, source])
            self._v_compressed[:, done:blocks] = self.layer.compress_v(self._v[0][:, source])


def refuse_unfit(layer: NativeSparseAttention, x: Tensor, *, own: NativeSparseAttention, held: Tensor) -> None:
    """Raise unless a cache of `own`, which holds such keys, can take the tokens x that came to `layer`."""
    if layer is not own:
        raise ValueError("cache was made for another layer; each layer needs its own")
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in layer.parameters())):
        raise ValueError("cache is for inference; call the layer under torch.no_grad() or torch.inference_mode()")
    wanted, device = layer.projected_dtype, layer.q.weight.device
    if held.dtype != wanted or held.device != device:
        raise TypeError(
            f"cache must hold the keys that the layer makes here, {wanted} on {device}; it was made for "
            f"{held.dtype} on {held.device}"
        )


def _shapes(layer: object, batch_size: object, max_tokens: object) -> dict[str, tuple[int, ...]]:
    """The buffers of a cache; one axis of keys and values counts the sets, one per branch or one for all."""
    if not isinstance(layer, NativeSparseAttention):
        raise TypeError(f"layer must be a NativeSparseAttention; got {type(layer).__name__}")
    rows, tokens = a_size("batch_size", batch_size), a_size("max_tokens", max_tokens)
    config: NSAConfig = layer.config
    sets, heads, blocks = layer.num_kv_sets, layer.num_kv_heads, num_compressed_blocks(tokens, config)
    return {
        "k": (sets, rows, tokens, heads, layer.head_dim_k),
        "v": (sets, rows, tokens, heads, layer.head_dim_v),
        "k_compressed": (rows, blocks, heads, layer.head_dim_k),
        "v_compressed": (rows, blocks, heads, layer.head_dim_v),
    }
