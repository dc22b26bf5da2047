"""Every wrong argument of the functional face raises an error that names it, what came and what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa import NSAConfig

CONFIG = NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=8)
S, HQ, HKV, DK, DV = 12, 4, 2, 8, 6
SLOTS = 5  # compression blocks in S tokens


def _call(**changed: Any) -> dict[str, Any]:
    """Arguments of a good call of `nsa_attention`, some of them replaced."""
    good: dict[str, Any] = {
        "q": torch.zeros(1, S, HQ, DK),
        "k": torch.zeros(1, S, HKV, DK),
        "v": torch.zeros(1, S, HKV, DV),
        "gates": torch.zeros(1, S, HQ, 3),
        "config": CONFIG,
    }
    return {**good, **changed}


def _bounds(*bounds: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(bounds, dtype=dtype)


K, V = torch.zeros(1, S, HKV, DK), torch.zeros(1, S, HKV, DV)

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, "q must be a tensor; got list"),
    ({"q": torch.zeros(S, HQ, DK)}, ValueError, "q must have shape [B, S, Hq, Dk]; got [12, 4, 8]"),
    ({"q": torch.zeros(1, S, HQ, DK, dtype=torch.int32)}, TypeError, "q must be float32, bfloat16, float16 or float64"),
    ({"q": torch.zeros(1, S, HQ, DK).to_sparse()}, ValueError, "q must be a dense (strided) tensor; got layout"),
    ({"q": torch.zeros(1, S, 0, DK)}, ValueError, "q must have at least one head and one channel; got [1, 12, 0, 8]"),
    ({"q": torch.zeros(1, S, HQ, 0)}, ValueError, "q must have at least one head and one channel; got [1, 12, 4, 0]"),
    (
        {"q": torch.zeros(1, S + 1, HQ, DK), "gates": torch.zeros(1, S + 1, HQ, 3)},
        ValueError,
        "the length of k must be at least the 13 queries; got 12",
    ),
    (
        {"q": torch.zeros(1, HQ, S, DK), "k": torch.zeros(1, HKV, S, DK), "v": torch.zeros(1, HKV, S, DV)},
        ValueError,
        "gates must have shape [1, 4, 12, 3]; got [1, 12, 4, 3]: the layout is [B, S, H, ...], and either gates or the"
        " others, [1, 4, 12, 8], look like [B, H, S, ...]: pass x.transpose(1, 2)",
    ),
    (
        {
            "q": torch.zeros(1, HQ, S, DK),
            "k": torch.zeros(1, HKV, S, DK),
            "v": torch.zeros(1, HKV, S, DV),
            "gates": torch.zeros(1, HQ, S, 3),
        },
        ValueError,
        "the length of k must be at least the 4 queries; got 2; the layout is [B, S, H, D], and [1, 4, 12, 8] with"
        " [1, 2, 12, 8] look like [B, H, S, D]: pass x.transpose(1, 2)",
    ),
    (
        {"q": torch.zeros(1, HQ, S, DK), "k": torch.zeros(1, HKV, S + 1, DK)},
        ValueError,
        "the heads of k must divide the 12 heads of q; got 13; the layout is [B, S, H, D], and",
    ),
    ({"q": torch.zeros(1, S, HQ, DK, device="meta")}, ValueError, "q must be on a device that holds its values"),
    ({"k": None}, TypeError, "k must be a tensor; got NoneType"),
    ({"k": torch.zeros(2, S, HKV, DK)}, ValueError, "k must have shape [1, T, Hkv, 8]; got [2, 12, 2, 8]"),
    ({"k": torch.zeros(1, S, HKV, 5)}, ValueError, "k must have shape [1, T, Hkv, 8]; got [1, 12, 2, 5]"),
    ({"k": torch.zeros(1, S, 3, DK)}, ValueError, "the heads of k must divide the 4 heads of q; got 3"),
    ({"k": torch.zeros(1, S, 0, DK)}, ValueError, "the heads of k must divide the 4 heads of q; got 0"),
    ({"k": K.half()}, TypeError, "k must have the dtype of q, torch.float32; got torch.float16"),
    ({"k": K.to("meta")}, ValueError, "k must be on the device of q, cpu; got meta"),
    ({"k": (K, K)}, ValueError, "k must be a tensor or 3 tensors (compressed, selected, window); got 2"),
    ({"k": (K, K, K[:, 1:])}, ValueError, "k[2] must have shape [1, 12, 2, 8]; got [1, 11, 2, 8]"),
    ({"k": (K, K, K.half())}, TypeError, "k[2] must have the dtype of q, torch.float32; got torch.float16"),
    ({"k": (None, K, K)}, TypeError, "k[0] must be a tensor; got NoneType"),
    ({"k": (K.half(), K, K)}, TypeError, "must have the dtype of q, torch.float32; got torch.float16"),
    ({"v": torch.zeros(1, S - 1, HKV, DV)}, ValueError, "v must have shape [1, 12, 2, Dv]; got [1, 11, 2, 6]"),
    ({"v": torch.zeros(1, S, 1, DV)}, ValueError, "v must have shape [1, 12, 2, Dv]; got [1, 12, 1, 6]"),
    ({"v": torch.zeros(1, S, HKV, 0)}, ValueError, "v must have at least one channel; got [1, 12, 2, 0]"),
    ({"v": V.bfloat16()}, TypeError, "v must have the dtype of k, torch.float32; got torch.bfloat16"),
    ({"v": (V, V, V[..., :2])}, ValueError, "v[2] must have shape [1, 12, 2, 6]; got [1, 12, 2, 2]"),
    ({"gates": torch.zeros(1, S, HQ, 2)}, ValueError, "gates must have shape [1, 12, 4, 3]; got [1, 12, 4, 2]"),
    ({"gates": torch.zeros(1, S, HQ, 3).long()}, TypeError, "gates must be float32, bfloat16, float16 or float64"),
    ({"config": {"w": 8}}, TypeError, "config must be an NSAConfig; got dict"),
    ({"config": NSAConfig(phi="mlp")}, ValueError, "k_compressed must be given with phi='mlp'"),
    ({"k_compressed": K[:, :3]}, ValueError, "k_compressed must have shape [1, 5, 2, 8]; got [1, 3, 2, 8]"),
    ({"v_compressed": V[:, :3]}, ValueError, "v_compressed must have shape [1, 5, 2, 6]; got [1, 3, 2, 6]"),
    ({"k_compressed": K[:, :SLOTS].half()}, TypeError, "k_compressed must have the dtype of q, torch.float32; got"),
    ({"scale": "small"}, TypeError, "scale must be a float or None; got str"),
    ({"scale": True}, TypeError, "scale must be a float or None; got bool"),
    ({"backend": "cuda"}, ValueError, "backend must be one of auto, reference, torch, triton; got 'cuda'"),
    ({"cu_seqlens": [0, S]}, TypeError, "cu_seqlens must be a tensor; got list"),
    ({"cu_seqlens": _bounds(0, S, dtype=torch.int64)}, TypeError, "cu_seqlens must be int32; got torch.int64"),
    ({"cu_seqlens": _bounds(0)}, ValueError, "cu_seqlens must have shape [N+1] with N >= 1; got [1]"),
    ({"cu_seqlens": _bounds(0, S)[None]}, ValueError, "cu_seqlens must have shape [N+1] with N >= 1; got [1, 2]"),
    ({"cu_seqlens": _bounds(1, S)}, ValueError, "cu_seqlens must ascend from 0 to 12; got [1, 12]"),
    ({"cu_seqlens": _bounds(0, S - 1)}, ValueError, "cu_seqlens must ascend from 0 to 12; got [0, 11]"),
    ({"cu_seqlens": _bounds(0, 9, 3, S)}, ValueError, "cu_seqlens must ascend from 0 to 12; got [0, 9, 3, 12]"),
    ({"cu_seqlens": _bounds(0, S).to("meta")}, ValueError, "cu_seqlens must be on the device of q, cpu; got meta"),
    (
        {"cu_seqlens": _bounds(0, S), "q": torch.zeros(1, 3, HQ, DK), "gates": torch.zeros(1, 3, HQ, 3)},
        ValueError,
        "cu_seqlens needs as many queries as keys; got 3 and 12",
    ),
    (
        {
            "cu_seqlens": _bounds(0, S),
            "q": torch.zeros(2, S, HQ, DK),
            "k": K.expand(2, -1, -1, -1),
            "v": V.expand(2, -1, -1, -1),
            "gates": torch.zeros(2, S, HQ, 3),
        },
        ValueError,
        "cu_seqlens needs one packed row, B = 1; got B = 2",
    ),
]


def _raises(kind: type[Exception], message: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)
    assert type(error.value) is kind


def test_the_good_call_is_served() -> None:
    """Otherwise the errors below would prove nothing."""
    assert nsa.nsa_attention(**_call()).shape == (1, S, HQ, DV)


@pytest.mark.parametrize(("changed", "kind", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_wrong_argument_of_nsa_attention(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    _raises(kind, message, lambda: nsa.nsa_attention(**_call(**changed)))


Q, CMP = torch.zeros(1, S, HQ, DK), torch.zeros(1, SLOTS, HKV, DK)
INDICES = torch.zeros(1, S, HKV, 3, dtype=torch.int32)
OUT, GATES = torch.zeros(1, S, HQ, DV), torch.zeros(1, S, HQ, 3)

WRONG_PARTS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("compress", lambda: nsa.compress(K[0], CONFIG), ValueError, "x must have shape [B, T, H, D]; got [12, 2, 8]"),
    (
        "compress",
        lambda: nsa.compress(K, NSAConfig(phi="linear")),
        ValueError,
        "compress has no weights, so phi must be 'avg'; got 'linear'",
    ),
    ("compress", lambda: nsa.compress(K.to("meta"), CONFIG), ValueError, "x must be on a device that holds its values"),
    ("compress", lambda: nsa.compress(K, None), TypeError, "config must be an NSAConfig; got NoneType"),  # type: ignore[arg-type]
    (
        "compressed_attention",
        lambda: nsa.compressed_attention(Q, CMP[:, 1:], CMP[:, 1:], CONFIG),
        ValueError,
        "k_cmp must hold 5 compressed blocks (12 keys with l=4, d=2); got 4",
    ),
    (
        "compressed_attention",
        lambda: nsa.compressed_attention(Q, CMP, CMP[:, 1:], CONFIG),
        ValueError,
        "v_cmp must have shape [1, 5, 2, Dv]; got [1, 4, 2, 8]",
    ),
    (
        "compressed_attention",
        lambda: nsa.compressed_attention(Q, CMP, CMP, CONFIG, S - 1),
        ValueError,
        "num_keys must be at least the 12 queries; got 11",
    ),
    (
        "compressed_attention",
        lambda: nsa.compressed_attention(Q, CMP, CMP, CONFIG, 12.0),  # type: ignore[arg-type]
        TypeError,
        "num_keys must be an int; got float",
    ),
    (
        "select_blocks",
        lambda: nsa.select_blocks(Q, CMP, CONFIG, 16),
        ValueError,
        "k_cmp must hold 7 compressed blocks (16 keys with l=4, d=2); got 5",
    ),
    (
        "select_blocks",
        lambda: nsa.select_blocks(Q, CMP.half(), CONFIG),
        TypeError,
        "k_cmp must have the dtype of q, torch.float32; got torch.float16",
    ),
    (
        "select_blocks",
        lambda: nsa.select_blocks(Q, CMP, CONFIG, lse=torch.zeros(1, S, HKV)),
        ValueError,
        "lse must have shape [1, 12, 4]; got [1, 12, 2]",
    ),
    (
        "selected_attention",
        lambda: nsa.selected_attention(Q, K, V, INDICES.float(), CONFIG),
        TypeError,
        "block_indices must be int32 or int64; got torch.float32",
    ),
    (
        "selected_attention",
        lambda: nsa.selected_attention(Q, K, V, INDICES[:, :, :1], CONFIG),
        ValueError,
        "block_indices must have shape [1, 12, 2, n]; got [1, 12, 1, 3]",
    ),
    (
        "selected_attention",
        lambda: nsa.selected_attention(Q, K, V, None, CONFIG),  # type: ignore[arg-type]
        TypeError,
        "block_indices must be a tensor; got NoneType",
    ),
    (
        "selected_attention",
        lambda: nsa.selected_attention(Q, K, V, INDICES.to("meta"), CONFIG),
        ValueError,
        "block_indices must be on the device of q, cpu; got meta",
    ),
    (
        "window_attention",
        lambda: nsa.window_attention(Q, K, V[:, 1:], CONFIG),
        ValueError,
        "v must have shape [1, 12, 2, Dv]; got [1, 11, 2, 6]",
    ),
    (
        "window_attention",
        lambda: nsa.window_attention(Q, K[:, 1:], V[:, 1:], CONFIG),
        ValueError,
        "the length of k must be at least the 12 queries; got 11",
    ),
    (
        "combine",
        lambda: nsa.combine((OUT, OUT), GATES),
        ValueError,
        "outputs must be 3 tensors (compressed, selected, window); got 2",
    ),
    (
        "combine",
        lambda: nsa.combine((OUT, OUT, OUT[:, 1:]), GATES),
        ValueError,
        "outputs[2] must have shape [1, 12, 4, 6]; got [1, 11, 4, 6]",
    ),
    (
        "combine",
        lambda: nsa.combine((OUT, OUT.half(), OUT), GATES),
        TypeError,
        "outputs[1] must have the dtype of outputs[0], torch.float32; got torch.float16",
    ),
    (
        "combine",
        lambda: nsa.combine((OUT.to("meta"),) * 3, GATES),
        ValueError,
        "outputs[0] must be on a device that holds its values; got a tensor on the device meta",
    ),
    (
        "combine",
        lambda: nsa.combine((OUT, OUT, OUT), GATES[..., :2]),
        ValueError,
        "gates must have shape [1, 12, 4, 3]; got [1, 12, 4, 2]",
    ),
]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [case[1:] for case in WRONG_PARTS],
    ids=[f"{part}: {message}" for part, _, _, message in WRONG_PARTS],
)
def test_wrong_argument_of_a_part(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    _raises(kind, message, call)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "bounds", [(0, 9, 3, S), (0, S, 0, S), (-1000, S), (0, -1000, S), (-(2**31), 2**31 - 1), (0, S + 1), (3, S)]
)
def test_bad_documents_on_a_gpu_end_in_nan(bounds: tuple[int, ...]) -> None:
    """They cannot be read without a host sync; so the rows are NaN, never a wrong number or a CUDA fault."""
    call = _call(cu_seqlens=_bounds(*bounds))
    call = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
    for backend in ("torch", "triton"):
        assert nsa.nsa_attention(**call, backend=backend).isnan().all()
    torch.cuda.synchronize()
