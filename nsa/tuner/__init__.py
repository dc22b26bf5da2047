"""`nsa.tune`: the fastest launches of the kernels for shapes of one's own, measured once and kept.

Nothing is tuned unless this is called: without it kernels are launched as the tables of `nsa.triton_backend` say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nsa import backends
from nsa.workload import Workload


def tune(shapes: Sequence[Workload], *, say: Callable[[str], object] = print) -> None:
    """Launch the kernels of these shapes in the fastest way that is known here, measuring what is not known yet.

    Measuring takes minutes per kernel on a GPU that has nothing else to do. What it finds is kept in the user's cache
    folder (`XDG_CACHE_HOME`, ~/.cache) for this GPU, this version of Triton and these kernels, so that the same call at
    the start of a later process measures nothing. It holds for the process, from the next call of attention on; results
    differ by rounding from those of other tiles.

    Args:
        shapes: `nsa.Workload`s; of several with the same group of heads, head sizes and dtype the first is measured.
        say: is handed each line of what is done.

    Raises TypeError for anything else, ValueError for shapes that have nothing to choose (decode steps), and where
    there is no NVIDIA GPU that the Triton backend serves.
    """
    if not isinstance(shapes, Sequence) or not all(isinstance(shape, Workload) for shape in shapes):
        raise TypeError(f"shapes must be a sequence of nsa.Workload; got {shapes!r:.80}")
    tiled = [shape for shape in shapes if shape.kind != "decode"]
    if not tiled:
        raise ValueError("shapes must hold one of kind 'train' or 'prefill': the others have no tiles to choose")
    if not torch.cuda.is_available():
        raise ValueError("nsa.tune needs an NVIDIA GPU; there is none here")
    probe = torch.empty(1, 1, 1, 16, device="cuda")
    if (reason := backends.why_not_triton(probe, probe)) is not None:
        raise ValueError(f"nsa.tune needs the Triton backend: {reason}")
    from nsa.tuner import search  # Triton is there now

    search.on_gpu(probe.device, say).tune(tiled)
