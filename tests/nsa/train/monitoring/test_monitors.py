"""Every monitor raises its alarm on its fault and stays quiet on a healthy run; noise has no step and no slope."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.monitoring import monitors

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


def noise(n: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [100 + draw.gauss(0, 2) for _ in range(n)]


def test_a_step_is_found_where_it_is() -> None:
    found = monitors.change_point([*noise(40, 1), *(x - 10 for x in noise(60, 2))])
    assert found is not None
    assert abs(found.index - 40) <= 2
    assert found.p_value < 1e-6
    assert found.relative == pytest.approx(-0.1, abs=0.02)


def test_noise_has_no_change() -> None:
    """Of 200 series without a change about one in 20 splits at p < 0.05, and none at the level that alarms."""
    p_values = [found.p_value for seed in range(200) if (found := monitors.change_point(noise(60, seed)))]
    assert sum(p < 0.05 for p in p_values) <= 20
    assert min(p_values) > 1e-3


@pytest.mark.parametrize("series_of", [[], [1.0], [1.0, 2.0, 3.0]])
def test_too_short_to_split(series_of: list[float]) -> None:
    assert monitors.change_point(series_of) is None


def test_a_constant_series_does_not_split() -> None:
    found = monitors.change_point([5.0] * 50)
    assert found is not None
    assert found.p_value == 1


@given(st.floats(-3, 3), st.integers(2, 1000))
def test_slope_of_a_line(rise: float, n: int) -> None:
    """Also through thinning, in units of the points that came in."""
    assert monitors.slope([7 + rise * i for i in range(n)]) == pytest.approx(rise, abs=1e-9)


def test_slope_ignores_wild_points() -> None:
    points = [float(i) for i in range(100)]
    points[10:35] = [1e6] * 25
    assert monitors.slope(points) == pytest.approx(1, abs=0.1)


def test_slope_of_one_point_is_unknown() -> None:
    assert monitors.slope([3.0]) is None


@given(st.integers(0, 2000))
def test_thinned_to_few(n: int) -> None:
    thinned, stride = monitors.thin([float(i) for i in range(n)])
    assert len(thinned) <= monitors.MAX_POINTS
    assert n - stride < len(thinned) * stride <= n


@pytest.mark.parametrize(("n", "known"), [(3, False), (21, False), (22, True), (300, True)])
def test_a_fall_that_chance_could_always_explain_is_unknown(n: int, known: bool) -> None:
    fallen = [100.0 + 0.01 * i for i in range(n // 2)] + [50.0 + 0.01 * i for i in range(n - n // 2)]
    assert (monitors.fall(fallen) is not None) == known
    if known:
        assert monitors.fall(fallen) == pytest.approx(0.5, abs=0.1)
