"""Laws that an attention obeys whatever its inputs, tried on a contender as it is called, before anything is timed.

The oracle compares a few rows of the inputs that are timed; these laws tell what kind of fault it is that a contender
has. They are tried on two short sequences of the case's own heads, head sizes, dtype and settings, short enough for
every block to be selected: rounding then decides no choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import inputs
from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import OracleCheck
from benchmarks.correctness import tolerance
from benchmarks.correctness.verify import IncorrectError, require_finite
from nsa import NSAConfig

Attend = Callable[[Problem], Tensor]
SHORT_TOKENS = 512
SEQUENCES = 2
_LOUD = 16.0
"""By how much what a row may not see is larger than the rest."""


def short(key: Key) -> Key:
    """The prefill that the laws are tried on, for a case of this key."""
    selected = key.config["l_sel"] * key.config["n_sel"] if key.config is not None else SHORT_TOKENS
    tokens = min(key.num_keys, SHORT_TOKENS, selected)
    return dataclasses.replace(
        key,
        mode="prefill-forward",
        batch=SEQUENCES,
        num_queries=tokens,
        num_keys=tokens,
        launch="eager",
        inputs="random",
    )


def check(attend: Attend, key: Key, device: str, *, serves: Callable[[Key], bool]) -> tuple[OracleCheck, ...]:
    """Each law that applies, passed; none where the short prefill is not served. Raises IncorrectError naming the
    first that is broken, NonFiniteError where an output is not finite."""
    prefill = short(key)
    if not serves(prefill):
        return ()
    problem = inputs.draw(prefill, device)
    with torch.no_grad():
        o = attend(problem)
        _require_form(o, problem)
        require_finite("o", o)
        laws = {"causality": _causality, "batch": _batch}
        if serves(_step(prefill)):
            laws["decode"] = _decode
        if key.config is not None:
            laws["gates"] = _gates
        return tuple(_passed(name, law(attend, prefill, problem, o), o.dtype) for name, law in laws.items())


def _step(prefill: Key) -> Key:
    return dataclasses.replace(prefill, mode="decode", num_queries=1)


def _require_form(o: object, problem: Problem) -> None:
    """Raises IncorrectError unless it is a tensor of the shape, dtype and device that are asked for."""
    wanted = (*problem.q.shape[:3], problem.v.shape[3])
    if not isinstance(o, Tensor):
        raise IncorrectError(f"law form: a tensor {list(wanted)} was to be returned; got {type(o).__name__}")
    for what, found, right in (
        ("shape", list(o.shape), list(wanted)),
        ("dtype", o.dtype, problem.q.dtype),
        ("device", o.device, problem.q.device),
    ):
        if found != right:
            raise IncorrectError(f"law form: the {what} of the output must be {right}; got {found}")


def _passed(name: str, error: float, dtype: torch.dtype) -> OracleCheck:
    budget = tolerance.FORWARD_FACTOR * max(torch.finfo(dtype).eps, tolerance.LEAST_ERROR)
    found = tolerance.check(f"law {name}", error, budget)
    if not found.passed:
        raise IncorrectError(f"law {name}: error {error:.2e} > budget {budget:.2e}: {_MEANING[name]}")
    return found


_MEANING = {
    "causality": "rows change with tokens that come after them",
    "batch": "a sequence gives something else alone than beside another",
    "decode": "the last token alone gives something else than as the last row of a prefill",
    "gates": "twice the gates do not give twice the output",
}


def _causality(attend: Attend, key: Key, problem: Problem, o: Tensor) -> float:
    half = key.num_keys // 2
    other = problem.map(torch.clone)
    for x in other.tensors.values():
        x[:, half:] = _LOUD * x[:, half:].flip(1)
    return _error(attend(other)[:, :half], o[:, :half])


def _batch(attend: Attend, key: Key, problem: Problem, o: Tensor) -> float:
    return _error(attend(problem.map(lambda x: x[1:].contiguous())), o[1:])


def _decode(attend: Attend, key: Key, problem: Problem, o: Tensor) -> float:
    last = dataclasses.replace(problem, q=problem.q[:, -1:].contiguous(), gates=problem.gates[:, -1:].contiguous())
    if key.config is not None:
        last = inputs.with_compressed(last, NSAConfig.from_mapping(key.config))
    return _error(attend(last), o[:, -1:])


def _gates(attend: Attend, key: Key, problem: Problem, o: Tensor) -> float:
    return _error(attend(dataclasses.replace(problem, gates=2 * problem.gates)), 2 * o)


def _error(found: Tensor, wanted: Tensor) -> float:
    """The worst row, relative to the size of a typical one; NaN where it is not finite."""
    if found.shape != wanted.shape:
        raise IncorrectError(f"law form: the shape of the output must be {list(wanted.shape)}; got {list(found.shape)}")
    off = torch.linalg.vector_norm(found.double() - wanted.double(), dim=-1)
    size = torch.linalg.vector_norm(wanted.double(), dim=-1)
    tiny = torch.finfo(torch.float64).tiny
    return (off / torch.maximum(size, size.square().mean().sqrt()).clamp(min=tiny)).amax().item()
