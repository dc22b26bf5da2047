"""The interactive charts, as Python writes them, and the colours that they and the pages take."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.history import speedup, trend
from benchmarks.history.accepted import Acceptance
from benchmarks.history.records import Record
from benchmarks.history.store import Store
from benchmarks.history.trend import SeriesTrend
from benchmarks.report import pages, published
from benchmarks.report.machine_pages import case_pages, chart, length_charts, lengths, run_chart
from tests.benchmarks import full_results
from tests.benchmarks.report.test_figures import linear
from tests.benchmarks.synthetic import key, passed

STYLE = Path(pages.__file__).parent / "templates" / "style.css"


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> SeriesTrend:
    """A case with a change and another driver."""
    results = tmp_path_factory.mktemp("results")
    full_results.write_runs(results, 12)
    history = [one for one in Store(results).history("h200") if one.newest.key.mode == "decode"]
    return trend.follow(history)[0]


def drawn(one: SeriesTrend, acceptance: Acceptance | None = None, known: Any = ()) -> dict[str, Any]:
    numbers = {point.utc: number for number, point in enumerate(one.series.points)}
    return run_chart.over_runs(one, numbers, acceptance, known)


def trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in figure["data"] if one["name"] == name)


def test_one_picture_has_nsa_dense_limit_and_accepted_level(decode: SeriesTrend) -> None:
    newest = decode.series.points[-1]
    accepted = Acceptance("2026-01-02T00:00:00Z", "A", "why", "h200", "NVIDIA H200", "c", newest.latency_ms, None)
    figure = drawn(decode, accepted)
    cut = full_results.NEW_DRIVER_FROM
    assert trace(figure, "NSA")["y"][cut] is None, "the line breaks where the driver changed"
    assert trace(figure, "NSA")["customdata"] == [*range(cut), None, *range(cut, 12)]
    assert newest.tokens_per_s is not None
    assert trace(figure, "accepted level")["y"] == [pytest.approx(newest.tokens_per_s, rel=1e-4)] * 2
    dense = trace(figure, "best dense baseline")
    assert set(filter(None, dense["text"])) == {"flash-attn-4"}
    assert dense["y"][-1] == pytest.approx(
        newest.tokens_per_s * newest.latency_ms / newest.dense_ms["flash-attn-4"], rel=1e-4
    )
    assert newest.share_of_limit is not None
    limit = trace(figure, "limit (100 %)")["y"][-1]
    assert limit == pytest.approx(newest.tokens_per_s / newest.share_of_limit, rel=1e-4)
    (slower,) = trace(figure, "slower")["text"]
    commit = str(full_results.run_of(full_results.SLOWER_FROM).commit)[:7]
    assert re.fullmatch(rf"<b>[78]\.\d % slower</b> {commit}", slower.replace("\u00a0", " "))
    assert "driver 555.42.02 -&gt; 560.35.03" in trace(figure, "conditions changed")["hovertext"][0]


def test_a_figure_that_is_not_to_be_relied_on_is_hollow_and_says_why(decode: SeriesTrend) -> None:
    points = [dataclasses.replace(point, reservations=()) for point in decode.series.points]
    points[2] = dataclasses.replace(points[2], reservations=("one sample <b>",))
    one = dataclasses.replace(decode, series=dataclasses.replace(decode.series, points=points))
    nsa = trace(drawn(one), "NSA")
    assert [number for number, symbol in enumerate(nsa["marker"]["symbol"]) if symbol == "circle-open"] == [2]
    assert nsa["text"][2].endswith("<br>○ one sample &lt;b&gt;")


def test_published_figures_are_off_until_they_are_asked_for(decode: SeriesTrend) -> None:
    source = published.PublishedSource("survey", "A survey", "NVIDIA H200", "h200")
    tokens = decode.series.newest.key.num_keys
    known = published.PublishedSeries(
        source, "decode", "NSA of others", "tokens/s", (tokens,), ((9.0, 9.0),), shape=(64, 4, 128, 128)
    )
    theirs = trace(drawn(decode, known=[known]), "published: NSA of others (survey, NVIDIA H200)")
    assert theirs["visible"] == "legendonly"
    assert theirs["y"] == [9.0, 9.0]


def test_one_run_alone_has_a_chart(decode: SeriesTrend) -> None:
    series = dataclasses.replace(decode.series, points=decode.series.points[:1])
    (one,) = trend.follow([series])
    assert len(trace(drawn(one), "NSA")["x"]) == 1


def test_curves_over_the_length_say_which_runs_they_join() -> None:
    runs = [passed(key(length=64), utc="2026-01-02T03:04:05Z"), passed(key(length=128), utc="2026-01-03T03:04:05Z")]
    assert length_charts.joined_runs(runs[:1]) == "All of one run: 2026-01-02 03:04 (0123456)."
    wanted = (
        "Joined from 2 runs, each ratio within one of them: 2026-01-03 03:04 (0123456), 2026-01-02 03:04 (0123456)."
    )
    assert length_charts.joined_runs(runs) == wanted


def test_a_curve_has_throughput_speed_up_and_share(tmp_path: Path) -> None:
    found = []
    for length in (64, 128):
        found += [passed(key(implementation="sdpa-flash", length=length), 30.0), passed(key(length=length), 10.0)]
    (group,) = lengths.groups(speedup.comparisons(found))
    figure = length_charts.over_lengths(group, "cpu", [])
    assert figure is not None
    axes = {(one["name"], one["yaxis"]): one["y"] for one in figure["data"]}
    assert axes["sdpa-flash", "y2"] == [3.0, 3.0]
    assert axes["nsa", "y"] == [pytest.approx(6400.0), pytest.approx(12800.0)]
    one_length = lengths.groups(speedup.comparisons(found[:2]))[0]
    assert length_charts.over_lengths(one_length, "cpu", []) is None


def parts(*shares: float) -> list[Record]:
    """Parts of a forward of 10 ms, with so much of its time each."""
    names = ("part-scores", "part-selected", "part-window")
    measured = [passed(key(name), 10.0 * share) for name, share in zip(names, shares, strict=False)]
    return [passed(key(), 10.0), *measured]


@pytest.mark.parametrize(("shares", "said"), [((0.5, 0.4), False), ((0.5, 0.4, 0.3), True)])
def test_parts_that_sum_to_more_than_the_whole_say_why(shares: tuple[float, ...], said: bool) -> None:
    note = length_charts.parts_and_whole(lengths.groups(speedup.comparisons(parts(*shares))))
    assert ("64: 12 ms beside 10 ms" in note and "Each part is timed alone" in note) == said
    assert bool(note) == said


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([3.0, 40.0], ["5", "10", "20"]), ([1.0, 3.0], ["1", "2"]), ([None, 2900.0, 3100.0], None), ([], None)],
)
def test_a_logarithmic_axis_has_ticks_that_can_be_read(values: list[float | None], ticks: list[str] | None) -> None:
    axis = chart.log_axis(values)
    assert axis.get("ticktext") == ticks
    assert ("nticks" in axis) == (ticks is None)


def test_no_text_ends_the_element_that_holds_a_chart() -> None:
    text = "</script><script>alert(1)</script>"
    inside = case_pages.json_for_page({"name": text})
    assert "<" not in inside
    assert json.loads(inside)["name"] == text
    assert chart.safe("<a href='x'>&") == "&lt;a href='x'&gt;&amp;"


def schemes() -> dict[str, dict[str, str]]:
    """Custom properties of the style sheet by scheme."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)
    named = [dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block)) for block in (light, dark)]
    return {"light": named[0], "dark": named[1]}


def luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("behind", ["--paper", "--raised"])
def test_every_text_can_be_read(scheme: str, behind: str) -> None:
    colours = schemes()[scheme]
    for name in ("--ink", "--faint", "--link", "--bad", "--good", "--warn"):
        low, high = sorted((luminance(colours[name]), luminance(colours[behind])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_both_schemes_know_every_colour_of_a_chart(decode: SeriesTrend) -> None:
    used = set(re.findall(r"var\((--[\w-]+)\)", json.dumps([drawn(decode), length_charts._COLOURS])))
    assert used - {"--band"} <= set(schemes()["light"])
    assert set(schemes()["light"]) == set(schemes()["dark"])
