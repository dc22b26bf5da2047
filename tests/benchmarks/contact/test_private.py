"""What must not leave a machine in a bundle: each rule finds it, and takes it out."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.contact import bundle, private, received
from benchmarks.contact.bundle import BundleError
from benchmarks.history import run_file
from tests.benchmarks.contact.bundles import WHERE
from tests.benchmarks.synthetic import key


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
