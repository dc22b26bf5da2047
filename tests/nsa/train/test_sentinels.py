"""Every sentinel fires on its fault and stays quiet on a healthy run."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nsa.train import monitors

LN3 = math.log(3)


def test_too_good_fires_where_the_future_is_seen() -> None:
    """The field report's leak: 1.379 nats on random tokens of an alphabet of 16."""
    alarm = monitors.too_good(1.379, 16, 1000)
    assert alarm is not None
    assert "1.3790" in alarm.why


@pytest.mark.parametrize("confidence", [1.0, 4.0, 16.0])
def test_too_good_is_quiet_for_any_honest_model(confidence: float) -> None:
    """Logits that know nothing of the targets, however sure of themselves, never get below the floor."""
    torch.manual_seed(0)
    for _ in range(200):
        logits, targets = confidence * torch.randn(64, 16), torch.randint(16, (64,))
        loss = torch.nn.functional.cross_entropy(logits, targets).item()
        assert monitors.too_good(loss, 16, 64) is None


def test_too_good_allows_for_few_tokens() -> None:
    """One token can be guessed; a thousand cannot."""
    assert monitors.too_good(2.0, 16, 1) is None
    assert monitors.too_good(2.0, 16, 1000) is not None
    assert monitors.too_good(math.nan, 16, 1000) is None, "non_finite speaks of that"


def test_loss_floor_refuses_no_tokens() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 1; got 16 and 0"):
        monitors.loss_floor_nats(16, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite(value: float) -> None:
    assert monitors.non_finite({"loss": 1.0, "grad_norm": None}) is None
    alarm = monitors.non_finite({"loss": 1.0, "grad_norm": value})
    assert alarm is not None
    assert "grad_norm" in alarm.why


def test_silence_is_scaled_from_the_steps() -> None:
    assert monitors.silence(780, [51.0] * 5) is not None
    assert monitors.silence(170, [51.0] * 5) is None, "slow, not stalled"
    assert monitors.silence(29, [0.1] * 5) is None, "below the floor"
    assert monitors.silence(31, [0.1] * 5) is not None
    assert monitors.silence(31, []) is not None


def throughput(n: int, factor: float = 1.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [9300 * factor * (1 + draw.gauss(0, 0.03)) for _ in range(n)]


def test_throughput_drift_fires_on_a_step_and_on_a_slow_fall() -> None:
    assert monitors.throughput_drift([*throughput(60), *throughput(60, 0.85)]) is not None
    fading = [x * (1 - 0.15 * i / 400) for i, x in enumerate(throughput(400))]
    assert monitors.throughput_drift(fading) is not None


def test_throughput_drift_is_quiet() -> None:
    for seed in range(50):
        assert monitors.throughput_drift(throughput(120, seed=seed)) is None
    assert monitors.throughput_drift([*throughput(60), *throughput(60, 1.2)]) is None, "faster"
    assert monitors.throughput_drift([*throughput(60), *throughput(60, 0.95)]) is None, "within the tolerance"
    dips = throughput(120)
    dips[::20] = [1000.0] * 6  # a checkpoint now and then
    assert monitors.throughput_drift(dips) is None


def test_memory_slope() -> None:
    draw = random.Random(0)
    flat = [3000 + draw.random() * 50 for _ in range(200)]
    assert monitors.memory_slope(flat, limit_mib_per_step=0.1) is None
    assert monitors.memory_slope([*flat[:50], *(x + 500 for x in flat)], limit_mib_per_step=0.1) is None, "one level up"
    late = [x + 0.5 * max(0, i - 100) for i, x in enumerate(flat)]
    assert monitors.memory_slope(late, limit_mib_per_step=0.1) is not None, "a leak that begins in the middle"
    for at in (100, 125, 150, 175):
        once = [x + 500 * (i >= at) for i, x in enumerate(flat)]
        assert monitors.memory_slope(once, limit_mib_per_step=0.2) is None, "one level up, late"
    creeping = [x + 0.5 * i for i, x in enumerate(flat)]
    assert monitors.memory_slope(creeping, limit_mib_per_step=0.1) is not None
    assert monitors.memory_slope(creeping[:20], limit_mib_per_step=0.1, grown_mib=50) is None, "too little to tell"


def test_gates() -> None:
    """The two ends: untrained, and collapsed. The field report called the first one healthy."""
    assert monitors.gates_uniform(LN3) is not None
    assert monitors.gates_uniform(0.95) is None
    assert monitors.gates_collapsed([0.3], [0.8]) is not None
    assert monitors.gates_collapsed([0.6], [0.95]) is not None
    assert monitors.gates_collapsed([0.95], [0.5]) is None
    assert monitors.gates_collapsed([LN3], [1 / 3]) is None


def test_gates_that_vary_a_little_are_not_uniform() -> None:
    torch.manual_seed(0)
    gates = 0.5 * (1 + 0.06 * (2 * torch.rand(64, 8, 3) - 1))
    shares = gates / gates.sum(-1, keepdim=True)
    assert monitors.gates_uniform(float(torch.special.entr(shares).sum(-1).mean())) is None
    assert monitors.gates_uniform(float(torch.special.entr(torch.full((64, 3), 1 / 3)).sum(-1).mean())) is not None


def test_collapse_is_decided_per_head() -> None:
    """Of all heads together the entropy would be 0.6 nats."""
    alarm = monitors.gates_collapsed([0.01] * 9 + [LN3] * 11, [0.99] * 9 + [1 / 3] * 11)
    assert alarm is not None
    assert "in 9 of 20 heads" in alarm.why
    assert monitors.gates_collapsed([0.01] * 2 + [LN3] * 18, [0.99] * 2 + [1 / 3] * 18) is None, "a specialist or two"


def test_selection_at_maximum() -> None:
    assert monitors.selection_at_maximum(0.75, 0.75) is None
    lost, counted = monitors.selection_at_maximum(0.70, 0.75), monitors.selection_at_maximum(0.80, 0.75)
    assert lost is not None
    assert "lost" in lost.why
    assert counted is not None
    assert "duplicates" in counted.why


def test_missing_gradients() -> None:
    norms = {"q.weight": 0.3, "compress_k.weight": None, "gates.weight": 0.0}
    alarm = monitors.missing_gradients(norms)
    assert alarm is not None
    assert "compress_k.weight" in alarm.why
    assert "gates.weight" in alarm.why
    assert monitors.missing_gradients({"q.weight": 0.3}) is None
