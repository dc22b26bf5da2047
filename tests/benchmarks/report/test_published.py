"""What others published is read strictly, and says where it is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import published
from benchmarks.report.published import PublishedSeries
from harness.repository import ROOT

GOOD = """
[sources.paper]
title = "A paper"
gpu = "NVIDIA A100"
machine = "a100"

[[series]]
source = "paper"
mode = "prefill-forward"
of = "nsa"
against = "flash-attn"
unit = "ratio"
shape = [64, 4, 192, 128]
tokens = [8192, 16384]
values = [2, [3.5, 4.0]]
"""


def read(folder: Path, text: str) -> list[PublishedSeries]:
    file = folder / "published.toml"
    file.write_text(text)
    return published.read(file)


def find(**wanted: object) -> list[PublishedSeries]:
    everything = published.read(published.path(ROOT / "results"))
    return [series for series in everything if all(getattr(series, name) == value for name, value in wanted.items())]


def test_reads_a_number_and_a_range(tmp_path: Path) -> None:
    (series,) = read(tmp_path, GOOD)
    assert (series.source.title, series.source.machine, series.source.software) == ("A paper", "a100", None)
    assert (series.tokens, series.values) == ((8192, 16384), ((2.0, 2.0), (3.5, 4.0)))
    assert (series.batch, series.dtype, series.expected) == (None, None, False)


def test_the_figures_of_this_repository_can_be_read() -> None:
    (forward,) = find(mode="prefill-forward", unit="ratio")
    assert forward.source.machine == "a100"
    assert dict(zip(forward.tokens, forward.values, strict=True))[65536] == (9.0, 9.0)
    (reported,) = (series for series in find(mode="train-step") if series.source.id == "report-a100-50k")
    assert (reported.unit, reported.values) == ("tokens/s", ((9200.0, 9400.0),))
    assert all(series.expected for series in find(mode="decode", against="dense"))
    units = {series.unit for series in find()}
    assert units == set(published.UNITS)


def test_no_curve_is_there_twice() -> None:
    named = [(s.source.id, s.mode, s.of, s.unit, s.shape, s.model, s.batch, s.tokens) for s in find()]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('source = "paper"', 'source = "papers"', r"series\[0\]\.source must be one of paper; got 'papers'"),
        ('machine = "a100"', 'machine = "a1000"', r"sources\.paper\.machine must be one of .*; got 'a1000'"),
        ('mode = "prefill-forward"', 'mode = "prefill"', "mode must be one of .*; got 'prefill'"),
        ('unit = "ratio"', 'unit = "seconds"', "unit must be one of ms, GiB, tokens/s, ratio; got 'seconds'"),
        ('unit = "ratio"', 'unit = "ms"', "against must be given with unit 'ratio' and only there; got 'flash-attn'"),
        ('against = "flash-attn"', "", "against must be given .* got None"),
        ("values = [2, [3.5, 4.0]]", "values = [2]", "values must be as many as the 2 tokens; got 1"),
        ("values = [2, [3.5, 4.0]]", "values = [2, [4.0, 3.5]]", r"values must be numbers above 0 or \[low, high\]"),
        ("values = [2, [3.5, 4.0]]", "values = [2, 0]", "values must be numbers above 0"),
        ("values = [2, [3.5, 4.0]]", "values = [2, nan]", r"values\[1\]\[0\] must be finite"),
        ("values = [2, [3.5, 4.0]]", 'values = [2, "3"]', r"values\[1\]\[0\] must be float"),
        ("tokens = [8192, 16384]", "tokens = [16384, 8192]", "tokens must ascend"),
        ("shape = [64, 4, 192, 128]", "shape = [64, 5, 192, 128]", "shape must be .* Hkv dividing Hq"),
        ("shape = [64, 4, 192, 128]", "shapes = [64, 4]", r"series\[0\] has no field 'shapes'"),
        ("[[series]]", "[[serie]]", "unknown table 'serie'"),
        ("[[series]]", "[series", "published.toml: "),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert str(caught.value).startswith(str(tmp_path / "published.toml"))
