"""What `with_nsa` makes of a ModelSpec, with torchtitan itself: `nox -s torchtitan` installs it for this."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import silu

from nsa.config import NSAConfig
from nsa.integrations import torchtitan as ours
from nsa.layer import NativeSparseAttention

STEPS, ROWS, TOKENS = 10, 2, 40
CONFIG = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=16, phi="linear")


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build, shard, initialise and train torchtitan's Llama 3 in a group of one rank.

    The first loss is that of the same weights in plain PyTorch, around `nsa.NativeSparseAttention`.
    """
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.llama3 import model_registry

    monkeypatch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")  # it is for GPUs alone
    dense = model_registry("debugmodel", attn_backend="varlen")
    dense = dataclasses.replace(dense, model=dataclasses.replace(dense.model, layers=dense.model.layers[:1]))
    spec = ours.with_nsa(dense, CONFIG)
    assert type(dense.model.layers[0].attention).__qualname__ == "GQAttention.Config"
    assert spec.state_dict_adapter is None
    with pytest.raises(ValueError, match="attn_backend must be 'varlen'"):
        ours.with_nsa(model_registry("debugmodel", attn_backend="flex"), CONFIG)
    with pytest.raises(TypeError, match=r"attention must be GQAttention\.Config; got .*TitanAttention\.Config"):
        ours.with_nsa(spec, CONFIG)

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    spec.model.update_from_config(config=_Parallel(parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1)
    try:
        dims = ParallelDims(
            dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1, spmd_backend="partial_dtensor"
        )
        dims.build_mesh()
        spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=True, components=["model"], backend="eager"),
            ac_config=FullAC.Config(),
            dump_folder=str(folder),
        )
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        assert not [name for name, x in model.named_parameters() if x.full_tensor().isnan().any()]
        tokens = torch.randint(0, 64, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        positions = torch.cat([torch.arange(25), torch.arange(TOKENS - 25)]).expand(ROWS, -1)
        masks = model.get_attention_masks(positions)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wanted = _loss(model, tokens, masks.cu_seq_q)
        losses = []
        for _ in range(STEPS):
            logits = model(tokens[:, :-1], positions=positions, attention_masks=masks)
            loss = cross_entropy_loss(logits, tokens[:, 1:]) / (ROWS * TOKENS)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(wanted, rel=1e-5)
        assert losses[-1] < 0.7 * losses[0]
    finally:
        dist.destroy_process_group()


class _Parallel:
    """Configuration as a caller without torchtitan's trainer gives it."""

    def __init__(self, parallelism: object) -> None:
        self.parallelism = parallelism


def _loss(model: torch.nn.Module, tokens: torch.Tensor, bounds: torch.Tensor) -> float:
    """The mean loss of `model`'s weights, all rows laid end to end."""
    state = {name.replace("_checkpoint_wrapped_module.", ""): x.full_tensor() for name, x in model.state_dict().items()}

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = state[f"{name}.weight"]
        return torch.nn.functional.rms_norm(x, (256,), weight, model.norm.eps)

    x = torch.nn.functional.embedding(tokens[:, :-1].flatten()[None], state["tok_embeddings.weight"])
    for i in range(1):
        prefix = f"layers.{i}."
        own = {
            k.removeprefix(f"{prefix}attention."): v for k, v in state.items() if k.startswith(f"{prefix}attention.")
        }
        attention = NativeSparseAttention(256, 16, 16, 16, 16, CONFIG, rope_base=500000.0)
        attention.load_state_dict(own)
        x = x + attention(norm(f"{prefix}attention_norm", x), cu_seqlens=bounds)
        y = norm(f"{prefix}ffn_norm", x)
        w1, w2, w3 = (state[f"{prefix}feed_forward.w{n}.weight"] for n in (1, 2, 3))
        x = x + (silu(y @ w1.T) * (y @ w3.T)) @ w2.T
    logits = norm("norm", x) @ state["lm_head.weight"].T
    return float(torch.nn.functional.cross_entropy(logits[0], tokens[:, 1:].flatten()).detach())
