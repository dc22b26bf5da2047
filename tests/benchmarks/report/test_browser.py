"""The pages in a real browser: Debian's chromium, from the disk, wide, at 360 pixels, and hostile."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import run_file
from benchmarks.report.pages import build
from tests.benchmarks import full_results
from tests.benchmarks.synthetic import failed, key

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")
PHONE_PX = 360
WIDE_PX = 1200
PNG_HEAD = 24
HOSTILE = "\"'><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every page of a report that has everything; the first is the index."""
    results = tmp_path_factory.mktemp("results")
    full_results.write_everything(results)
    index = build(results)
    return [index, *sorted(path for path in index.parent.glob("*.html") if path != index)]


def browse(tmp_path: Path, path: Path, *options: str) -> str:
    """What chromium prints about a page; it may read files beside the page, and nothing from a network."""
    assert CHROMIUM is not None
    fixed = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    )
    done = subprocess.run(
        [CHROMIUM, *fixed, f"--user-data-dir={tmp_path / 'profile'}", *options, path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def inside(tmp_path: Path, pages: list[Path], width_px: int) -> dict[str, tuple[int, int]]:
    """Page -> (width of its content in pixels, pictures that did not load), each in a frame of this width.

    A window cannot be as narrow as a phone; a frame can.
    """
    frames = "".join(f'<iframe src="{page.as_uri()}" width="{width_px}" height="800"></iframe>' for page in pages)
    script = """
    addEventListener("load", () => {
      for (const frame of document.querySelectorAll("iframe")) {
        const page = frame.contentDocument
        const broken = [...page.images].filter(image => !image.complete || image.naturalWidth == 0).length
        const line = document.createElement("p")
        const name = frame.src.split("/").pop()
        line.textContent = ["measured", name, page.documentElement.scrollWidth, broken].join(" ")
        document.body.append(line)
      }
    })"""
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(f"<!doctype html><title>frames</title><body><script>{script}</script>{frames}", encoding="utf-8")
    said = browse(tmp_path, wrapper, "--allow-file-access-from-files", "--virtual-time-budget=20000", "--dump-dom")
    found = re.findall(r"measured (\S+) (\d+) (\d+)", said.partition("</iframe>")[2])
    return {name: (int(width), int(broken)) for name, width, broken in found}


@pytest.mark.parametrize("width_px", [PHONE_PX, WIDE_PX])
def test_every_page_fits_and_every_picture_loads(width_px: int, pages: list[Path], tmp_path: Path) -> None:
    seen = inside(tmp_path, pages, width_px)
    assert seen == {page.name: (width_px, 0) for page in pages}


def test_a_page_that_is_too_wide_or_lacks_a_picture_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<!doctype html><img src="gone.png"><p style="width: 900px">wide', encoding="utf-8")
    (seen,) = inside(tmp_path, [page], PHONE_PX).values()
    assert seen[0] > PHONE_PX
    assert seen[1] == 1


def test_a_screenshot_is_not_blank(pages: list[Path], tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(tmp_path, pages[0], f"--window-size={WIDE_PX},900", f"--screenshot={picture}")
    head = picture.read_bytes()[:PNG_HEAD]
    assert int.from_bytes(head[16:20], "big") == WIDE_PX
    assert picture.stat().st_size > 20_000, "a blank page takes about 5 kB"


def test_it_prints(pages: list[Path], tmp_path: Path) -> None:
    paper = tmp_path / "page.pdf"
    browse(tmp_path, pages[0], f"--print-to-pdf={paper}")
    assert paper.read_bytes().startswith(b"%PDF")


def test_a_hostile_record_changes_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results"
    hostile = failed(key(implementation=HOSTILE, model=HOSTILE), CaseOutcome.CRASHED, HOSTILE)
    nsa = failed(key(model=HOSTILE), CaseOutcome.INCORRECT, HOSTILE)
    path = run_file.create(results, nsa.fingerprint)
    for record in (hostile, nsa):
        run_file.append(path, record)
    folder = path.parent
    (folder / "torn.jsonl").write_text(f'{{"{HOSTILE}": 1}}', encoding="utf-8")
    full_results.write_verdicts(results, reason=HOSTILE)
    index = build(results)
    for page in index.parent.glob("*.html"):
        dom = browse(tmp_path, page, "--virtual-time-budget=2000", "--dump-dom")
        assert title(dom) != "owned", page
        assert "<script" not in dom, page
        assert 'src="x"' not in dom, page
    assert html.escape("<script>") in index.read_text(encoding="utf-8")


def test_an_unescaped_record_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(f'<!doctype html><title>bad</title><p title="{HOSTILE}">', encoding="utf-8")
    dom = browse(tmp_path, page, "--virtual-time-budget=2000", "--dump-dom")
    assert title(dom) == "owned"
    assert "<script" in dom
    assert 'src="x"' in dom


def title(dom: str) -> str:
    (found,) = re.findall(r"<title>(.*?)</title>", dom)
    return str(found)
