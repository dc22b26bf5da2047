"""The plans of a function, by all that its launches depend on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor
from triton.runtime import driver

from nsa.triton_backend import architecture, tuning
from nsa.triton_backend.launching import relaunch
from nsa.triton_backend.launching.plan import Plan, Tensors
from nsa.triton_backend.launching.recording import Memory, Recording, plan_of

MOST_PLANS = 256
"""Of a function: then all are dropped, since most are of lengths that will not come again."""


class Plans:
    """Calls a function of tensors, and of what can be hashed: by a plan from the second call of a key on.

    `memories` says where each tensor that it gives is to lie. The first call of a key is recorded, and takes longer.
    """

    def __init__(self, function: Callable[..., Tensors], memories: Sequence[Memory]) -> None:
        self.function, self.memories = function, memories
        self._known: dict[Hashable, Plan | None] = {}
        """None where the function cannot be planned."""
        _ALL.add(self)

    def forget(self) -> None:
        """Drop all."""
        self._known.clear()

    def keeping(self, given: Tensors, *more: Hashable) -> tuple[list[Tensor | None], Tensor, Plan] | None:
        """(the results, uint8 [kept_bytes], the plan whose `views` tell what lies there); None for a call that cannot
        be planned, or whose plan cannot be made while launches are observed."""
        key, observed = self._key(given, more), relaunch.observed()
        plan = self._known.get(key)
        if plan is not None and not observed:
            return *plan(given), plan
        if plan is None and (observed or key in self._known):
            return None
        outcome = self.function(given, *more) if observed else self._recorded(key, given, more)
        if (plan := plan or self._known[key]) is None:
            return None
        results = [x for x, memory in zip(outcome, self.memories, strict=True) if memory is Memory.RESULT]
        kept = [x for x, memory in zip(outcome, self.memories, strict=True) if memory is Memory.KEPT and x is not None]
        device = next(x.device for x in given if x is not None)
        return results, plan.copied(kept, device), plan

    def if_planned(self, given: Tensors, *more: Hashable) -> tuple[list[Tensor | None], Tensor, Plan] | None:
        """`keeping` of a call that has a plan already; None for any other, and while launches are observed."""
        if not self._known or relaunch.observed():
            return None
        plan = self._known.get(self._key(given, more))
        return None if plan is None else (*plan(given), plan)

    def __call__(self, given: Tensors, *more: Hashable) -> Tensors:
        """What the function gives, all of it results."""
        key = self._key(given, more)
        plan, observed = self._known.get(key), relaunch.observed()
        if plan is not None and not observed:
            return plan(given)[0]
        if observed or key in self._known:
            return self.function(given, *more)
        return self._recorded(key, given, more)

    def _key(self, given: Tensors, more: tuple[Hashable, ...]) -> Hashable:
        tensors = [x for x in given if x is not None]
        first = tensors[0]
        addresses = [x.data_ptr() for x in tensors]
        return (
            tuple([x if x is None else (x.shape, x.stride(), x.dtype) for x in given]),
            tuple([address % relaunch.ALIGNMENT == 0 for address in addresses]),
            tuple(map(addresses.index, addresses)),  # which are the same
            first.get_device(),
            driver.active.get_current_device(),
            _Identity(tuning.table(architecture.of(first.device))),
            more,
        )

    def _recorded(self, key: Hashable, given: Tensors, more: tuple[Hashable, ...]) -> Tensors:
        """What the function gives; its plan is known from here on."""
        with Recording() as recording:
            outcome = self.function(given, *more)
        if len(self._known) >= MOST_PLANS:
            self.forget()
        self._known[key] = plan_of(recording, given, outcome, self.memories)
        return outcome


class _Identity:
    """An object as a key: held, so that no other one gets its `id`."""

    __slots__ = ("it",)

    def __init__(self, it: object) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.it is self.it


_ALL: weakref.WeakSet[Plans] = weakref.WeakSet()


def forget_all() -> None:
    """Drop every plan: for tests, which change what a function does."""
    for plans in _ALL:
        plans.forget()
