"""Processes that run case after case, so that starting them is paid once: eight over Gloo, or a GPU each over NCCL.

They serve groups of 2, 4 and 8: a mesh of (8 / P, P), of which the first row runs the case. A process is forked from
one that has imported PyTorch already.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MOST = 8
PATIENCE_S = 1200.0
"""For an answer; a rank that waits for one that failed gives up before. So long that no busy machine gets there."""
_COLLECTIVE = datetime.timedelta(seconds=900)

Work = Callable[..., Any]
"""Runs on every rank as work(mesh of P ranks, *arguments); what it returns can be pickled."""


class RankError(AssertionError):
    """What the ranks that failed said."""


class Pool:
    """The processes; `close` ends them."""

    def __init__(self, folder: Path, device: str = "cpu", most: int = MOST) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", __name__, "nsa.parallel"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(most):
            ours, theirs = context.Pipe()
            given = (rank, most, device, str(folder / "store"), theirs)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, ranks: int, work: Work, *arguments: Any) -> list[Any]:
        """What `work` returned on each of `ranks` ranks. Raises RankError with what those that failed said."""
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, work, arguments))
        answers = [self._answer(rank) for rank in range(ranks)]
        if failed := [f"rank {rank} of {ranks}: {said}" for rank, (good, said) in enumerate(answers) if not good]:
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(PATIENCE_S):
            return False, "no answer"
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return False, "ended"


def _serve(rank: int, most: int, device: str, store: str, pipe: Connection) -> None:
    """One process: until the pipe is closed."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    over = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(over, store=dist.FileStore(store, most), rank=rank, world_size=most, timeout=_COLLECTIVE)
    groups = {
        ranks: [dist.new_group(range(first, first + ranks)) for first in range(0, most, ranks)]
        for ranks in (1, 2, 4, 8)
        if ranks <= most
    }
    meshes = {
        ranks: DeviceMesh.from_group(groups[ranks][rank // ranks], device, mesh_dim_names=("context",))
        for ranks in groups
    }
    while True:
        try:
            ranks, work, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = True, work(meshes[ranks], *arguments)
        except BaseException:
            answer = False, traceback.format_exc(limit=-6)
        pipe.send(answer)
    os._exit(0)  # as `nsa.train.distributed.exit_with_threads`: threads of Gloo and NCCL outlive the group
