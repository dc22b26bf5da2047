"""The lines of README.md for those who know transformers run as they stand."""

from __future__ import annotations

import math
import re

import pytest
import torch

from harness.repository import ROOT


def test_from_an_import_to_a_trained_step_and_a_generated_token(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "AutoModelForCausalLM" in block]
    assert len([line for line in lines.splitlines() if line]) == 10
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(lines, names)
    loss, tokens = re.fullmatch(r"([\d.]+) tensor\(\[\[(.*)\]\]\)\n", capsys.readouterr().out, re.DOTALL).groups()  # type: ignore[union-attr]
    assert float(loss) == pytest.approx(math.log(256), abs=0.5)
    *prompt, new = map(int, tokens.split(","))
    assert bytes(prompt) == b"Native Sparse Attention "
    assert 0 <= new < 256
    assert all(parameter.grad is not None for parameter in names["model"].parameters())  # type: ignore[attr-defined]
