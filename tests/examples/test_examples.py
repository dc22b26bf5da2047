"""Every example runs as a user runs it, and prints what it promises."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import image

from benchmarks.history import run_file
from harness.repository import ROOT
from tests.benchmarks.contender_packages import offer
from tests.benchmarks.synthetic import key, passed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLES = ROOT / "examples"
TESTED = ("first_call", "long_prompt", "plot_trend", "swap_attention_hf", "train_lm")
ELSEWHERE = ("generate",)
"""Tested in tests/nsa/test_generate.py."""


def run(*words: str, **environment: str) -> str:
    """What a Python of the repository's root says; a message on stderr is shown where it fails."""
    path = os.pathsep.join(filter(None, (str(ROOT), environment.pop("site", ""), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(pattern: str, said: str) -> re.Match[str]:
    match = re.search(pattern, said)
    assert match is not None, f"no {pattern!r} in:\n{said}"
    return match


def test_none_is_left_out() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    folders = {path.name for path in EXAMPLES.iterdir() if (path / "pyproject.toml").is_file()}
    assert scripts == {*TESTED, *ELSEWHERE}
    assert folders == {"contender"}


def test_a_first_call() -> None:
    said = run("examples/first_call.py")
    assert "output [1, 2048, 4, 32], computed by the backend " in said
    shares = [float(share) for share in re.findall(r"keys read, ([\d.]+)% of what dense attention reads", said)]
    assert len(shares) == 3
    assert all(0 < share < 100 for share in shares)
    blocks = json.loads(found(r"chose the blocks (\[.*\]) of 32", said)[1])
    assert len(blocks) == 8
    assert {0, 30, 31} <= set(blocks), "the first block and the two last ones are forced"
    assert float(found(r"difference from the specification: (\S+)", said)[1]) < 1e-5
    assert "all finite: True" in said


def test_training_a_small_model() -> None:
    """Both models learn that a text is no random bytes, and what was saved is what was trained."""
    said = run("examples/train_lm.py", "--steps", "20")
    firsts = [float(loss) for loss in re.findall(r"step    1: loss ([\d.]+)", said)]
    lasts = [float(loss) for loss in re.findall(r"step   20: loss ([\d.]+)", said)]
    held_out = found(r"nsa ([\d.]+), dense ([\d.]+)", said)
    assert len(firsts) == len(lasts) == 2
    for first, last, unseen in zip(firsts, lasts, map(float, held_out.groups()), strict=True):
        assert last < first - 1
        assert 1 < unseen < first - 1, "as good as no text of this kind allows, or nothing learnt"


def test_a_long_prompt_in_the_paged_cache() -> None:
    said = run("examples/long_prompt.py", "--tokens", "3000", "--new-tokens", "3")
    assert "prefill: 3000 tokens in chunks of 1024" in said
    assert "fork: 0 further pages for a second continuation of 3000 tokens" in said
    texts = found(r"new tokens: (\[.*\]) and (\[.*\])", said).groups()
    assert [len(json.loads(text)) for text in texts] == [3, 3]
    read = [int(keys.replace(",", "")) for keys in re.findall(r"([\d,]+) keys read by the last step", said)]
    share, dense = found(r"together ([\d.]+)% of the ([\d,]+)", said).groups()
    assert int(dense.replace(",", "")) == 2 * 2 * 3003, "rows, key heads, tokens"
    assert float(share) == pytest.approx(100 * sum(read) / (2 * 2 * 3003), abs=0.1)
    assert read[2] == 2 * 2 * 64, "the window, of two rows and two key heads"
    pages = found(r"after the end: (\d+) of (\d+) pages are free", said)
    assert pages[1] == pages[2]


def test_reading_records_with_pandas(tmp_path: Path) -> None:
    """Of records that are known; the picture holds them, whatever the machine's own results are."""
    pytest.importorskip("pandas")
    results, png = tmp_path / "results", tmp_path / "trend.png"
    for day, latency_ms in ((1, 12.5), (2, 11.0), (3, 8.25)):
        records = [passed(key(), latency_ms, utc=f"2026-01-0{day}T03:04:05Z")]
        records.append(passed(key(implementation="sdpa-flash"), 20.0, utc=records[0].fingerprint.utc))
        path = run_file.create(results, records[0].fingerprint)
        for record in records:
            run_file.append(path, record)
    said = run("-m", "examples.plot_trend", "--results", str(results), "--png", str(png))
    assert "6 records of 3 runs on cpu" in said
    assert f"{key().case} on cpu, ms:" in said
    rows = re.findall(r"2026-01-0\d .*? 0123456789\s+(\S+)\s+(\S+)", said)
    assert [tuple(map(float, row)) for row in rows] == [(12.5, 20.0), (11.0, 20.0), (8.25, 20.0)]
    pixels = image.imread(png)
    assert pixels.shape[:2] == (540, 1080)
    colours = {tuple(colour) for colour in (pixels[::4, ::4, :3].reshape(-1, 3) * 255).round().astype(int).tolist()}
    assert len(colours) > 8, "an empty picture"


def test_swapping_the_attention_of_a_hugging_face_model() -> None:
    said = run("examples/swap_attention_hf.py")
    if importlib.util.find_spec("transformers") is None or not (ROOT / "nsa" / "integrations").is_dir():
        assert said.startswith("skipped: ")
        pytest.skip(said.strip())
    assert "LlamaForCausalLM -> NSAForCausalLM" in said
    assert float(found(r"logits differ by at most ([\d.]+)", said)[1]) < 1
    losses = found(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert float(losses[2]) < float(losses[1])
    assert len(json.loads(found(r"generated: (\[.*\])", said)[1])) == 8


def test_a_contender_of_one_s_own(tmp_path: Path) -> None:
    """Installed as pyproject.toml says: an installer writes the same entry points, and puts the module on sys.path."""
    project = tomllib.loads((EXAMPLES / "contender" / "pyproject.toml").read_text())
    (module,) = project["tool"]["setuptools"]["py-modules"]
    site = tmp_path / "site"
    for group, entries in project["project"]["entry-points"].items():
        offer(site, project["project"]["name"], entries, group)
    (site / f"{module}.py").write_text((EXAMPLES / "contender" / f"{module}.py").read_text())
    case, out = "prefill-forward/8x2x64/b1/s512/float32", tmp_path / "results"
    words = ["-m", "benchmarks", "run", "--quick", "--gpu", "cpu", "--out", str(out), "--contenders", "masked-nsa"]
    said = run(*words, "--cases", f"{case}/nsa,{case}/masked-nsa", site=str(site))
    told = json.loads(said.splitlines()[-1])
    assert told["outcomes"] == {"PASSED": 2}
    assert told["contenders"]["masked-nsa"][case] in ("FASTER", "SLOWER", "UNDECIDED")
    found(r"(?m)^masked-nsa, beside NSA in this run:$", said)
    found(rf"(?m)^  {re.escape(case)}  \w+ +\S+ ms, NSA \S+ ms: [\d.]+ times as fast as NSA", said)
    (record, _) = run_file.read_all(out)[0]
    assert record.correctness is not None
    laws = [check.name for check in record.correctness.checks if check.name.startswith("law ")]
    assert laws == ["law causality", "law batch", "law decode", "law gates"]


def test_examples_are_read_by_python_3_10() -> None:
    """A first reader may have no newer one."""
    for path in EXAMPLES.rglob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 10))
