"""A trainer of the product whose gradients are not finite, for the detectors that must see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa.train.settings import Settings
from nsa.train.trainer import Trainer


def fill_gradients_of_one_weight(monkeypatch: pytest.MonkeyPatch, value: float, precision: str | None = None) -> None:
    """Every gradient of one weight is `value`, in runs of this precision or of any."""
    healthy = Trainer.__init__

    def with_hook(self: Trainer, settings: Settings, *given: Any) -> None:
        healthy(self, settings, *given)
        if precision in (None, settings.runtime.precision):
            next(self.lm.parameters()).register_hook(lambda grad: torch.full_like(grad, value))

    monkeypatch.setattr(Trainer, "__init__", with_hook)
