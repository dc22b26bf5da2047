"""torchtitan's form of the layer and of parallelism trains as `nsa.model` does, and refuses what it cannot serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.repository import ROOT
from nsa.config import NSAConfig
from nsa.integrations import torchtitan
from nsa.layer import NativeSparseAttention
from tests.nsa.integrations import titan

_PATIENCE_S = 300.0
SIZES = (16, 2, 1, 8, 8)
SMALL = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=16)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """Of each rank, by variant."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.nsa.integrations.titan", str(folder), str(rank)],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(titan.RANKS)
    ]
    try:
        outputs = [child.communicate(timeout=_PATIENCE_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(titan.RANKS)]


@pytest.mark.parametrize("variant", [*titan.VARIANTS, "packed"])
def test_two_ranks_have_the_losses_of_our_model(losses: list[dict[str, list[float]]], variant: str) -> None:
    """FSDP2 on two ranks, with recomputation and compiled blocks too, over 20 steps."""
    wanted = titan.alone(packed=variant == "packed")
    assert wanted[-1] < 0.9 * wanted[0]
    for rank in losses:
        assert len(rank[variant]) == titan.STEPS
        assert rank[variant] == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parallel_dims": {"cp_enabled": True}}, "context parallelism .* parallelism.context_parallel_degree"),
        ({"parallel_dims": {"tp_enabled": True}}, "tensor parallelism .* parallelism.tensor_parallel_degree"),
        ({"parallel_dims": {"pp_enabled": True}}, "pipeline parallelism .* parallelism.pipeline_parallel_degree"),
        ({"parallel_dims": {"ep_enabled": True}}, "expert parallelism .* parallelism.expert_parallel_degree"),
        ({"parallel_dims": {"dp_replicate_enabled": True}}, "data_parallel_replicate_degree"),
        ({"training": {"enable_cpu_offload": True}}, "training.enable_cpu_offload"),
        ({"parallelism": {"enable_fsdp_symm_mem": True}}, "parallelism.enable_fsdp_symm_mem"),
        ({"parallelism": {"spmd_backend": "spmd_types"}}, "spmd_backend must be 'partial_dtensor' .* 'spmd_types'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    model = titan.Decoder()
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(NotImplementedError, match=named):
        torchtitan.parallelize(model, **titan.options(**change))
    assert [name for name, _ in model.named_modules()] == before


def test_parallelize_hands_on_what_torchtitan_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torchtitan, "shard", lambda *given, **chosen: calls.append((given, chosen)))
    told = titan.options(
        parallel_dims={"get_mesh": lambda name: f"mesh {name}"},
        training={"mixed_precision_param": "bfloat16"},
        parallelism={"fsdp_reshard_after_forward": "never"},
        compile_config={"enable": True},
    )

    class Recompute:
        def build(self, *, dump_folder: str) -> Recompute:
            calls.append(dump_folder)
            return self

        def apply(self, model: object) -> None:
            calls.append(model)

    model = titan.Decoder()
    torchtitan.parallelize(model, **{**told, "ac_config": Recompute()}, dump_folder="dump")
    chosen = {
        "compile_backend": "eager",
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "reshard_after_forward": False,
    }
    assert calls == ["dump", model, ((model, "mesh fsdp"), chosen)]


def test_documents_of_all_rows_are_those_of_the_bounds() -> None:
    torch.manual_seed(1)
    attention = torchtitan.Attention(*SIZES, SMALL)
    rows = torch.randn(2, titan.TOKENS, 16)
    positions, masks = titan.documents(2)
    out = attention(rows, masks, positions)
    for row in range(2):
        for first, last in ((0, titan.BOUNDS[1]), titan.BOUNDS[1:]):
            alone = NativeSparseAttention.forward(attention, rows[row : row + 1, first:last])
            assert torch.allclose(out[row : row + 1, first:last], alone, atol=1e-6)
    assert torch.equal(attention(rows), NativeSparseAttention.forward(attention, rows))


def test_masks_that_nsa_cannot_follow_are_refused() -> None:
    attention, x = torchtitan.Attention(*SIZES, SMALL), torch.randn(1, 8, 16)
    with pytest.raises(TypeError, match=r"VarlenMetadata or None.* got BlockMask"):
        attention(x, type("BlockMask", (), {})())
    with pytest.raises(ValueError, match="attention_masks must come with positions"):
        attention(x, None, torch.arange(8)[None])


@pytest.mark.parametrize("phi", ["avg", "linear", "mlp"])
def test_weights_made_on_the_meta_device_can_be_initialised(phi: str) -> None:
    """By the `reset_parameters` of its modules, the convention of PyTorch: nothing is left as memory held it."""
    config = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=16, phi=phi)
    with torch.device("meta"):
        layer = torchtitan.Attention(*SIZES, config)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for module in reversed(list(layer.modules())):  # children first
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not any(parameter.isnan().any() for parameter in layer.parameters())
    if phi == "linear":
        mean = NativeSparseAttention(*SIZES, config).compress_k
        assert torch.equal(layer.compress_k.linear.weight, mean.linear.weight)


@pytest.mark.filterwarnings("default")  # those of torchtitan, and of Dynamo as it traces shards
def test_with_nsa_trains_a_model_of_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own ModelSpec, configuration, initialisation and loss; skipped where torchtitan is not installed."""
    pytest.importorskip("torchtitan", reason="needs torchtitan 0.3 (nox -s torchtitan)")
    from tests.nsa.integrations import real_torchtitan

    real_torchtitan.check(tmp_path, monkeypatch)
