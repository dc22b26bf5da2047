"""A bundle that was forged, cut off or made to do harm is refused, and nothing of it is taken."""

from __future__ import annotations

import dataclasses
import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.contact import bundle, received
from benchmarks.contact.bundle import MANIFEST, BundleError, FileEntry, Manifest
from tests.benchmarks.contact.bundles import LAW_NAME, WHERE, contents, member, repack


def resigned(content: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    """With a manifest that fits the files, as a forger would make it."""
    rest = {name: data for name, data in content.items() if name != MANIFEST}
    made = Manifest.decode(content[MANIFEST])
    entries = tuple(FileEntry.of(name, data) for name, data in rest.items())
    return {MANIFEST: dataclasses.replace(made, files=entries, **changes).encoded(), **rest}


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (member("../outside.jsonl"), "is no file of a bundle"),
        (member("/etc/cron.d/x"), "is no file of a bundle"),
        (member("runs/cpu/../../../x.jsonl"), "is no file of a bundle"),
        (member("runs/cpu/x.py"), "is no file of a bundle"),
        (member("logs/x.log", tarfile.SYMTYPE, link="/etc/passwd"), "is no plain file"),
        (member("logs/x.log", tarfile.LNKTYPE, link="manifest.json"), "is no plain file"),
        (member("logs/x.log", tarfile.FIFOTYPE), "is no plain file"),
        (member("logs/laws.log"), "is there twice"),
        (member("logs/x.log"), "and the files differ: logs/x.log"),
        (member("logs/x.log", size=bundle.MOST_BYTES + 1), "is larger than 64 MiB"),
    ],
)
def test_refuses_a_member(packed: Path, tmp_path: Path, extra: tarfile.TarInfo, why: str) -> None:
    wrong = repack(tmp_path / "wrong.tar.gz", contents(packed), extra)
    with pytest.raises(BundleError, match=why), received.opened(wrong):
        pass
    assert not (tmp_path / "outside.jsonl").exists()


def test_refuses_what_unpacks_to_too_much(packed: Path, tmp_path: Path) -> None:
    large = [member(f"logs/x{i}.log", size=bundle.MOST_BYTES // 2) for i in range(4)]
    wrong = repack(tmp_path / "wrong.tar.gz", contents(packed), *large)
    assert wrong.stat().st_size < 2**20
    with pytest.raises(BundleError, match="unpacks to more than 64 MiB"), received.opened(wrong):
        pass


def edited(content: dict[str, bytes], pattern: str, old: bytes, new: bytes) -> dict[str, bytes]:
    (name,) = [name for name in content if Path(name).match(pattern)]
    assert old in content[name]
    return {**content, name: content[name].replace(old, new)}


def renamed(content: dict[str, bytes], old: str, new: str) -> dict[str, bytes]:
    return resigned({new if name == old else name: data for name, data in content.items()})


FORGED: list[tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = [
    (lambda c: edited(c, "runs/*/*", b'"latency_ms":10', b'"latency_ms":1'), "differs from its SHA-256"),
    (lambda c: {k: v for k, v in c.items() if not k.startswith("runs/")}, "and the files differ"),
    (lambda c: {k: v for k, v in c.items() if k != MANIFEST}, "has no manifest.json"),
    (lambda c: {**c, MANIFEST: b"{"}, "manifest.json: "),
    (lambda c: edited(c, MANIFEST, b'"schema_version": 1', b'"schema_version": 9'), "use a newer version"),
    (lambda c: resigned(edited(c, "runs/*/*", b'"latency_ms":10', b'"latency_ms":-1')), "latency_ms must be finite"),
    (lambda c: resigned(edited(c, "laws/*", b'"passed": 8', b'"passed": "8"')), "is no summary of tests"),
    (lambda c: resigned(edited(c, "laws/*", b'"passed": 8', b'"passed": true')), "passed must be int; got True"),
    (lambda c: resigned(edited(c, "laws/*", b'"passed": 8', b'"passed": -5')), "passed must be from 0"),
    (lambda c: resigned(edited(c, "laws/*", b'"failed": 0', b'"failed": 9000000')), "failed must be from 0"),
    (
        lambda c: resigned(edited(c, "laws/*", b'"failed"', b'"architectures": {"86": {"passed": "x"}}, "failed"')),
        "architectures.86.passed must be int",
    ),
    (
        lambda c: resigned(edited(c, "laws/*", b'"failed"', b'"architectures": {"86": {"passed": null}}, "failed"')),
        "architectures.86.passed must be int; got None",
    ),
    (lambda c: resigned(edited(c, "calibration/*", b'"rates"', b'"gates"')), "is no calibration"),
    (
        lambda c: resigned(edited(c, "runs/*/*", b'"latency_ms":10', b'"latency_ms":1e300')),
        ":2: prefill-forward/4x2x16/b1/s64/float32/nsa: record.latency_ms must be at most 1e+09; got 1e+300",
    ),
    (
        lambda c: resigned(edited(c, "runs/*/*", b"[6,10,10,10,10,null]", b"[6,10,10,10,2e15,null]")),
        "record.samples.max_ms must be at most 1e+09; got 2e+15",
    ),
    (
        lambda c: resigned(edited(c, "runs/*/*", b'"command":"python', b'"command":"\\u001b]0;python')),
        "record.command must hold no control characters; got '\\x1b]0;python",
    ),
    (
        lambda c: resigned(edited(c, "calibration/*", b'"sd": 0.0065', b'"sd": 1e300')),
        "cpu.json: file.classes[0].rules.noise.sd must be at most 3.5e+38; got 1e+300",
    ),
    (
        lambda c: resigned(edited(c, "calibration/*", b'"1 ms and more"', b'"1 ms\\u202e"')),
        "file.classes[0].name must hold no control characters",
    ),
    (
        lambda c: resigned(edited(c, "laws/*", b'"failed"', b'"\\u001b[2J": 1, "failed"')),
        "a name in file must hold no control characters",
    ),
    (
        lambda c: edited(
            c,
            MANIFEST,
            b'"measured_peak": null',
            b'"measured_peak": {"bf16_tflops": 1e300, "float32_tflops": 1, "copy_tb_per_s": 1, "cache_mib": 1}',
        ),
        "fingerprint.measured_peak.bf16_tflops must be at most 1e+06",
    ),
    (lambda c: resigned(edited(c, "runs/*/*", b'"utc":"2026-', b'"utc":"9999-')), "is dated 9999-01-04"),
    (
        lambda c: resigned(edited(c, "runs/*/*", b'"utc":"2026-', b'"utc":"2019-')),
        "must be from 2020 to a day",
    ),
    (lambda c: resigned(edited(c, "laws/*", b'"2026-', b'"9999-')), "first-contact-000000.json is dated 9999"),
    (
        lambda c: resigned(c, fingerprint=dataclasses.replace(WHERE, utc="9999-12-31T23:59:59Z")),
        "manifest.json is dat",
    ),
    (
        lambda c: resigned({k: v for k, v in c.items() if not k.startswith("laws/")}),
        "manifest.json: complete must be false without laws, laws/*.json; got true",
    ),
    (
        lambda c: resigned({k: v for k, v in c.items() if not k.startswith("regression/")}),
        "manifest.json: complete must be false without incidents, regression/*/*.jsonl; got true",
    ),
    (
        lambda c: resigned(edited(c, "regression/*/*", b'"verdict": "PASSED"', b'"verdict": "LEAK"')),
        "regression/cpu/1.jsonl:1: ValueError: ok must be false with the verdict LEAK",
    ),
    (lambda c: edited(c, MANIFEST, b'"A CPU"', b'"A CPU\\u001b[2J"'), "device must hold no control characters"),
    (lambda c: edited(c, MANIFEST, b'"A CPU"', b'"A CPU\\u202e"'), "no control characters; got 'A CPU"),
    (lambda c: renamed(c, "calibration/cpu.json", "calibration/h200.json"), "calibration/h200.json is of the machine"),
    (lambda c: renamed(c, LAW_NAME, LAW_NAME.replace("cpu", "h200")), "is of the machine 'h200'"),
    (lambda c: renamed(c, LAW_NAME, "laws/cpu.json"), "laws/cpu.json is of the machine None"),
    (lambda c: resigned(c, fingerprint=dataclasses.replace(WHERE, device="B")), "is of the device 'A CPU'"),
]


@pytest.mark.parametrize(("forge", "why"), FORGED, ids=[why for _, why in FORGED])
def test_refuses_a_forged_bundle(
    packed: Path,
    tmp_path: Path,
    forge: Callable[[dict[str, bytes]], dict[str, bytes]],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = repack(tmp_path / "wrong.tar.gz", forge(contents(packed)))
    elsewhere = tmp_path / "elsewhere"
    assert main(["bundle", "merge", str(wrong), "--out", str(elsewhere)]) == 1
    assert why in capsys.readouterr().err
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    "headers", [{"GNU.sparse.map": "a,b"}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, {"size": "9" * 30}]
)
def test_refuses_headers_that_tarfile_cannot_read(
    packed: Path, tmp_path: Path, headers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = member("logs/x.log", size=512)
    hostile.pax_headers = headers
    wrong = tmp_path / "wrong.tar.gz"
    with gzip.open(wrong, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(hostile, io.BytesIO(b"x" * 512))
    assert main(["bundle", "verify", str(wrong)]) == 1
    assert "nothing of it was taken" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [0, 100, 700])
def test_refuses_half_a_file(packed: Path, tmp_path: Path, cut: int) -> None:
    half = tmp_path / "half.tar.gz"
    half.write_bytes(packed.read_bytes()[:cut])
    with pytest.raises(BundleError, match=r"no \.tar\.gz, or is cut off|has no manifest"), received.opened(half):
        pass
