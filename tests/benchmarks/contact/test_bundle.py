"""The bundle: what leaves a machine, what is refused on arrival, and that a merge is all or nothing."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import socket
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ab import calibration
from benchmarks.contact import bundle, private, received
from benchmarks.contact.bundle import MANIFEST, BundleError, FileEntry, Manifest
from benchmarks.history import run_file
from tests.benchmarks.full_results import run_of, write_calibration, write_incidents
from tests.benchmarks.stored import everything, write
from tests.benchmarks.synthetic import key, passed

WHERE = dataclasses.replace(run_of(3, "cpu", "A CPU"), measured_peak=None)
LAW = {"utc": "2026-01-04T00:00:00", "passed": 8, "failed": 0}
LAW_NAME = "laws/cpu-20260104-0123456789-first-contact-000000.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a first contact leaves."""
    contact = tmp_path / "contact"
    write(contact, dataclasses.replace(passed(key()), fingerprint=WHERE))
    write_calibration(contact)
    (contact / "laws").mkdir()
    (contact / LAW_NAME).write_text(json.dumps(LAW))
    (contact / "logs").mkdir()
    (contact / "logs" / "laws.log").write_text("8 passed\n")
    (contact / "report").mkdir()
    (contact / "report" / "index.html").write_text("left behind")
    return contact


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "one.tar.gz"
    bundle.write(folder, WHERE, target, complete=True)
    return target


def test_travels_whole(packed: Path, tmp_path: Path) -> None:
    with received.opened(packed) as found:
        assert found.manifest.complete
        assert sorted(Path(entry.name).parts[0] for entry in found.manifest.files) == [
            "calibration",
            "laws",
            "logs",
            "runs",
        ]
        assert found.records == 1
        elsewhere = tmp_path / "elsewhere"
        assert received.merge_into(found, elsewhere).new_lines == 1
        before = {path: path.read_bytes() for path in elsewhere.rglob("*.js*")}
        assert received.merge_into(found, elsewhere).new_lines == 0
        assert {path: path.read_bytes() for path in elsewhere.rglob("*.js*")} == before
    assert not found.folder.exists()
    (record,) = everything(elsewhere)
    assert record.fingerprint == WHERE
    assert calibration.load(elsewhere, "cpu") is not None


def test_equal_contents_are_one_bundle(folder: Path, packed: Path, tmp_path: Path) -> None:
    bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)
    assert (tmp_path / "two.tar.gz").read_bytes() == packed.read_bytes()


def test_holds_neither_owner_nor_time(packed: Path) -> None:
    with tarfile.open(packed) as tar:
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in tar} == {(0, 0, "", "", 0)}


def test_private_words_are_taken_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "anna-workstation")
    monkeypatch.setattr(private, "_user", lambda: "anna")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    log = folder / "logs" / "laws.log"
    log.write_text(
        f"anna@anna-workstation {private.ROOT}/nsa/layer.py:3 /home/anna/thesis/x.jsonl hf_0123456789"
        " prefill/8x2x64 https://example.org/home/page savannah\n"
    )
    bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)
    with received.opened(tmp_path / "two.tar.gz") as found:
        said = (found.folder / "logs" / "laws.log").read_text()
    expected = "USER@HOST nsa/layer.py:3 …/x.jsonl *** prefill/8x2x64 https://example.org/home/page savannah\n"
    assert said == expected


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("see /proj/nsa/run.log:3", "see …/run.log:3"),
        ("path:/proj/nsa/run.log", "path:…/run.log"),
        ("file:///proj/nsa/run.log", "file://…/run.log"),
        (r'{"reason": "x\n/proj/nsa/run.log"}', r'{"reason": "x\n…/run.log"}'),
        ("/home/anna smith/thesis/x.jsonl", "…/x.jsonl"),
        ("/home/anna", "…"),
        ("at /scratch, in /scratch/deep/x", "at …, in …/x"),
        ("at /me, in /me/deep/x", "at …, in …/x"),
        ("Node7.cluster.org NODE7 node77", "HOST HOST node77"),
        ("s3cr3t-0", "***"),
        ("p9-p9-p9 and pw-pw-pw-", "*** and ***"),
        (r'{"a": "quoted\"one"}', '{"a": "***"}'),
        ("https://example.org/home/page prefill/8x2x64 and/or 2.5 GB/s runs/*/*.jsonl", None),
    ],
)
def test_what_is_private_is_found_and_taken_out(
    text: str, cleaned: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster.org")
    variables = {
        "HOME": "/me", "GITHUB_PAT": "s3cr3t-0", "PATH": "prefill/8x2x64", "PWD": "2.5 GB/s", "MYSQL_PWD": "p9-p9-p9",
        "DB_URL": "pw-pw-pw-", "SSH_AUTH": 'quoted"one',
    }  # fmt: skip
    words = private.PrivateWords.here(variables, folders=[Path("/scratch")])
    assert words.removed(text) == (text if cleaned is None else cleaned)
    assert (words.found(text) is None) == (cleaned is None)
    assert words.found(words.removed(text)) is None


@pytest.mark.parametrize("name", ["a100", "h200", "triton", "cpu", "nsa", "part"])
def test_a_host_may_be_called_as_a_record_s_word_is(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(private, "_user", lambda: name)
    bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)
    with received.opened(tmp_path / "two.tar.gz") as found:
        assert [record.key for record in run_file.read_all(found.folder)[0]] == [key()]


def test_what_still_holds_one_is_not_packed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.PrivateWords, "removed", lambda self, text: text)
    (folder / "logs" / "laws.log").write_text("see /home/anna/x")
    with pytest.raises(BundleError, match=r"laws\.log still holds an absolute path; nothing was packed"):
        bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)
    assert not (tmp_path / "two.tar.gz").exists()


def test_a_line_that_a_crash_has_torn_is_left_out_and_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = folder.glob("runs/*/*")
    whole = run.read_bytes()
    run.write_bytes(whole + whole.splitlines()[-1][:40])
    incident = folder / "regression" / "cpu" / "20260104T000000Z-0123456789.jsonl"
    incident.parent.mkdir(parents=True)
    incident.write_text('{"incident": "tie-')
    bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)
    said = capsys.readouterr().out
    assert f"note: {run}:3 is damaged and was left out" in said
    assert f"note: {incident}:1 is damaged and was left out" in said
    with received.opened(tmp_path / "two.tar.gz") as found:
        assert found.records == 1


def test_a_link_in_the_folder_is_not_packed(folder: Path, tmp_path: Path) -> None:
    (folder / "logs" / "other.log").symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="is no plain file"):
        bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)


def contents(packed: Path) -> dict[str, bytes]:
    with tarfile.open(packed) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def repack(target: Path, content: Mapping[str, bytes], *more: tarfile.TarInfo) -> Path:
    with gzip.open(target, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for member in more:
            tar.addfile(member, io.BytesIO(b"\0" * member.size))
    return target


def resigned(content: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    """With a manifest that fits the files, as a forger would make it."""
    rest = {name: data for name, data in content.items() if name != MANIFEST}
    made = Manifest.decode(content[MANIFEST])
    entries = tuple(FileEntry.of(name, data) for name, data in rest.items())
    return {MANIFEST: dataclasses.replace(made, files=entries, **changes).encoded(), **rest}


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.size, found.linkname = kind, size, link
    return found


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
    with pytest.raises(BundleError, match=r"no \.tar\.gz, or not whole|has no manifest"), received.opened(half):
        pass


def test_a_conflict_is_named_and_nothing_is_merged(packed: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "laws").mkdir(parents=True)
    (elsewhere / LAW_NAME).write_text(json.dumps({**LAW, "failed": 1}))
    with received.opened(packed) as found:
        with pytest.raises(BundleError, match=r"laws/.* is there with another content.*Nothing was merged"):
            received.merge_into(found, elsewhere)
        assert run_file.read_all(elsewhere) == ([], [])
        (elsewhere / LAW_NAME).unlink()
        received.merge_into(found, elsewhere)
    ours = calibration.load(elsewhere, "cpu")
    assert ours is not None
    newer = dataclasses.replace(WHERE, utc="2027-01-01T00:00:00.000Z")
    calibration.save(elsewhere, dataclasses.replace(ours, fingerprint=newer))
    with received.opened(packed) as found:
        received.merge_into(found, elsewhere)
    kept = calibration.load(elsewhere, "cpu")
    assert kept is not None
    assert kept.fingerprint == newer


def test_a_calibration_of_another_device_is_left_out_and_the_records_come_along(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with received.opened(packed) as found:
        ours = calibration.load(found.folder, "cpu")
    assert ours is not None
    other = dataclasses.replace(WHERE, device="Another CPU", utc="2025-01-01T00:00:00.000Z")
    calibration.save(elsewhere, dataclasses.replace(ours, fingerprint=other))
    assert main(["bundle", "merge", str(packed), "--out", str(elsewhere)]) == 0
    out = capsys.readouterr().out
    assert "note: calibration/cpu.json is there for 'Another CPU', and the bundle's is for 'A CPU'" in out
    assert json.loads(out.splitlines()[-1])["new_lines"] == 1
    kept = calibration.load(elsewhere, "cpu")
    assert kept is not None
    assert kept.fingerprint == other


def test_a_calibration_of_more_pairs_is_kept(packed: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with received.opened(packed) as found:
        received.merge_into(found, elsewhere)
    ours = calibration.load(elsewhere, "cpu")
    assert ours is not None
    older = dataclasses.replace(ours.fingerprint, utc="2025-01-01T00:00:00.000Z")
    for pairs, kept_pairs in ((ours.pairs + 30, ours.pairs + 30), (ours.pairs - 30, ours.pairs)):
        calibration.save(elsewhere, dataclasses.replace(ours, fingerprint=older, pairs=pairs))
        with received.opened(packed) as found:
            received.merge_into(found, elsewhere)
        kept = calibration.load(elsewhere, "cpu")
        assert kept is not None
        assert kept.pairs == kept_pairs


def test_incidents_travel_too(folder: Path, tmp_path: Path) -> None:
    where = run_of(6)
    for path in (*folder.glob("runs/*/*"), *folder.glob("calibration/*"), folder / LAW_NAME):
        path.unlink()
    write_incidents(folder, 6)
    bundle.write(folder, where, tmp_path / "two.tar.gz", complete=False)
    with received.opened(tmp_path / "two.tar.gz") as found:
        assert found.records == 8
    (lines,) = folder.glob("regression/*/*.jsonl")
    lines.write_text(lines.read_text().replace('"h200"', '"a100"', 1))
    bundle.write(folder, where, tmp_path / "one of another.tar.gz", complete=False)
    another = pytest.raises(BundleError, match="is of the machine 'a100'")
    with another, received.opened(tmp_path / "one of another.tar.gz"):
        pass
    bundle.write(folder, dataclasses.replace(where, machine="a100"), tmp_path / "three.tar.gz", complete=False)
    with pytest.raises(BundleError, match="is of the machine 'h200'"), received.opened(tmp_path / "three.tar.gz"):
        pass
