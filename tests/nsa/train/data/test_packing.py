"""Data: nothing lost, nothing twice, the label one token on, and a position from which the same batches follow."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.loss import IGNORED
from nsa.model import next_token_loss
from nsa.train.data import loader, packing
from nsa.train.data.loader import Shard
from nsa.train.data.packing import ByteTokenizer, Documents, NoTextError, Packer, Row, text_files, tokenizer
from nsa.train.settings import Data
from tests.nsa.train.runs import needs_datasets, settings

TEXTS = [f"document {i}: " + "naïve café " * (i % 23) for i in range(240)]


def _parquet(folder: Path) -> None:
    """Two files in FineWeb-Edu's schema."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "text": text, "id": str(i), "dump": "CC-MAIN-2024-10", "url": "https://example.org", "file_path": "s3://x",
            "language": "en", "language_score": 0.9, "token_count": len(text), "score": 3.1, "int_score": 3,
        }
        for i, text in enumerate(TEXTS)
    ]  # fmt: skip
    for part in range(2):
        own = pyarrow.Table.from_pylist(rows[part * 120 : (part + 1) * 120])
        parquet.write_table(own, folder / f"train-{part}.parquet", row_group_size=50)


def _jsonl(folder: Path) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def _text(folder: Path) -> None:
    for i, text in enumerate(TEXTS):
        (folder / f"{i:04}.txt").write_text(text)


FORMATS = [_parquet, _jsonl, _text]


def _data(folder: Path, write: Callable[[Path], None] = _jsonl) -> Data:
    if write is _parquet:
        needs_datasets()
    folder.mkdir(exist_ok=True)
    write(folder)
    return Data(dataset="files", path=str(folder))


def _epoch(data: Data, **share: Any) -> list[str]:
    opened, found = Documents(data, **share), []
    for text in opened:
        if opened.epoch:
            return found
        found.append(text)
    raise AssertionError


@pytest.mark.parametrize("write", FORMATS)
def test_ranks_and_validation_share_every_document(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "HELD_OUT", 5)
    text = _data(tmp_path / "text", write)
    parts = [_epoch(text, rank=rank, ranks=2, held_out=held_out) for rank in range(2) for held_out in (False, True)]
    assert sorted(found for part in parts for found in part) == sorted(TEXTS)
    assert all(parts)
    assert not {*parts[0], *parts[2]} & {*parts[1], *parts[3]}
    assert len(parts[1]) + len(parts[3]) < len(TEXTS) / 3


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("packed", [True, False])
def test_goes_on_where_it_stopped(write: Callable[[Path], None], packed: bool, tmp_path: Path) -> None:
    """Also in the next epoch, whose first batch is number 340 or so."""
    _data(tmp_path / "text", write)
    chosen = settings(tmp_path, data__dataset="files", data__path=str(tmp_path / "text"), data__packing=packed)
    source = loader.open_source(chosen, Shard(1, 2))
    alone = [source.next() for _ in range(500)]
    assert alone[-1].position["documents"]["epoch"] == 1
    for stopped in (0, 7, 100, 380, 450):
        again = loader.open_source(chosen, Shard(1, 2))
        again.restore(alone[stopped].position)
        for expected in alone[stopped + 1 : stopped + 4]:
            found = again.next()
            assert torch.equal(found.tokens, expected.tokens)
            assert torch.equal(found.targets, expected.targets)


def test_goes_on_from_the_last_document_of_an_epoch(tmp_path: Path) -> None:
    data = _data(tmp_path / "text")
    alone, read = Documents(data), []
    for text in alone:
        read.append(text)
        if len(read) == 1:
            first = text
        if alone.epoch:
            break
        at_the_end = alone.position()
    again = Documents(data)
    again.restore(at_the_end)
    assert next(iter(again)) == first
    assert again.epoch == 1


def test_rows_hold_every_token_once() -> None:
    whole = [torch.arange(n) for n in (5, 1, 30, 7, 8, 13)]
    packer = Packer(iter(whole), 8)
    rows = [packer.row() for _ in range(8)]
    assert torch.equal(torch.cat([row.tokens for row in rows]), torch.cat(whole))
    assert all(sum(row.lengths) == 8 for row in rows)
    assert rows[0].lengths == (5, 1, 2)


@pytest.mark.parametrize("packed", [True, False])
def test_targets_are_the_tokens_that_follow(packed: bool) -> None:
    """Held to a list of them, and to the public loss."""
    rows = [Row(torch.randint(16, (12,)), (5, 7)), Row(torch.randint(16, (12,)), (1, 11))]
    batch = packing.pack(rows, packing=packed, position={})
    flat, ends = batch.tokens.flatten().tolist(), (4, 11, 12, 23) if packed else (11, 23)
    expected = [IGNORED if t in ends else flat[t + 1] for t in range(24)]
    assert batch.targets.flatten().tolist() == expected
    logits = torch.randn(*batch.tokens.shape, 16)
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    cu_seqlens = torch.tensor([0, 5, 12, 13, 24], dtype=torch.int32) if packed else None
    assert torch.allclose(found, next_token_loss(logits, batch.tokens, cu_seqlens))
    assert batch.num_targets == int((batch.targets != IGNORED).sum())
    if packed:
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens[:5].tolist() == [0, 5, 12, 13, 24]
        assert set(batch.cu_seqlens[5:].tolist()) == {24}
        assert batch.cu_seqlens.numel() - 1 == packing.BOUNDS, "more shapes are more compilations"


def test_bytes_end_with_the_one_that_text_has_not() -> None:
    assert ByteTokenizer().encode("é\0").tolist() == [*"é".encode(), 32, 0]


def test_a_tokenizer_must_fit_the_vocabulary(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<|endoftext|>": 0, "native": 1, "sparse": 2, "[UNK]": 3}
    path = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    assert tokenizer(str(path), 4).encode("sparse native attention").tolist() == [2, 1, 3, 0]
    with pytest.raises(ValueError, match=r"model\.vocab_size must be at least the 4 tokens"):
        tokenizer(str(path), 3)
    with pytest.raises(ValueError, match=r"data\.tokenizer must be"):
        tokenizer("byte", 256)


def test_without_datasets_there_is_local_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "datasets.distributed"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "import" in next(iter(Documents(Data(dataset="python"))))
    (tmp_path / "a.parquet").touch()
    for refused in (Data(dataset="fineweb_edu"), Data(dataset="files", path=str(tmp_path))):
        with pytest.raises(ValueError, match=r"data\.dataset must be 'python', .* without the package datasets"):
            Documents(refused)


def test_a_line_that_is_no_document_is_named(tmp_path: Path) -> None:
    for line, message in (('{"text":', r"a\.jsonl, line 3 is no JSON"), ("[1]", r"line 3 must be an object")):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x"}) + "\n\n" + line + "\n")
        with pytest.raises(ValueError, match=message):
            list(zip(range(3), Documents(Data(dataset="files", path=str(tmp_path))), strict=False))


def test_a_position_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    documents = Documents(_data(tmp_path / "text"))
    with pytest.raises(ValueError, match="of an earlier version"):
        documents.restore({"dataset": {"examples_iterable": {}, "epoch": 0}, "epoch": 0, "read": 7})


def test_pythons_own_sources_are_text() -> None:
    builder, paths = text_files(Data(dataset="python"))
    assert builder == "text"
    assert len(paths) > 300
    assert not any("site-packages" in path for path in paths)


def test_fineweb_edu_is_streamed_by_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that would go out, answered by a local copy of its schema."""
    datasets = pytest.importorskip("datasets")
    _parquet(tmp_path)
    calls: list[tuple[Any, ...]] = []
    load = datasets.load_dataset

    def answered(*given: Any, **named: Any) -> Any:
        calls.append((*given, *sorted(named.items())))
        return load("parquet", data_files=sorted(map(str, tmp_path.glob("*.parquet"))), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", answered)
    data = Data(dataset="fineweb_edu", subset="sample-100BT")
    opened = Documents(data)
    assert next(iter(opened)) in TEXTS
    assert opened.name == "fineweb_edu/sample-100BT"
    assert calls == [("HuggingFaceFW/fineweb-edu", "sample-100BT", ("split", "train"), ("streaming", True))]


def test_files_must_be_there_and_of_one_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path .* there is no"):
        text_files(Data(dataset="files", path=str(tmp_path / "none")))
    with pytest.raises(ValueError, match="has none"):
        text_files(Data(dataset="files", path=str(tmp_path)))
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.parquet").touch()
    with pytest.raises(ValueError, match="parquet, text"):
        text_files(Data(dataset="files", path=str(tmp_path)))


def test_says_which_column_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(NoTextError, match="no column 'text'; it has body"):
        next(iter(Documents(Data(dataset="files", path=str(tmp_path)))))


def test_a_source_without_text_ends(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(NoTextError, match="no document for training"):
        next(iter(Documents(Data(dataset="files", path=str(tmp_path)))))


def test_reports_how_far_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    data = _data(tmp_path / "text")
    opened = iter(Documents(Data(dataset="files", path=data.path, report_docs=100), report=said.append))
    for _ in range(230):
        next(opened)
    assert [line.split(": ")[1] for line in said] == ["100 documents read, epoch 0", "200 documents read, epoch 0"]
