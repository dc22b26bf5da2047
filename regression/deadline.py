"""How long a child may be silent, scaled from its own pace; nothing is a fixed number of seconds but the floors."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

IMPORT_FLOOR_S = 60.0
IMPORTS_PER_FIRST_STEP = 30
"""The first step may compile kernels: as many times the child's own import as this, which scales with the machine."""
MEDIANS_PER_STEP = 10
LONGEST_PER_STEP = 3
IMPORTS_PER_STEP = 2


@dataclass
class Deadline:
    """Fed with the child's own clock, asked for the silence that is allowed next."""

    floor_s: float
    """Silence between two steps that never counts as a stall."""
    known_import_s: float = 0.0
    """What importing took elsewhere on this machine; 0 where it is not known."""
    import_s: float | None = None
    """What it took in this child."""
    first_step_s: float | None = None
    """Import to first step: compilation, first batch."""
    steps_s: list[float] = field(default_factory=list)
    """Each later step."""
    _last: float | None = None

    def imported(self, at: float, import_s: float) -> None:
        """The child has imported what it needs, at this time of its monotonic clock."""
        self.import_s, self._last = import_s, at

    def step(self, at: float) -> None:
        """A heartbeat."""
        if self._last is not None:
            took = max(at - self._last, 0.0)
            if self.first_step_s is None:
                self.first_step_s = took
            else:
                self.steps_s.append(took)
        self._last = at

    @property
    def allowed_s(self) -> float:
        """Silence after which the child counts as stalled."""
        if self.import_s is None:
            return max(IMPORT_FLOOR_S, IMPORTS_PER_FIRST_STEP * self.known_import_s)
        if self.first_step_s is None:
            return max(self.floor_s, IMPORTS_PER_FIRST_STEP * self.import_s)
        if not self.steps_s:  # the first step's length says little of the next one's, unless it was long
            return max(self.floor_s, IMPORTS_PER_STEP * self.import_s, LONGEST_PER_STEP * self.first_step_s)
        return max(
            self.floor_s,
            IMPORTS_PER_STEP * self.import_s,
            MEDIANS_PER_STEP * statistics.median(self.steps_s),
            LONGEST_PER_STEP * max(self.steps_s),
        )

    @property
    def longest_s(self) -> float | None:
        """The longest silence after the import; None before the first step."""
        return None if self.first_step_s is None else max(self.first_step_s, *self.steps_s, 0.0)
