"""Against figures that are wrong although the oracle is green: what a call could do to look fast, made visible.

A call could return what it returned before, change its inputs, leave its outputs unwritten, compute them when they are
read, or compute them on a stream that nobody waits for. None of this needs ill will: caches, `torch.empty` and streams
do it by accident.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.correctness.verify import IncorrectError

_CHUNK = 2**22
_PRIME = 2_654_435_761
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element."""


def digest(x: Tensor) -> int:
    """A word that differs, as good as surely, where two tensors of one shape and dtype differ in any bit."""
    words = x.detach().contiguous().view(-1).view(_WORDS[x.element_size()])
    count = max(min(words.numel(), _CHUNK), 1)
    factors = _PRIME * torch.arange(1, 2 * count, 2, device=x.device)  # odd: none loses a bit
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in words.split(_CHUNK):
        total = total * _PRIME + (part * factors[: part.numel()]).sum()  # int64 wraps around
    return int(total)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of each by name."""
    return {name: digest(x) for name, x in tensors.items()}


def require_unchanged(tensors: Mapping[str, Tensor], before: Mapping[str, int]) -> None:
    """Raises IncorrectError naming the inputs that are not as they were."""
    changed = [name for name, word in digests(tensors).items() if word != before[name]]
    if changed:
        raise IncorrectError(f"the call changed its inputs: {', '.join(changed)}")


class Touch:
    """Changes one value of each tensor ahead of every call, cheaply, and at last back.

    What is remembered of an earlier call is then wrong, and PyTorch's version of the tensor has moved.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._first = [x[(0,) * x.dim()] for x in tensors if x.is_floating_point() and x.numel()]
        self._changed = False

    def __call__(self) -> None:
        for value in self._first:
            value.neg_()
        self._changed = not self._changed

    def undo(self) -> None:
        """Leave the tensors as they were."""
        if self._changed:
            self()


def poison(outputs: Iterable[Tensor]) -> None:
    """Overwrite outputs that were read with what no call gives, so that neither they nor their memory can pass for the
    next call's."""
    for x in outputs:
        x.detach().fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min)


def require_plain_tensors(outputs: Sequence[object]) -> None:
    """Raises IncorrectError unless each output is a tensor that holds its values already."""
    for i, x in enumerate(outputs):
        if type(x) is not Tensor:
            raise IncorrectError(
                f"output {i} is a {type(x).__module__}.{type(x).__qualname__}, not a plain tensor: what it holds may be"
                " computed when it is read, outside the timing"
            )


def as_read_by_this_stream(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of the outputs as the current stream finds them, without waiting for any other."""
    require_plain_tensors(outputs)
    return tuple(x.detach().clone() for x in outputs)
