"""Packages with contenders, sound and broken, as they lie in a folder of sys.path once they are installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

SOUND = """
import torch
from torch.nn.functional import scaled_dot_product_attention

import nsa
from benchmarks.baselines import Baseline

CONFIG = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=8)


def dense(p):
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True).transpose(1, 2)


def sparse(p):
    return nsa.nsa_attention(p.q, p.k, p.v, p.gates, CONFIG, backend="torch")


def blocks(p):
    return nsa.select_blocks(p.q, nsa.compress(p.k, CONFIG), CONFIG, p.k.shape[1], backend="torch")


"""


def install(site: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    """A package for each name, `my_dense` offering `CONTENDER` as "my-dense", for this process and its children."""
    for name, source in sources.items():
        site.mkdir(exist_ok=True)
        (site / f"{name}.py").write_text(source)
        offer(site, name.replace("_", "-"), {name.replace("_", "-"): f"{name}:CONTENDER"})
    reach(site, monkeypatch)


def offer(site: Path, package: str, contenders: Mapping[str, str], group: str = "nsa.contenders") -> None:
    """What an installer writes of a package's entry points."""
    folder = site / f"{package.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in contenders.items())
    (folder / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")


def reach(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a folder on sys.path here and in children."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))


def sound(name: str, call: str = "dense", more: str = "") -> str:
    """The source of a package whose contender is sound, but for `call`."""
    return f"{SOUND}CONTENDER = Baseline({name!r}, {call}{more})\n"
