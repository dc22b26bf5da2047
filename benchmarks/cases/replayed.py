"""Block indices as a trained model chose them, for the cases whose kind of inputs is `replayed`.

A prefill's selected attention (`part-selected`) is given the choice of whole sequences of held-out text
(`benchmarks.atlas.choices`); its queries and keys are random, on whose values no time depends. A decode step chooses by
itself: keys and queries are made so that its choice is the recorded one, step after step of text that the model wrote.
Both are of the atlas that tables/recorded.json names, at the very length of the case: nothing is stretched. Key/value
heads take one recorded head after the other, and the first again where there are fewer.
"""

from __future__ import annotations

import math
import random
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.atlas import choices, record
from benchmarks.atlas.choices import Choices
from benchmarks.cases import recorded
from benchmarks.cases.key import Key
from benchmarks.cases.recorded import DECODE_STEPS
from harness import environment
from nsa import NSAConfig, geometry

KIND = "replayed"
PREFILL = "part-selected"
MODES = (PREFILL, "decode")
_LOGIT = 6.0
"""Of a chosen block's keys, scaled. A block beside two chosen ones shares half of it with each, which e^3 against e^6
leaves behind; the noise of a compressed key, the mean of 32, is some 0.2."""


def why_not(key: Key) -> str | None:
    """Why nothing recorded can be replayed in this case, in words; None where it can."""
    if key.mode not in MODES or key.config is None:
        return f"recorded choices are replayed by NSA in {' and '.join(MODES)} alone"
    if key.head_dim_k < 2 * DECODE_STEPS:
        return f"heads must have at least {2 * DECODE_STEPS} channels; got {key.head_dim_k}"
    atlas = recorded.table().atlas
    if atlas is None:
        return f"there is no atlas yet: {recorded.TABLE.name} names none (docs/atlas.md makes one)"
    try:
        (_sequences if key.mode == PREFILL else _steps)(_results(), atlas, key.num_keys, _config(key))
    except (OSError, ValueError) as error:
        return f"no choices at {key.num_keys} tokens: {error}"
    return None


def block_indices(key: Key, device: str, seed: int) -> Tensor:
    """int32 [B, S, Hkv, n]: the choice of whole sequences; which head's stands where follows from the seed."""
    heads = _sequences(_results(), _atlas(), key.num_keys, _config(key))
    begin = random.Random(seed).randrange(len(heads))
    taken = [heads[(begin + i) % len(heads)] for i in range(key.batch * key.num_kv_heads)]
    together = torch.from_numpy(np.stack(taken)).unflatten(0, (key.batch, key.num_kv_heads))
    return together.transpose(1, 2).contiguous().to(device)


def aim(q: Tensor, k: Tensor, key: Key, seed: int, step: int) -> None:
    """Let the queries of a decode step, q [B, 1, Hq, Dk], choose from k [B, T, Hkv, Dk] what was recorded.

    Both are overwritten, in a channel for each of `DECODE_STEPS` consecutive steps: the keys of a block have those of
    the steps that chose it, and the query that of its own step.
    """
    chosen = decode_steps(key, seed)
    size = math.sqrt(_LOGIT * math.sqrt(key.head_dim_k))
    channels = torch.zeros(key.batch, -(-key.num_keys // _config(key).l_sel), key.num_kv_heads, DECODE_STEPS)
    for number, blocks in enumerate(chosen.transpose(2, 3)):  # [B, n, Hkv]
        channels[..., number].scatter_(1, blocks.long(), size)
    of_keys = channels.repeat_interleave(_config(key).l_sel, 1)[:, : key.num_keys]
    k[..., :DECODE_STEPS] = of_keys.to(k.device, k.dtype)
    q[..., :DECODE_STEPS] = 0
    q[..., step] = size


def decode_steps(key: Key, seed: int) -> Tensor:
    """int32 [steps, B, Hkv, n]: what consecutive decode steps chose; which head and which step is first follows from
    the seed."""
    samples = _steps(_results(), _atlas(), key.num_keys, _config(key))
    begin = random.Random(seed).randrange(len(samples))
    taken = [samples[(begin + i) % len(samples)] for i in range(key.batch * key.num_kv_heads)]
    return torch.from_numpy(np.stack(taken, 1)).unflatten(1, (key.batch, key.num_kv_heads))


def followed(key: Key) -> str:
    """What is replayed, for a record."""
    what = "whole sequences" if key.mode == PREFILL else "decode steps"
    return f"the choices of {what} of {key.num_keys} tokens in {recorded.table().atlas}"


def _atlas() -> str:
    named = recorded.table().atlas
    if named is None:
        raise ValueError(f"{recorded.TABLE.name} names no atlas whose choices could be replayed")
    return named


def _config(key: Key) -> NSAConfig:
    assert key.config is not None
    return NSAConfig.from_mapping(key.config)


def _results() -> Path:
    return environment.read().results


@cache
def _sequences(results: Path, atlas: str, seq_len: int, config: NSAConfig) -> list[np.ndarray]:
    """[seq_len, n] of each recorded head. Raises OSError or ValueError where there is none."""
    found: Choices = choices.read(results, atlas, seq_len)
    return [found.indices(head, config) for head in found.heads]


@cache
def _steps(results: Path, atlas: str, seq_len: int, config: NSAConfig) -> list[np.ndarray]:
    """[DECODE_STEPS, n] of stretches of steps that follow one another, of all heads in turn.

    Raises OSError or ValueError where there is none that a last token of so many could have chosen.
    """
    samples = [one for one in record.read(results / record.FOLDER / atlas).samples if one.decode]
    own = (seq_len - 1) // config.l_sel
    forced = {j for j in range(own + 1) if geometry.is_forced(j, own, config)}
    stretches = [
        np.array(one.block_indices[first : first + DECODE_STEPS], np.int32)
        for first in range(0, max((len(one.block_indices) for one in samples), default=0), DECODE_STEPS)
        for one in samples
        if one.seq_len == seq_len and first + DECODE_STEPS <= len(one.block_indices)
    ]
    legal = [x for x in stretches if x.shape[1] == config.n_sel and all(_legal(row, own, forced) for row in x.tolist())]
    if not legal:
        raise ValueError(f"{atlas} has no {DECODE_STEPS} decode steps there with n = {config.n_sel}")
    return legal


def _legal(row: list[int], own: int, forced: set[int]) -> bool:
    return row == sorted(set(row)) and row[0] >= 0 and row[-1] <= own and forced <= set(row)
