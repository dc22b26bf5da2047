"""Two versions run the same on a GPU, or they do not: said without one, by what is compiled and how it is launched."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.ab import device_code
from benchmarks.ab.checkout import Sources
from benchmarks.ab.device_code import DeviceCode, Gpu
from benchmarks.ab.result import Side
from benchmarks.cases.key import Key
from harness import repository
from nsa import NSAConfig

pytest.importorskip("triton", reason="compiles Triton kernels")

A100 = {
    "major": 8, "minor": 0, "multi_processor_count": 108, "L2_cache_size": 40 * 2**20, "memory_clock_rate": 1593000,
    "memory_bus_width": 5120,
}  # fmt: skip
KEY = Key("part-gated-sum", "nsa", "auto", "bfloat16", 1, 64, 64, 2, 1, 32, 32, dataclasses.asdict(NSAConfig()))
FILE = "nsa/triton_backend/gated_sum.py"


def sources(folder: Path, old: str = "", new: str = "") -> Sources:
    """This working tree's nsa/, with one text replaced in the kernel's file."""
    shutil.copytree(repository.ROOT / "nsa", folder / "nsa", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return Sources(Side("x", None, None, ""), folder, repository.ROOT)


CHANGES = {
    "a comment": ("import triton\n", "# moved\n\nimport triton\n", True),
    "an instruction": ("total = _gate(GATES, row, 0, real) *", "total = 2 * _gate(GATES, row, 0, real) *", False),
    "the grid": ("_forward[cdiv(num_rows, ROWS),]", "_forward[cdiv(num_rows, ROWS) + 1,]", False),
    "an operator of PyTorch": ("out = torch.empty_like(o_cmp)", "out = torch.zeros_like(o_cmp)", False),
}
"""What is changed in the file -> (old, new, whether the device runs the same)."""


def test_what_the_device_runs_decides_and_what_the_source_says_does_not(tmp_path: Path) -> None:
    as_it_is = device_code.of(sources(tmp_path / "as it is"), KEY, A100)
    assert as_it_is.why is None
    for what, (old, new, same) in CHANGES.items():
        changed = device_code.of(sources(tmp_path / what, old, new), KEY, A100)
        assert changed.why is None, what
        assert changed.same(as_it_is) == same, what


def test_the_type_of_an_operator_s_result_is_seen(tmp_path: Path) -> None:
    old = "out = torch.empty_like(o_cmp)"
    wide, narrow = (
        device_code.of(sources(tmp_path / kind, old, f"{old}\n    o_cmp.to(torch.{kind})"), KEY, A100)
        for kind in ("float64", "float16")
    )
    assert wide.why is narrow.why is None
    assert not wide.same(narrow)


def test_what_cannot_be_compiled_is_not_known_and_says_why(tmp_path: Path) -> None:
    broken = device_code.of(sources(tmp_path, "import triton\n", "import triton_of_old\n"), KEY, A100)
    assert (broken.sha256, broken.why) == (None, "ModuleNotFoundError: No module named 'triton_of_old'")
    assert not broken.same(broken)
    step = dataclasses.replace(KEY, mode="train-step")
    assert device_code.of(sources(tmp_path / "step"), step, A100).why == (
        "train-step is not decided by its kernels alone"
    )


class FakeChild:
    """A process that has ended by itself and said some lines."""

    said: Sequence[str] = ()
    code = 0

    def __enter__(self) -> FakeChild:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def communicate(self, timeout_s: float) -> bytes:
        return "\n".join(self.said).encode()

    def wait(self) -> int:
        return self.code

    def log_tail(self) -> str:
        return "a warning\nSomeError: why"


LATER = math.inf


def test_what_a_child_does_not_come_to_says_why() -> None:
    child = FakeChild()
    child.said, child.code = ['{"sha256": "a", "why": null}'], -9
    assert device_code._answers(child, 3, LATER) == [  # type: ignore[arg-type]
        DeviceCode("a"), *[DeviceCode(None, "the child ended with code -9")] * 2,
    ]  # fmt: skip
    child.code = 1
    assert device_code._answers(child, 2, LATER)[1].why == "SomeError: why"  # type: ignore[arg-type]


def test_what_a_child_said_in_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that it was writing does not."""

    def late(timeout_s: float) -> bytes:
        raise subprocess.TimeoutExpired("x", timeout_s, output=b'a warning\n{"sha256": "a", "why": null}\n{"sha2')

    child = FakeChild()
    monkeypatch.setattr(child, "communicate", late)
    first, second = device_code._answers(child, 2, 0.0)  # type: ignore[arg-type]
    assert (first.sha256, second.why) == ("a", "its kernels were not compiled in time")


def test_an_interruption_ends_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that compile still; the threads that wait for them end with them."""
    made: list[Waiting] = []

    class Waiting(FakeChild):
        def __init__(self, *_: object) -> None:
            self.interrupts, self.ended = not made, threading.Event()
            made.append(self)

        def __exit__(self, *_: object) -> None:
            self.ended.set()

        def communicate(self, timeout_s: float) -> bytes:
            if self.interrupts:
                raise KeyboardInterrupt
            assert self.ended.wait(20), "nobody ended it"
            return b""

    monkeypatch.setattr(device_code, "_child", Waiting)
    monkeypatch.setattr(device_code, "_children", lambda sides: 2)
    keys = [KEY, dataclasses.replace(KEY, num_queries=128, num_keys=128)]
    with pytest.raises(KeyboardInterrupt):
        device_code.of_cases([sources_of("base"), sources_of("head")], keys, A100)
    assert [child.ended.is_set() for child in made] == [True] * 4


def sources_of(ref: str) -> Sources:
    return Sources(Side(ref, None, None, ""), Path(ref), Path(ref))


def test_cases_that_launch_alike_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both versions, each by its own children; what a child could not say has its reason."""
    asked: list[tuple[str, list[str]]] = []

    class Answering(FakeChild):
        def __init__(self, side: Sources, keys: Sequence[Key], gpu: Gpu) -> None:
            asked.append((side.side.ref, [key.case for key in keys]))
            self.said = [json.dumps({"sha256": f"{side.side.ref} {key.case}"}) for key in keys]

    monkeypatch.setattr(device_code, "_child", Answering)
    monkeypatch.setattr(device_code, "_children", lambda sides: 2)
    shapes = [dataclasses.replace(KEY, num_queries=tokens, num_keys=tokens) for tokens in (64, 128, 256)]
    alike = [dataclasses.replace(shapes[0], inputs="recorded", cache="cold"), dataclasses.replace(KEY, launch="graph")]
    step = dataclasses.replace(KEY, mode="train-step")
    sides = [sources_of("base"), sources_of("head")]
    found = device_code.of_cases(sides, [*shapes, *alike, step], A100)
    names = [f"part-gated-sum/2x1x32/b1/s{tokens}/bfloat16" for tokens in (64, 128, 256)]
    assert sorted(asked) == [(ref, part) for ref in ("base", "head") for part in (names[2:], names[:2])]
    for ref, codes in zip(("base", "head"), found, strict=True):
        assert [code.sha256 for code in codes[:3]] == [f"{ref} {name}" for name in names]
        assert codes[3] == codes[4] == codes[0]
        assert codes[5].why == "train-step is not decided by its kernels alone"
    assert device_code.of_cases(sides, [step], A100)[0][0].sha256 is None


def test_children_of_equal_heads_and_decode_steps_dealt_out() -> None:
    heads = [dataclasses.replace(KEY, mode=mode, heads=heads) for heads in (2, 4) for mode in ("b", "a")]
    steps = [dataclasses.replace(KEY, mode="decode", num_keys=keys, num_queries=1) for keys in (64, 128, 256)]
    parts = device_code._parts([steps[0], *heads, *steps[1:]], 2)
    assert parts == [[heads[1], heads[0], steps[0], steps[2]], [heads[3], heads[2], steps[1]]]
    assert device_code._parts(heads[:1], 7) == [heads[:1]]


def test_where_triton_tells_of_no_launch_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Triton 3.6, which launched the result of whatever had one: of all commits the same was said."""
    from benchmarks.ab import device_code_worker

    monkeypatch.setattr(device_code_worker, "_launches", lambda launched: contextlib.nullcontext())
    monkeypatch.setattr(device_code_worker.ahead_of_time, "recorded", lambda _: contextlib.nullcontext([]))
    call = SimpleNamespace(call=lambda: None)
    monkeypatch.setattr(device_code_worker.preparation, "prepare", lambda key, device: call)
    with pytest.raises(RuntimeError, match=r"no launch of part-gated-sum/.* was recorded"):
        device_code_worker.sha256(KEY, A100)


def test_what_pytorch_does_not_tell_of_the_gpu_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(major=8, minor=6, multi_processor_count=82, L2_cache_size=6 * 2**20, name="RTX 3090")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: seen}.__getitem__)
    rest = {"memory_clock_rate": 0, "memory_bus_width": 0}
    assert device_code.visible_gpu() == {name: x for name, x in vars(seen).items() if name != "name"} | rest


def test_what_a_board_decides_is_decided_as_on_it() -> None:
    from benchmarks.ab import device_code_worker
    from nsa.triton_backend import decode, traffic

    for sms in (108, 54):
        with device_code_worker._on_board({**A100, "multi_processor_count": sms}):
            assert decode.num_sms(torch.device("cpu")) == sms
            found = traffic.memory_system(torch.device("cpu"), 80)
        assert (found.num_sms, found.l2_bytes) == (sms, 40 * 2**20)
        assert found.dram_tb_per_s == pytest.approx(2.039, rel=0.001)
        traffic.memory_system.cache_clear()


def test_what_tma_reads_is_part_of_a_launch() -> None:
    from benchmarks.ab import device_code_worker

    def read(x: torch.Tensor, rows: int) -> str:
        descriptor = SimpleNamespace(base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=[rows, 32])
        return device_code_worker._said((descriptor, (descriptor, 3), None))

    x = torch.zeros(64, 32)
    assert read(x, 16) == read(x.clone(), 16)
    assert len({read(x, 16), read(x, 32), read(x.T.contiguous().T, 16), read(x.half(), 16)}) == 4


def test_what_launches_a_kernel_is_built_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that version of nsa/ can: the processes that measure find it in Triton's cache."""
    from benchmarks.ab import device_code_worker

    metadata = SimpleNamespace(shared=0, num_warps=4)
    compiled = SimpleNamespace(metadata=metadata, asm={"ptx": "ret;"})
    monkeypatch.setattr(device_code_worker.triton, "compile", lambda *_, **__: compiled)
    monkeypatch.setattr(device_code_worker, "_CUOBJDUMP", Path("not there"))
    built: list[object] = []
    kernel: Any = SimpleNamespace(source=None, options={}, architecture=90)
    of_an_earlier_version = device_code_worker.instructions(kernel)
    kernel.build_launcher = built.append
    assert device_code_worker.instructions(kernel) == of_an_earlier_version
    assert built == [compiled]


def test_lines_that_name_the_source_are_left_out_of_ptx() -> None:
    from benchmarks.ab import device_code_worker

    ptx = (
        '.target sm_80, debug\n\t.file 1 "a.py"\n\t.loc 1 20 3\n\tadd.s32 %r1; // a\n\t.section\t.debug_info\n{ .b8 1 }'
    )
    assert device_code_worker.without_source(ptx) == "\tadd.s32 %r1; // a"
