"""Ranks that share each sequence in training: the mesh, and every rank's part of a batch."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.device_mesh import init_device_mesh

from nsa.loss import IGNORED
from nsa.model import DecoderLM
from nsa.parallel import context_parallel
from nsa.train.data.packing import Batch
from nsa.train.distributed import Ranks


class SharedSequences:
    """The ranks of the run as a mesh of (data, context): those of one row read the same batches and share them.

    DDP and FSDP2 go over all ranks of it: each has the gradients of its own tokens.
    """

    def __init__(self, lm: DecoderLM, own: Ranks, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (own.data_ranks, own.context), mesh_dim_names=("data", "context"))
        self._context = context_parallel(lm, mesh["context"])
        self._config = lm.config.nsa

    def own_part(self, batch: Batch, device: torch.device) -> Batch:
        """This rank's tokens of a batch on the host, with the targets among them, on the device."""
        bounds = self._context.documents(batch.cu_seqlens)
        order = self._context.order(batch.tokens.shape[1], self._config, bounds)
        tokens, targets = (self._context.shard(x, order) for x in (batch.tokens, batch.targets))
        own = dataclasses.replace(
            batch, tokens=tokens, targets=targets, num_targets=int((targets != IGNORED).sum())
        ).to(device)
        if own.cu_seqlens is not None and bounds is not None:
            self._context.remember(own.cu_seqlens, bounds)  # so that no layer reads it from the device
        return own
