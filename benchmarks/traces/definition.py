"""A case as flashinfer-bench describes one: a Definition (tensors by named axes, a reference) and a Workload (sizes).

Heads, head sizes, dtype and NSA's settings are the Definition's, so that each has a reference that runs; batch and
lengths are the Workload's. Both are plain JSON objects here.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from benchmarks.cases.key import Key
from nsa import NSAConfig, geometry

Json = dict[str, Any]

KINDS = {"prefill-forward": "prefill", "prefill-forward-backward": "prefill_backward", "decode": "decode"}
"""Modes that have a Definition; the others time parts of NSA, a train step, or memory."""
_NAMESPACE = uuid.UUID("8f1d8c0e-5f0a-4b43-9d0e-6f6e73612d62")
_Q, _O = ("batch", "num_queries", "num_heads", "head_dim_k"), ("batch", "num_queries", "num_heads", "head_dim_v")
_K, _V = ("batch", "num_keys", "num_kv_heads", "head_dim_k"), ("batch", "num_keys", "num_kv_heads", "head_dim_v")
_GATES = ("batch", "num_queries", "num_heads", "num_branches")
_K_COMPRESSED = ("batch", "num_blocks", "num_kv_heads", "head_dim_k")
_V_COMPRESSED = ("batch", "num_blocks", "num_kv_heads", "head_dim_v")
_INPUTS = {
    "random": "every value normal",
    "recorded": "what NSA selects from q and k follows curves recorded of a trained model; v normal",
    "recorded-p10": "the same, of the heads whose neighbouring queries choose least alike",
    "recorded-p90": "the same, of the heads whose neighbouring queries choose most alike",
    "replayed": "NSA selects from q and k the blocks that a trained model chose, step after step; v normal",
    "local": "q and k each walk over the tokens, so that neighbours choose alike; v normal",
}
_NSA = """\
import torch

import nsa  # the package nsa-trusted; its specification is nsa/reference.py, to which this backend is held

CONFIG = nsa.NSAConfig.from_mapping({config!r})


def attend(q, k, v, gates{given}):
    return nsa.nsa_attention(q, k, v, gates, CONFIG{passed}, backend="torch")
"""
_DENSE = """\
import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(q, k, v):
    num_queries, num_keys = q.shape[1], k.shape[1]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
"""
_RUN_FORWARD = """

@torch.no_grad()
def run({names}):
    return attend({names})
"""
_RUN_BACKWARD = """

def run({names}, d_o):
    inputs = [x.detach().requires_grad_() for x in ({names})]
    o = attend(*inputs)
    return (o.detach(), *torch.autograd.grad(o, inputs, d_o))
"""


def name(key: Key) -> str:
    """The Definition's name, also that of its files: all but batch and lengths. KeyError for a mode without one."""
    words = [f"h{key.heads}", f"kv{key.num_kv_heads}", f"dk{key.head_dim_k}", f"dv{key.head_dim_v}", key.dtype]
    words += [f"{field.replace('_', '')}{value}" for field, value in (key.config or {}).items()]
    words += [key.inputs] * (key.inputs != "random")
    return "_".join([op_type(key), KINDS[key.mode], *(re.sub(r"[^a-z0-9.-]", "", word.lower()) for word in words)])


def op_type(key: Key) -> str:
    """The folder of its files."""
    return "gqa" if key.config is None else "nsa"


def definition(key: Key) -> Json:
    """The Definition of a key. ValueError or TypeError where its settings are none of NSA's."""
    given, gradients = _inputs(key), key.mode == "prefill-forward-backward"
    outputs = {"o": _O, **({f"d{one}": shape for one, shape in given.items()} if gradients else {})}
    inputs = {**given, "d_o": _O} if gradients else given
    said = "causal dense attention" if key.config is None else "Native Sparse Attention (arXiv 2502.11089)"
    return {
        "name": name(key),
        "op_type": op_type(key),
        "description": f"{said} of the last num_queries of num_keys tokens. Inputs: {_INPUTS[key.inputs]}; gates"
        " uniform in [0, 1).",
        "tags": [f"mode:{key.mode}", f"inputs:{key.inputs}"],
        "axes": _axes(key),
        "constraints": ["num_queries <= num_keys"],
        "inputs": {one: {"shape": list(shape), "dtype": key.dtype} for one, shape in inputs.items()},
        "outputs": {one: {"shape": list(shape), "dtype": key.dtype} for one, shape in outputs.items()},
        "reference": _reference(key, list(given), gradients=gradients),
    }


def workload(key: Key) -> Json:
    """The Workload of a key: sizes, and an identifier of the case that says the rest (cold or warm, graph or eager)."""
    axes = {"batch": key.batch, "num_queries": key.num_queries, "num_keys": key.num_keys}
    inputs = [*_inputs(key), *["d_o"] * (key.mode == "prefill-forward-backward")]
    if "k_compressed" in inputs:
        axes["num_blocks"] = geometry.num_compressed_blocks(key.num_keys, NSAConfig.from_mapping(key.config or {}))
    return {
        "axes": axes,
        "inputs": {one: {"type": "random"} for one in inputs},
        "uuid": str(uuid.uuid5(_NAMESPACE, f"{name(key)} {key.case}")),
    }


def _inputs(key: Key) -> dict[str, tuple[str, ...]]:
    """Names and axes of what a call is given; a decode step of NSA has the compressed keys and values in its cache."""
    inputs: dict[str, tuple[str, ...]] = {"q": _Q, "k": _K, "v": _V}
    if key.config is not None:
        inputs["gates"] = _GATES
        if key.mode == "decode":
            inputs |= {"k_compressed": _K_COMPRESSED, "v_compressed": _V_COMPRESSED}
    return inputs


def _axes(key: Key) -> Json:
    constants = {
        "num_heads": key.heads,
        "num_kv_heads": key.num_kv_heads,
        "head_dim_k": key.head_dim_k,
        "head_dim_v": key.head_dim_v,
    }
    variable = ["batch", "num_queries", "num_keys"]
    if key.config is not None:
        constants["num_branches"] = 3
        variable += ["num_blocks"] * (key.mode == "decode")
    return {
        **{one: {"type": "var"} for one in variable},
        **{one: {"type": "const", "value": value} for one, value in constants.items()},
    }


def _reference(key: Key, names: list[str], *, gradients: bool) -> str:
    if key.config is None:
        attend = _DENSE
    else:
        NSAConfig.from_mapping(key.config)  # raises
        compressed = [one for one in names if one.endswith("_compressed")]
        attend = _NSA.format(
            config=dict(key.config),
            given="".join(f", {one}" for one in compressed),
            passed="".join(f", {one}={one}" for one in compressed),
        )
    return attend + (_RUN_BACKWARD if gradients else _RUN_FORWARD).format(names=", ".join(names))
