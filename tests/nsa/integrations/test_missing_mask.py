"""The detector of missing-mask: it sees the fault as reported, in the product, and in a loss alone; nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask

from regression.incidents import missing_mask
from regression.incidents.missing_mask import _leaks, _nsa, _registered_without_mask


def test_an_attention_without_its_mask_function_is_seen_and_one_with_it_is_clean() -> None:
    model = _registered_without_mask("cpu")
    found = _leaks("Llama", model, "cpu")
    assert len([line for line in found if "logits" in line]) == 3
    assert len([line for line in found if "loss" in line]) == 2
    AttentionMaskInterface.register("without_mask_function", eager_mask)
    try:
        assert _leaks("Llama", model, "cpu") == []
    finally:
        del AttentionMaskInterface._global_mapping["without_mask_function"]


def test_the_fault_is_seen_in_the_product_and_nothing_without_it() -> None:
    model = _nsa("torch", "cpu")
    assert _leaks("NSA", model, "cpu") == []
    with missing_mask.inject():
        assert len(_leaks("NSA", model, "cpu")) == 5


@pytest.mark.parametrize("shifted", [0.0, 1e-6])
def test_a_loss_that_alone_sees_the_future_is_seen(shifted: float) -> None:
    healthy = _nsa("torch", "cpu")

    def model(input_ids: Tensor, labels: Tensor) -> Any:
        output = healthy(input_ids=input_ids, labels=labels)
        return SimpleNamespace(
            logits=output.logits, loss=output.loss + shifted * input_ids[:, -1].sum().to(torch.float64)
        )

    found = _leaks("NSA", model, "cpu")
    assert ["loss" in line for line in found] == ([True, True] if shifted else [])
