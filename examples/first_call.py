"""A first call of Native Sparse Attention: what goes in, what comes out, and how little of the keys it reads.

    python examples/first_call.py

Dense causal attention reads every earlier key for each query. NSA reads three small sets of them instead, attends to
each set on its own, and adds the three outputs, weighted by gates:

    compressed   one average key for each block of l tokens, every d tokens: a coarse view of everything
    selected     the n_sel blocks of l_sel tokens that score best in the compressed view, at full resolution
    window       the last w tokens
"""

from __future__ import annotations

import torch

import nsa

torch.manual_seed(0)

cfg = nsa.NSAConfig(l=32, d=16, l_sel=64, n_sel=8, w=128)
B, S, Hq, Hkv, D = 1, 2048, 4, 2, 32  # batch, tokens, query heads, key/value heads, head size

q = torch.randn(B, S, Hq, D)
k = torch.randn(B, S, Hkv, D)  # two query heads share each key head
v = torch.randn(B, S, Hkv, D)
gates = torch.rand(B, S, Hq, 3)  # how much of each branch: compressed, selected, window

o, aux = nsa.nsa_attention(q, k, v, gates, cfg, return_aux=True)
print(f"output {list(o.shape)}, computed by the backend {aux.backend!r}")

# aux says what was read, counted where it was read
dense = B * Hkv * S * (S + 1) // 2
for branch, keys in aux.keys_read.items():
    print(f"{branch:<10} {int(keys):>9,} keys read, {int(keys) / dense:.1%} of what dense attention reads")

last = aux.block_indices[0, -1, 0].tolist()
print(f"the last query's first group chose the blocks {last} of {S // cfg.l_sel}")

# every backend is held to an executable specification, which goes query by query; here for the last few queries
few = slice(S - 4, S)
truth = nsa.nsa_attention(q[:, few], k, v, gates[:, few], cfg, backend="reference")
print(f"largest difference from the specification: {(o[:, few] - truth).abs().max():.1e}")

# it is differentiable as any operation of PyTorch
q.requires_grad_()
nsa.nsa_attention(q, k, v, gates, cfg).square().mean().backward()
assert q.grad is not None
print(f"gradient of q: {list(q.grad.shape)}, all finite: {bool(q.grad.isfinite().all())}")
