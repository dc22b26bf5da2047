"""The pictures: every line told apart in any colour vision and in print, published figures apart from measured ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from benchmarks.history import speedup
from benchmarks.history.store import LatencySeries, Store
from benchmarks.history.trend import Change
from benchmarks.report import labels, style
from benchmarks.report.folder import ReportFolder
from benchmarks.report.machine_pages import lengths, trends
from benchmarks.report.machine_pages.trends import Boundary, Scale, TrendRow
from benchmarks.report.references import Reference
from tests.benchmarks import full_results
from tests.benchmarks.synthetic import key, passed

# Complete deuteranopia and protanopia on linear RGB: Machado, Oliveira and Fernandes, IEEE TVCG 15 (2009), table 1.
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
NORMAL = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
CLEARLY_APART = 10.0
"""CIE 1976 distance; about 2.3 is just noticeable."""


def linear(colour: str) -> list[float]:
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]


def seen_as(colour: str, vision: Sequence[Sequence[float]]) -> list[float]:
    rgb = linear(colour)
    return [min(1.0, max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True)))) for row in vision]


def lab(rgb: Sequence[float]) -> tuple[float, float, float]:
    """Linear sRGB to CIE L*a*b*, D65."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [sum(a * b for a, b in zip(row, rgb, strict=True)) / w for row, w in zip(to_xyz, white, strict=True)]
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def distance(one: str, other: str, vision: Sequence[Sequence[float]]) -> float:
    pairs = zip(lab(seen_as(one, vision)), lab(seen_as(other, vision)), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


@pytest.mark.parametrize("vision", [NORMAL, DEUTERANOPIA, PROTANOPIA], ids=["normal", "deuteranopia", "protanopia"])
def test_colours_are_apart_in_any_colour_vision(vision: Sequence[Sequence[float]]) -> None:
    too_near = {
        (one, other): round(distance(one, other, vision), 1)
        for one, other in itertools.combinations(style.COLOURS, 2)
        if distance(one, other, vision) < CLEARLY_APART
    }
    assert not too_near


def test_red_and_green_would_not_be() -> None:
    assert distance("#c00000", "#407000", DEUTERANOPIA) < CLEARLY_APART < distance("#c00000", "#407000", NORMAL)


def test_marker_and_dash_alone_tell_lines_apart_in_print() -> None:
    looks = [(style.nth(number)["marker"], style.nth(number)["linestyle"]) for number in range(32)]
    assert len(set(looks)) == 32
    known = [style.of_implementation(name) for name in style.IMPLEMENTATIONS]
    assert len({(one["marker"], one["linestyle"]) for one in known}) == len(known)


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that an album saves from here on."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keeping(figure: Figure, *arguments: object, **options: object) -> None:
        if figure not in figures:
            figures.append(figure)
        save(figure, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keeping)
    return figures


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for axis in figure.axes for text in axis.texts)


@pytest.fixture
def history(tmp_path: Path) -> list[LatencySeries]:
    full_results.write_runs(tmp_path, 12)
    opened = Store(tmp_path)
    return [one for one in opened.history("h200") if one.newest.key.mode == "decode"]


def test_a_trend_shows_band_change_boundary_and_reference(
    history: list[LatencySeries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(monkeypatch)
    level = history[0].points[-1].tokens_per_s or 0.0
    near = Reference("a", "published: a (x)", [(8192, level * 1.01)])
    far = Reference("a", "published: a (y)", [(8192, level * 9)])
    changes = [Change(full_results.SLOWER_FROM, 0.08, True), Change(11, -0.02, False)]
    marked = [Boundary(history[0].points[full_results.NEW_DRIVER_FROM].utc, ("driver 555 -> 560",))]
    row = TrendRow("8k", history[0], changes, [near, far])
    (picture,) = trends.draw(ReportFolder(tmp_path), "h200", "Decode", [row], marked)
    (axis,) = figures[0].axes
    assert len(axis.collections) == 1, "the band"
    said = texts(figures[0]).replace("\u00a0", " ")
    assert "−7.4 %\n" in said
    assert "+2.0 %?" in said
    assert "published: a (x)" in said
    assert "published, out of sight: a 218k" in said, "the far one in words"
    dashed = [line for line in axis.lines if list(line.get_xdata()) == [full_results.NEW_DRIVER_FROM - 0.5] * 2]
    assert len(dashed) == 1
    assert (tmp_path / picture.svg).is_file()


def test_a_row_has_a_scale_of_its_own_that_no_reference_flattens(history: list[LatencySeries]) -> None:
    far = Reference("a", "published: a (y)", [(8192, 1e9)])
    for row in (TrendRow("8k", history[0], [], []), TrendRow("8k", history[0], [], [far])):
        scale = Scale.of(row, bottom=-3)
        heights = scale.all(point.tokens_per_s or 0.0 for point in row.series.points)
        assert -2.83 < min(heights) < -2.7
        assert -2.16 < max(heights) < -2.05
        assert 0.04 < scale.reach < 0.06
    assert str(Scale(0, 2.02e6, 0.08)) == "2.02M/s ±8\u00a0%"


def test_the_words_on_published_figures_lie_on_nothing(
    history: list[LatencySeries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of lines near one another lay on one another, and on the line that was measured."""
    figures = drawn(monkeypatch)
    rows = []
    for one in history[:2]:
        level = one.points[-1].tokens_per_s or 0.0
        near = [Reference("a", f"published: a ({n})", [(8192, level * (1 + n / 1000))]) for n in range(3)]
        rows.append(TrendRow("8k", one, [], near))
    trends.draw(ReportFolder(tmp_path), "h200", "Decode", rows, [])
    (axis,) = figures[0].axes
    words = [text.get_window_extent() for text in axis.texts]
    assert len(words) == 6
    assert not any(one.overlaps(other) for one, other in itertools.combinations(words, 2))
    lines = [line.get_path().transformed(axis.transData) for line in axis.lines if len(line.get_xdata()) > 2]
    assert not any(line.intersects_bbox(box, filled=False) for line in lines for box in words)


def test_many_cases_take_several_pictures(history: list[LatencySeries], tmp_path: Path) -> None:
    rows = [TrendRow(str(number), one, [], []) for number, one in enumerate(history * 3)]
    pictures = trends.draw(ReportFolder(tmp_path), "h200", "Decode", rows, [])
    assert [picture.title.partition(":")[0] for picture in pictures] == ["Decode (1 of 2)", "Decode (2 of 2)"]


def test_the_whole_name_of_a_row_stands_on_its_picture(
    history: list[LatencySeries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of most committed records were cut at the left edge."""
    figures = drawn(monkeypatch)
    name = "8k x 256 sequences, bfloat16, recorded inputs (atlas e4fe0fa0f0), cold, graph"
    trends.draw(ReportFolder(tmp_path), "h200", "Decode", [TrendRow(name, history[0], [], [])], [])
    (figure,) = figures
    (tick,) = figure.axes[0].get_yticklabels()
    box = tick.get_window_extent()
    assert box.x0 > 0
    assert box.height < trends._ROW_INCH * figure.dpi
    assert " ".join(tick.get_text().split("\n")[:-1]) == name


def test_changes_of_a_few_runs_stand_on_both_sides_of_the_line(
    history: list[LatencySeries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(monkeypatch)
    changes = [Change(2, -0.1, True), Change(3, -0.05, True), Change(4, 0.2, True)]
    trends.draw(ReportFolder(tmp_path), "h200", "Decode", [TrendRow("8k", history[0], changes, [])], [])
    boxes = [text.get_window_extent() for text in figures[0].axes[0].texts]
    assert len(boxes) == 3
    assert not any(boxes[a].overlaps(boxes[b]) for a, b in ((0, 1), (1, 2), (0, 2)))


def test_one_run_is_no_trend(history: list[LatencySeries], tmp_path: Path) -> None:
    alone = LatencySeries(history[0].newest, history[0].points[:1])
    assert trends.draw(ReportFolder(tmp_path), "h200", "Decode", [TrendRow("8k", alone, [], [])], []) == []


def test_runs_are_parted_where_they_are_not_comparable(tmp_path: Path) -> None:
    runs = [full_results.run_of(number) for number in range(6)]
    (boundary,) = trends.boundaries(runs)
    assert boundary.utc == runs[full_results.NEW_DRIVER_FROM].utc
    assert boundary.differences == ("driver 555.42.02 -> 560.35.03",)


def test_labels_survive_whatever_a_record_says() -> None:
    assert style.drawable("a\x00b\n漢" + "x" * 99, 10) == "a?b??xx..."
    assert [style.in_k(x) for x in (512, 1000, 1024, 65536)] == ["512", "1000", "1k", "64k"]
    assert [style.in_short(x) for x in (0.5, 12_000, 3.04e6)] == ["0.5", "12k", "3.04M"]


def test_a_group_keeps_the_largest_batch_of_each_length(tmp_path: Path) -> None:
    found = [passed(key("decode", length=length, batch=batch)) for length in (128, 64) for batch in (1, 8, 2)]
    (group,) = lengths.groups(speedup.comparisons(found))
    assert [(one.nsa.key.num_keys, one.nsa.key.batch) for one in group.compared] == [(64, 8), (128, 8)]
    assert group.label == "4x2x16 float32 random inputs"


def test_every_ratio_names_its_inputs() -> None:
    """Random and recorded ones are other groups, with other words; those of a train step are a text."""
    kinds = ("random", "recorded", "recorded-p90", "local")
    found = [passed(key(inputs=kind, launch="graph", length=length)) for kind in kinds for length in (64, 128)]
    named = [group.label for group in lengths.groups(speedup.comparisons(found))]
    assert sorted(named) == sorted(f"4x2x16 float32 {kind} inputs graph" for kind in kinds)
    assert labels.details(found[2]) == "float32, recorded inputs, graph"
    assert labels.details(passed(key(num_queries=16, length=64))) == "float32, random inputs, q16"
    assert labels.details(passed(key("train-step", model="125m"))) == "float32"


def test_a_line_over_lengths_is_on_inputs_of_one_table() -> None:
    follow = {64: "trained; study of commit abc0123 on a GPU", 128: "median; atlas of cpu, 2026-01-02, commit def4567"}
    found = [
        dataclasses.replace(passed(key(inputs="recorded", length=at)), inputs_follow=said)
        for at, said in follow.items()
    ]
    named = [group.label for group in lengths.groups(speedup.comparisons(found))]
    assert sorted(named) == [
        "4x2x16 float32 recorded inputs (atlas def4567)", "4x2x16 float32 recorded inputs (study abc0123)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batches", "wanted", "axis_label"),
    [
        ({4096: 1, 8192: 256}, ["4k\n× 1", "8k\n× 256"], "length in tokens × sequences"),
        ({4096: 1, 8192: 1}, ["4k", "8k"], "length in tokens"),
        ({}, ["4k", "8k"], "length in tokens"),
    ],
)
def test_lengths_name_their_sequences_where_they_differ(
    batches: dict[int, int], wanted: list[str], axis_label: str
) -> None:
    axis = Figure().subplots()
    style.over_lengths(axis, [4096, 8192], batches)
    assert [label.get_text() for label in axis.get_xticklabels()] == wanted
    assert axis.get_xlabel() == axis_label
