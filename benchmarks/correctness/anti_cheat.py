"""Against figures that are wrong although the oracle is green: what a call could do to look fast, made visible.

A call could return what it returned before, change its inputs, leave its outputs unwritten, compute them when they are
read, or compute them on a stream that nobody waits for. None of this needs ill will: caches, `torch.empty` and streams
do it by accident.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.correctness.verify import IncorrectError

_CHUNK = 2**22
_PRIME = 2_654_435_761
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element."""
_QUIET_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000, torch.float64: 0x7FF8 << 48}
_MARK = 0x2D
"""Lowest bits of the NaN that `poison` writes."""


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
    """Flips the sign of one value of each tensor ahead of every call, at a random place, and at last all of them back.

    No two calls then have the same inputs: what is remembered of an earlier call, by address, version or content, is
    wrong, and no value can be left out of what is computed because it is always the one that changes.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [x for x in tensors if x.is_floating_point() and x.numel()]
        self._flipped: list[Counter[int]] = [Counter() for _ in self._tensors]

    @property
    def changes_something(self) -> bool:
        """Whether any of the tensors has a value whose sign can be flipped: tokens have none."""
        return bool(self._tensors)

    def __call__(self) -> None:
        for x, flipped in zip(self._tensors, self._flipped, strict=True):
            place = secrets.randbelow(x.numel())
            x[_index(place, x.shape)].neg_()
            flipped[place] += 1

    def undo(self) -> None:
        """Leave the tensors as they were."""
        for x, flipped in zip(self._tensors, self._flipped, strict=True):
            odd = [_index(place, x.shape) for place, times in flipped.items() if times % 2]
            if odd and x.dim():
                places = tuple(torch.tensor(numbers, device=x.device) for numbers in zip(*odd, strict=True))
                x[places] = -x[places]
            elif odd:
                x.neg_()
            flipped.clear()


def _index(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Where the element of this number, row by row, stands: 5 of (2, 3) is (1, 2)."""
    found = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        found.append(rest)
    return tuple(reversed(found))


def poison(outputs: Iterable[Tensor]) -> None:
    """Overwrite outputs that were read with a word that no call gives, so that neither they nor their memory can pass
    for the next call's."""
    for x in outputs:
        x.detach().view(_WORDS[x.element_size()]).fill_(_poison_word(x.dtype))


def require_written(outputs: Iterable[Tensor]) -> None:
    """Raises IncorrectError where an output holds what `poison` has put into its memory."""
    for i, x in enumerate(outputs):
        if not x.is_signed():  # no word of theirs can be told from a value
            continue
        left = int((x.detach().contiguous().view(_WORDS[x.element_size()]) == _poison_word(x.dtype)).sum())
        if left:
            raise IncorrectError(
                f"output {i} holds {left} values, of {x.numel()}, that the call has not written: an output that was"
                " remembered, or rows that were skipped"
            )


def _poison_word(dtype: torch.dtype) -> int:
    """The bits of a NaN that no operation makes; of integers the lowest."""
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min
    return _QUIET_NAN[dtype] | _MARK


class OtherInputs:
    """What a call returned last, so that the same for other inputs is seen."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def require_new(self, outputs: Sequence[Tensor]) -> None:
        """Raises IncorrectError where an output has the very bits that it had at the call before.

        Integers may stay (blocks that are always chosen), and so may what is zero everywhere.
        """
        words = {i: digest(x) for i, x in enumerate(outputs) if x.is_floating_point() and bool(x.detach().any())}
        same = [i for i, word in words.items() if self._before.get(i) == word]
        self._before = words
        if same:
            raise IncorrectError(
                f"output {same[0]} for other inputs is to the bit what the call before returned: it was remembered, or"
                " a graph reads stale addresses"
            )


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
    read = tuple(x.detach().clone() for x in outputs)
    require_written(read)
    return read
