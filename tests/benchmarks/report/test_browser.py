"""The pages in a real browser, from the disk: wide and narrow, light and dark, by keyboard, on paper, and hostile."""

from __future__ import annotations

import dataclasses
import html
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import run_file
from benchmarks.history.records import Record
from benchmarks.report.links import Repository
from benchmarks.report.pages import ReportSettings, build
from tests.benchmarks import full_results
from tests.benchmarks.report import history_of_two_years as history
from tests.benchmarks.synthetic import failed, key

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")
NARROW_PX, WIDE_PX, HEIGHT_PX = 400, 1280, 900
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
HOSTILE = "\"'><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script></script>"
SCREENSHOTS = os.environ.get("NSA_SCREENSHOTS")
"""A folder that keeps the screenshots, for a person to look at."""
REPOSITORY = "https://github.com/owner/name"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield launched
        launched.close()


@dataclass
class Tab:
    """A page, and what it must not do."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """What the console says, errors, and requests that leave the disk."""

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self._asked(request.url))

    def _asked(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"request: {url}")

    def open(self, path: Path, fragment: str = "") -> None:
        self.page.goto(path.as_uri() + fragment)

    @property
    def overflow_px(self) -> int:
        """By how much the content is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    @property
    def broken_pictures(self) -> int:
        return int(self.page.evaluate("[...document.images].filter(i => i.complete && i.naturalWidth == 0).length"))

    def text(self, selector: str) -> str:
        """What a reader sees of it, with usual spaces."""
        return re.sub(r"\s+", " ", self.page.locator(selector).first.inner_text())

    def wait_for(self, expression: str, value: object) -> None:
        """Until it has this value; what Playwright brings for it is eval, which the pages refuse."""
        end = time.monotonic() + 20
        while (found := self.page.evaluate(expression)) != value:
            assert time.monotonic() < end, f"{expression} is {found!r}"
            self.page.wait_for_timeout(50)

    def screenshot(self, folder: Path, name: str) -> Path:
        path = (Path(SCREENSHOTS) if SCREENSHOTS else folder) / f"{name}.png"
        self.page.screenshot(path=path)
        return path


def tab(browser: Browser, width_px: int = WIDE_PX, scheme: Any = "light") -> Tab:
    context = browser.new_context(viewport={"width": width_px, "height": HEIGHT_PX}, color_scheme=scheme)
    return Tab(context.new_page())


@pytest.fixture(scope="module")
def two_years(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first page of two years of two machines."""
    results = tmp_path_factory.mktemp("two_years")
    history.write(results)
    return build(results, ReportSettings(repository=Repository(REPOSITORY), now=history.NOW)).index


@pytest.fixture(scope="module", params=[True, False], ids=["script", "pictures"])
def everything(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every page of a report that has everything."""
    results = tmp_path_factory.mktemp("results")
    full_results.write_everything(results)
    index = build(results, ReportSettings(script=request.param)).index
    return sorted(index.parent.glob("*.html"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width_px", [WIDE_PX, NARROW_PX])
def test_the_first_screen_answers_and_one_click_shows_the_case_at_its_commit(
    width_px: int, scheme: str, two_years: Path, browser: Browser, tmp_path: Path
) -> None:
    here = tab(browser, width_px, scheme)
    here.open(two_years)
    commit = str(history.run_of(history.STEP, "h200").commit)
    said = here.text(".answers")
    assert "Yes: 1 of 12 judged cases" in said
    assert "h200: Decode, 64x4x128, 64k × 32 sequences, bfloat16, random inputs, cold, graph" in said
    assert f"{commit[:7]} of 2026-10-02" in said
    assert re.search(r"reaches \d+ % of the limit and is 2\.\d\d× as fast as sdpa-cudnn", said)
    box = here.page.locator(".answers").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < HEIGHT_PX, "it stands on the first screen"
    assert f"a100: last run {history.STOPPED + 1} days ago" in here.text(".numbers")
    assert here.page.locator(f'.answers a[href$="/commit/{commit}"]').count() == 1
    assert here.page.locator('.answers a[href*="/compare/"]').count() == 1
    assert here.overflow_px == 0
    first = here.text(".verdicts tbody tr:first-child")
    assert f"slower since {commit[:7]}" in first
    assert here.screenshot(tmp_path, f"index-{width_px}-{scheme}").stat().st_size > 20_000, "a blank page takes 5 kB"

    here.page.locator(".answers dd a").first.click()
    here.page.wait_for_selector("#over-runs .main-svg")
    assert here.page.locator("#case").input_value() == history.SLOWER
    assert re.search(rf"{commit[:7]}.*since the run before: \w{{7}}\.\.\.{commit[:7]}", here.text("#chosen"))
    assert re.search(r"(5\.9|6\.0) % slower", here.text("#over-runs").replace("\u00a0", " "))
    assert here.overflow_px == 0
    assert here.complaints == []
    here.screenshot(tmp_path, f"case-{width_px}-{scheme}")
    here.page.context.close()


def test_filters_work_by_keyboard_and_stand_in_the_address(two_years: Path, browser: Browser) -> None:
    here = tab(browser)
    here.open(two_years)
    assert here.text("#count") == "12 of 12 cases"
    here.page.keyboard.press("Tab")
    assert here.page.evaluate("document.activeElement.className") == "skip"
    select = here.page.locator('#filters select[name="machine"]')
    select.focus()
    here.page.keyboard.press("a")  # the option that begins with it
    here.page.keyboard.press("Tab")
    here.page.keyboard.press("D")
    assert here.text("#count") == "3 of 12 cases"
    assert here.page.url.endswith("#machine=a100&mode=Decode")
    assert here.page.locator(".verdicts tbody tr:visible").count() == 3
    outline = here.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "focus is visible"
    again = tab(browser)
    again.open(two_years, "#machine=a100&mode=Decode")
    assert again.text("#count") == "3 of 12 cases"
    here.page.get_by_role("button", name="Show all").press("Enter")
    here.wait_for("document.querySelector('#count').textContent", "12 of 12 cases")
    assert here.complaints == again.complaints == []


def test_a_permalink_opens_its_case_and_points_lead_to_commits(two_years: Path, browser: Browser) -> None:
    here = tab(browser)
    page = two_years.with_name("h200-decode-64x4x128.html")
    here.open(page, f"#case=b64/s32768/bfloat16/cold/graph&run={history.run_of(history.PATCH, 'h200').utc}")
    here.page.wait_for_selector("#over-runs .main-svg")
    assert here.page.locator("#case").input_value() == "b64/s32768/bfloat16/cold/graph"
    assert "changed in the environment: platform Linux-6.18.44 -> Linux-6.18.45" in here.text("#chosen")
    legend = here.page.locator("#over-runs .legendtext").all_text_contents()
    assert {"NSA", "best dense baseline", "limit (100 %)", "95 % interval", "conditions changed"} <= set(legend)

    here.page.locator("#case").select_option(history.SLOWER)
    assert here.page.url.endswith(f"#case={history.SLOWER.replace('/', '%2F')}")
    here.page.get_by_role("button", name="90 days").press("Enter")
    shown = here.page.evaluate("document.querySelector('#over-runs').layout.xaxis.range.map(d => d.slice(0, 10))")
    assert shown == ["2026-08-02", "2026-11-01"]
    here.page.locator("#points summary").press("Enter")
    rows = here.page.locator("#points tbody tr")
    here.wait_for("document.querySelectorAll('#points tbody tr').length", history.NIGHTS)
    assert "○ unmet precision (half width 2 % > 1 %)" in rows.nth(2).inner_text()
    commit = str(history.run_of(history.NIGHTS - 1, "h200").commit)
    assert rows.first.locator("a").first.get_attribute("href") == f"{REPOSITORY}/commit/{commit}"
    nsa = "document.querySelector('#over-runs').data.find(t => t.meta == 'runs')"
    assert here.page.evaluate(f"{nsa}.marker.symbol.filter(one => one == 'circle-open').length") == 1
    here.page.evaluate(
        f"document.querySelector('#over-runs').emit('plotly_click', {{points: [{{data: {nsa}, pointNumber: 3}}]}})"
    )
    assert str(history.run_of(3, "h200").commit)[:7] in here.text("#chosen")
    here.page.emulate_media(color_scheme="dark")
    here.wait_for("document.querySelector('#over-runs').layout.paper_bgcolor", "#15181c")
    here.page.locator(".curves:visible .chart").scroll_into_view_if_needed()
    here.page.wait_for_selector(".curves .main-svg")
    assert here.complaints == []


def test_the_chart_is_cut_where_runs_cannot_be_compared_alone(two_years: Path, browser: Browser) -> None:
    here = tab(browser)
    here.open(two_years.with_name("h200-decode-64x4x128.html"))
    here.page.wait_for_selector("#over-runs .main-svg")
    nsa = "document.querySelector('#over-runs').data.find(t => t.meta == 'runs')"
    gaps = here.page.evaluate(f"{nsa}.y.flatMap((y, i) => y === null ? [i] : [])")
    assert gaps == [history.DRIVER], "another driver cuts, another kernel of the host does not"
    lines = here.page.evaluate("document.querySelector('#over-runs').layout.shapes.map(s => s.line.dash)")
    assert lines == ["dash", "dot"]


@pytest.mark.parametrize("width_px", [NARROW_PX, WIDE_PX])
def test_every_page_fits_every_picture_loads_and_nothing_is_refused(
    width_px: int, everything: list[Path], browser: Browser
) -> None:
    here = tab(browser, width_px)
    seen = {}
    for path in everything:
        here.open(path)
        here.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        seen[path.name] = (here.overflow_px, here.broken_pictures)
    assert seen == {path.name: (0, 0) for path in everything}
    assert here.complaints == []


def test_a_page_that_is_too_wide_lacks_a_picture_or_asks_the_network_is_seen(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><img src="gone.png"><p style="width: 900px">wide<script>fetch("http://example.org")</script>',
        encoding="utf-8",
    )
    here = tab(browser, NARROW_PX)
    here.open(page)
    assert here.overflow_px > 0
    assert here.broken_pictures == 1
    assert "request: http://example.org/" in here.complaints


def test_it_prints(everything: list[Path], browser: Browser) -> None:
    here = tab(browser)
    here.open(next(path for path in everything if path.name == "index.html"))
    assert here.page.pdf().startswith(b"%PDF")


def test_a_hostile_record_changes_nothing(browser: Browser, tmp_path: Path) -> None:
    results = tmp_path / "results"
    for day in (1, 2, 3):
        nsa = failed(key(model=HOSTILE), CaseOutcome.INCORRECT, HOSTILE)
        green = full_results.measured(
            key(model=HOSTILE, length=8192), full_results.run_of(day), day, random.Random(day)
        )
        other = full_results.measured(key(length=8192), full_results.run_of(day), day, random.Random(day))
        path = run_file.create(results, green.fingerprint)
        for record in (
            nsa,
            failed(key(implementation=HOSTILE, model=HOSTILE), CaseOutcome.CRASHED, HOSTILE),
            green,
            other,
        ):
            run_file.append(path, _hostile(record, day))
    (path.parent / "torn.jsonl").write_text(f'{{"{HOSTILE}": 1}}', encoding="utf-8")
    full_results.write_verdicts(results, reason=HOSTILE)
    index = build(results).index
    here = tab(browser)
    for page in index.parent.glob("*.html"):
        here.open(page)
        here.page.wait_for_load_state("networkidle")
        assert here.page.title() != "owned", page
        assert here.page.locator('img[src="x"]').count() == 0, page
        own = "script[src='plotly.min.js'], script[src='report.js'], script[type='application/json']"
        assert here.page.locator("script").count() == here.page.locator(own).count(), page
    assert here.complaints == []
    assert html.escape("<script>") in index.read_text(encoding="utf-8")


def _hostile(record: Record, day: int) -> Record:
    where = dataclasses.replace(full_results.run_of(day), commit=HOSTILE + str(day), platform=HOSTILE + str(day))
    return dataclasses.replace(record, fingerprint=where)


def test_an_unescaped_record_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(f'<!doctype html><title>bad</title><p title="{HOSTILE}">', encoding="utf-8")
    here = tab(browser)
    here.open(page)
    assert here.page.title() == "owned"
    assert here.page.locator('img[src="x"]').count() == 1
