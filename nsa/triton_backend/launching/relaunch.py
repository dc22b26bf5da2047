"""Kernels that are found again without Triton's own lookup, which takes the host longer than the launch itself.

For every launch Triton binds arguments to names, describes each, and looks the compiled kernel up by all of that as
text. `Kernel` keeps what Triton launched under a shorter key, and launches it itself where the key comes again. The key
holds whatever Triton specializes on: the types of all arguments, the device, dtypes of tensors and which of their
addresses are multiples of 16, the values of integers and constants, and the options; of numbers that a kernel is not
specialized on (`tile.LENGTHS`), which take 64 bits.

Triton's check that no global constant has changed since a kernel was compiled is made for the first launch with a key
alone: these constants are those of the kernels' modules, which nothing sets once they are imported.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TRIED = ("3.6.", "3.7.")
"""Versions of Triton whose compiled kernels are launched as `Kernel` does it."""
SERVES = triton.__version__.startswith(TRIED)
MOST_KEYS = 1024
"""That are kept for a kernel and types of its arguments: then all are dropped, since most are of lengths gone by."""
ALIGNMENT = 16  # bytes
INT32_END = 2**31

_HERE = contextlib.nullcontext()
_dtype = attrgetter("dtype")
_Places = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""What stands at certain places of the arguments."""


class Recorder(Protocol):
    """Who hears of each launch of this package in a thread."""

    def launched(self, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...] | None) -> None:
        """What Triton compiled was launched; no arguments where these do not suffice to launch it again."""


class _Thread(threading.local):
    recorder: Recorder | None = None


thread = _Thread()
"""What each thread has of its own; `recording.py` sets the recorder."""


class Start(NamedTuple):
    """How a compiled kernel is launched: `launch(x, y, z, stream, *fixed, *arguments)`."""

    launch: Callable[..., object]
    fixed: tuple[Any, ...]
    packed: bool
    """Whether the kernel's arguments are passed as one tuple."""


def start(compiled: Any) -> Start:
    """How to launch a compiled kernel with the least time of the host.

    Triton's launcher, in Python, allocates scratch memory and calls a function in C. Kernels without scratch memory
    call that directly: 4 µs of the host in place of 5.
    """
    launcher, metadata = compiled.run, (compiled.packed_metadata, None, None, None)  # none for hooks, no two hooks
    if type(launcher) is not CudaLauncher or launcher.global_scratch_size or launcher.profile_scratch_size:
        return Start(launcher, (compiled.function, *metadata), packed=False)
    fixed, no_memory = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl), (None, None)
    if hasattr(launcher, "kernel_signature"):  # from Triton 3.7 on
        described = launcher.arg_annotations, launcher.kernel_signature
        return Start(launcher.launch, (*fixed, *metadata, *no_memory, *described), packed=True)
    return Start(launcher.launch, (*fixed, *no_memory, *metadata), packed=False)


class _Arguments(NamedTuple):
    """Arguments of one row of types, and what was launched with such."""

    tensors: _Places
    lengths: _Places
    """Numbers that the kernel is not specialized on."""
    values: _Places
    """Other numbers, and constants."""
    launched: dict[tuple[Any, ...], Any]
    """Triton's compiled kernels, by the rest of the key."""


class Kernel(JITFunction):  # type: ignore[misc] # Triton has no types
    """`triton.jit` of a function, not specialized on its arguments `lengths`."""

    def __init__(self, function: Callable[..., object], lengths: tuple[str, ...]) -> None:
        super().__init__(function, do_not_specialize=lengths)
        self._by_types: dict[tuple[type, ...], _Arguments | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        types = tuple(map(type, arguments))
        try:
            known = self._by_types[types]
        except KeyError:
            known = self._by_types[types] = self._of_types(types)
        if known is None or self.pre_run_hooks or observed():
            if thread.recorder is not None:
                thread.recorder.launched(None, grid, None)
            return self.run(*arguments, grid=grid, warmup=False, **options)
        active = driver.active
        device = active.get_current_device()
        tensors = known.tensors(arguments)
        key = (
            device,
            tuple(map(_dtype, tensors)),
            tuple([x.data_ptr() % ALIGNMENT == 0 for x in tensors]),
            tuple([-INT32_END <= length < INT32_END for length in known.lengths(arguments)]),
            known.values(arguments),
            *options.items(),
        )
        compiled = known.launched.get(key)
        if compiled is None:
            compiled = self.run(*arguments, grid=grid, warmup=False, **options)
            if launched := compiled is not None and compiled.function is not None:
                if len(known.launched) >= MOST_KEYS:
                    known.launched.clear()
                known.launched[key] = compiled
            if thread.recorder is not None:
                thread.recorder.launched(compiled, grid, arguments if launched else None)
            return compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        # as Triton does, with no metadata for hooks and no hooks
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
        if thread.recorder is not None:
            thread.recorder.launched(compiled, grid, arguments)
        return compiled

    def _of_types(self, types: tuple[type, ...]) -> _Arguments | None:
        """None where it is not known what Triton specializes on: other types, or not all arguments by position."""
        if len(types) != len(self.params):
            return None
        places: dict[str, list[int]] = {"tensors": [], "lengths": [], "values": []}
        for place, (parameter, kind) in enumerate(zip(self.params, types, strict=True)):
            if parameter.is_constexpr or (kind in (int, bool) and not parameter.do_not_specialize):
                places["values"].append(place)
            elif kind is int:
                places["lengths"].append(place)
            elif issubclass(kind, Tensor):
                places["tensors"].append(place)
            elif kind not in (float, type(None)):  # of which Triton looks at the type alone
                return None
        return _Arguments(**{name: _at(*found) for name, found in places.items()}, launched={})


def _at(*places: int) -> _Places:
    return itemgetter(*places) if len(places) > 1 else lambda arguments: tuple(arguments[place] for place in places)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch on the device of x, whichever is current."""
    here = not x.is_cuda or x.get_device() == torch.cuda.current_device()
    return _HERE if here else torch.cuda.device(x.device)


def observed() -> bool:
    """Whether someone is to hear of launches, or Triton compiles in a mode that can be changed between two of them."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # None, or a chain of hooks, or one hook
    heard = getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or runtime.add_stages_inspection_hook
    return bool(heard or runtime.debug or triton.knobs.compilation.instrumentation_mode)
