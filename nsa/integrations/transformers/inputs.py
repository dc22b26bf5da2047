"""Checks of what a model of transformers is called with, by the names that the caller gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuse(**arguments: Any) -> None:
    """ValueError for arguments that are not served; False and None ask for nothing."""
    asked = [name for name, value in arguments.items() if value is not None and value is not False]
    if asked:
        raise ValueError(f"{', '.join(asked)}: not served by NSA's models; leave it out")


def check_inputs(input_ids: object, inputs_embeds: object, hidden_size: int) -> tuple[int, int]:
    """(B, S) of input_ids [B, S] or inputs_embeds [B, S, hidden_size]. ValueError or TypeError for anything else."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids or inputs_embeds must be given, and not both")
    if input_ids is not None:
        shape = _shape("input_ids", input_ids, floating=False)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"input_ids must be [B, S] with at least one row and one column; got {list(shape)}")
    else:
        shape = _shape("inputs_embeds", inputs_embeds, floating=True)
        if len(shape) != 3 or 0 in shape or shape[2] != hidden_size:
            raise ValueError(
                f"inputs_embeds must be [B, S, {hidden_size}] with at least one row and one column; got {list(shape)}"
            )
    return shape[0], shape[1]


def check_labels(labels: object, size: tuple[int, int]) -> None:
    """ValueError or TypeError unless labels are integers of this size."""
    if (shape := tuple(_shape("labels", labels, floating=False))) != size:
        raise ValueError(f"labels must be {list(size)}, as the inputs; got {list(shape)}")


def check_prompts(attention_mask: object) -> None:
    """ValueError for prompts of `generate` that do not end with a token; other faults of a mask are found later."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or 0 in attention_mask.shape:
        return
    ends = (attention_mask[:, -1] != 0).tolist()
    if not all(ends):
        raise ValueError(
            "attention_mask must not be 0 in its last column: generate goes on from the last token of each row. Pad "
            f"prompts on the left, and give each row at least one token; row {ends.index(False)} ends with padding"
        )


def _shape(name: str, value: object, *, floating: bool) -> torch.Size:
    kind = "a floating-point" if floating else "an integer"
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {kind} tensor; got {type(value).__name__}")
    if value.is_floating_point() is not floating or value.dtype == torch.bool:
        raise TypeError(f"{name} must be {kind} tensor; got {value.dtype}")
    return value.shape
