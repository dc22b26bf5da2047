"""A call as a CUDA graph: captured once, replayed without the host launching its kernels one by one."""

from __future__ import annotations

import warnings

import torch

from benchmarks.cases.work import Call
from benchmarks.correctness.verify import IncorrectError

_WARM_UPS = 3  # on another stream, as for capturing, so that libraries have made their workspaces


class CannotCaptureError(Exception):
    """The call waits for the device, or leaves a stream unjoined; the message is CUDA's."""


def capture(call: Call) -> Call:
    """A call that replays the graph and returns its outputs, which every replay overwrites.

    Raises CannotCaptureError, or IncorrectError where the call gives the device nothing to do.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    random_state = generator.clone_state()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.cuda.graph(graph):
                outputs = call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            generator.graphsafe_set_state(random_state)  # PyTorch leaves it as in a capture: no random number after it
            raise CannotCaptureError(f"no CUDA graph can be made of this call: {error}") from error
    for warning in said:
        if "CUDA Graph is empty" in str(warning.message):
            raise IncorrectError("the call gave the device nothing to do when its CUDA graph was made")
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return outputs

    return replay
