"""Each baseline is called as it wants to be, meets the oracle, and says why it is absent or refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.baselines import BASELINES, NotPresentError, UnsupportedError, fla, flex, sdpa
from benchmarks.baselines.baseline import package_refusals
from benchmarks.cases.key import Key
from benchmarks.correctness.verify import IncorrectError
from benchmarks.workloads import attention
from benchmarks.workloads.prepare import prepare
from tests.benchmarks.baselines import fake_packages
from tests.benchmarks.synthetic import key

CUDA_ONLY = ("sdpa-cudnn", "sdpa-efficient", "flash-attn", "flash-attn-4", "fla-nsa")


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own definition, a second where its kernel takes a minute to compile."""
    monkeypatch.setattr(flex, "_compiled", lambda *_: torch.nn.attention.flex_attention.flex_attention)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them installed."""
    fake_packages.install_flash_4(monkeypatch)
    fake_packages.install_flash_2(monkeypatch)
    fake_packages.install_fla(monkeypatch)
    fake_packages.install_lucidrains(monkeypatch)


def fla_key(mode: str = "prefill-forward", length: int = 1344) -> Key:
    """21 blocks of 64: some are left out."""
    return key(mode, "fla-nsa", length=length, config=dataclasses.asdict(fla.CONFIG))


def check(the_key: Key) -> list[str]:
    """The names of the comparisons, all green, before and after the timing."""
    work = attention.prepare(the_key, "cpu")
    with work.refusals():
        work.call()
    before = work.check(0)
    assert work.recheck is not None
    assert before.path == the_key.implementation
    assert work.recheck(work.call, 7).passed
    return [check.name for check in before.checks]


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-math", "flash-attn", "flash-attn-4"])
def test_dense_baselines_meet_the_oracle(name: str, packages: None) -> None:
    assert check(key("prefill-forward-backward", name, length=96)) == ["o", "dq", "dk", "dv"]
    assert check(key("decode", name, length=96, batch=2)) == ["o"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_meets_the_oracle(uncompiled_flex: None) -> None:
    assert check(key(implementation="flex", length=200)) == ["o"]
    assert check(key("decode", "flex", length=200)) == ["o"]


def test_a_kernel_without_groups_gets_its_keys_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sdpa.BACKENDS, "sdpa-efficient", sdpa.BACKENDS["sdpa-math"])
    monkeypatch.setattr(attention, "require_kernel", lambda *_: None)  # it is the other one that runs here
    assert check(key("prefill-forward-backward", "sdpa-efficient", length=96)) == ["o", "dq", "dk", "dv"]


def test_another_nsa_meets_the_oracle_with_its_own_settings(packages: None) -> None:
    names = ["block_indices", "o", "dq", "dk", "dv", "dgates"]
    assert check(fla_key("prefill-forward-backward")) == names


def test_another_nsa_that_chooses_other_blocks_is_stopped(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_blocks(**arguments: Any) -> Tensor:
        chosen = fake_packages._topk(**arguments)
        return torch.arange(chosen.shape[-1], dtype=torch.int32).expand_as(chosen)

    monkeypatch.setattr(fla._parallel(), "parallel_nsa_topk", first_blocks)
    with pytest.raises(IncorrectError, match="block_indices: error not finite"):
        attention.prepare(fla_key(), "cpu").check(0)


def test_a_package_aligned_at_the_other_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_packages.install_flash_2(monkeypatch)
    module.flash_attn_func = lambda q, k, v, causal: fake_packages.causal(q, k[:, :1], v[:, :1], causal=True)
    with pytest.raises(IncorrectError, match="o: error"):
        attention.prepare(key("decode", "flash-attn", length=96), "cpu").check(0)


@pytest.mark.parametrize("name", CUDA_ONLY)
def test_without_a_gpu_nothing_is_imported_or_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "prepare", lambda *_: pytest.fail("prepared"))
    with pytest.raises(NotPresentError, match=f"^{name} exists on CUDA devices only$"):
        prepare(key(implementation=name), "cpu")


INSTALLERS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "nothing": lambda monkeypatch: None,
    "flash-attn": fake_packages.install_flash_2,
    "flash-attn-4": fake_packages.install_flash_4,
    "fla-nsa": fake_packages.install_fla,
}


@pytest.mark.parametrize(
    ("name", "installed", "message"),
    [
        ("flash-attn", "nothing", r"is not installed \(No module named 'flash_attn'\): .* install flash-attn$"),
        ("flash-attn", "flash-attn-4", r"is not installed .*: python3 -m pip install flash-attn$"),
        ("flash-attn-4", "flash-attn", r"is not installed .*: python3 -m pip install flash-attn-4$"),
        ("fla-nsa", "nothing", r"is not installed .*: python3 -m pip install flash-linear-attention$"),
        ("lucidrains-nsa", "nothing", r"is not installed .*: python3 -m pip install native-sparse-attention-pytorch$"),
        ("fla-nsa", "fla-nsa", r"takes its window from flash-attn, which is not installed .* install flash-attn$"),
    ],
)  # fmt: skip
def test_an_absent_package_says_what_to_install(
    name: str, installed: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    INSTALLERS[installed](monkeypatch)
    with pytest.raises(NotPresentError, match=f"^{name} {message}"):
        BASELINES[name].require("cuda")


def test_what_is_installed_is_not_absent(packages: None) -> None:
    assert [name for name in BASELINES if BASELINES[name].absent("cuda") is not None] == []


def test_a_refusal_is_told_from_a_fault(packages: None) -> None:
    work = attention.prepare(key(implementation="flash-attn", head_dim_v=8), "cpu")
    with (
        pytest.raises(UnsupportedError, match=r"^flash-attn: this build supports equal head sizes only$"),
        work.refusals(),
    ):
        work.call()


@pytest.mark.parametrize(
    ("error", "caught"),
    [
        (AssertionError(), UnsupportedError),
        (NotImplementedError("no\nbackward"), UnsupportedError),
        (RuntimeError("FlashAttention only supports Ampere GPUs or newer."), UnsupportedError),
        (RuntimeError("CUDA error: an illegal memory access"), RuntimeError),
        (torch.OutOfMemoryError("not supported by the memory that is left"), torch.OutOfMemoryError),
        (KeyError("a bug"), KeyError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_only_a_package_s_own_checks_are_refusals(error: Exception, caught: type[Exception]) -> None:
    with pytest.raises(caught) as raised, package_refusals("it"):
        raise error
    assert type(raised.value) is caught
    assert "\n" not in str(raised.value)
