"""A decoder in torchtitan's form, one rank of its training, and the same model as `nsa.model` trains it alone.

python -m tests.nsa.integrations.titan FOLDER RANK trains every variant in a process group of two ranks and writes the
losses; the ranks meet in a file of FOLDER, so no port is taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa.config import NSAConfig
from nsa.integrations import torchtitan
from nsa.loss import IGNORED, next_tokens, summed_cross_entropy
from nsa.model import DecoderLM, ModelConfig, SwiGLU
from nsa.train.distributed import exit_with_threads

RANKS, STEPS, ROWS, TOKENS = 2, 20, 4, 40
BOUNDS = (0, 25, 40)
"""The documents of each row, where rows are packed."""
CONFIG = ModelConfig(
    dim=32, n_layers=2, n_heads=4, num_kv_heads=2, d_k=8, d_v=8, vocab_size=64, tied_head=False,
    nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=16, phi="linear"),
)  # fmt: skip
VARIANTS = {"plain": {}, "recompute and compile": {"recompute": True, "compile_backend": "eager"}}


class VarlenMetadata(NamedTuple):
    """As in torchtitan 0.3.0."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class Block(nn.Module):
    """Calls its attention as torchtitan's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        sizes = CONFIG.dim, CONFIG.n_heads, CONFIG.num_kv_heads, CONFIG.d_k, CONFIG.d_v
        self.attention = torchtitan.Attention(*sizes, CONFIG.nsa)
        self.feed_forward = SwiGLU(CONFIG)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(CONFIG.dim), nn.RMSNorm(CONFIG.dim)

    def forward(self, x: Tensor, attention_masks: object, positions: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attention_masks, positions)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """tokens [B, S] -> logits [B, S, vocab_size]; the names are those of torchtitan's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(CONFIG.vocab_size, CONFIG.dim)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(CONFIG.n_layers)})
        self.norm = nn.RMSNorm(CONFIG.dim)
        self.lm_head = nn.Linear(CONFIG.dim, CONFIG.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: object = None) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, attention_masks, positions)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def ours() -> DecoderLM:
    """The model that both are, with the same weights in every process."""
    torch.manual_seed(0)
    return DecoderLM(CONFIG)


def weights(lm: DecoderLM) -> dict[str, Tensor]:
    """The weights under torchtitan's names."""
    names = {"embedding": "tok_embeddings", "blocks": "layers", "head": "lm_head", "mlp": "feed_forward"}
    names |= {"mlp_norm": "ffn_norm"}
    return {".".join(names.get(part, part) for part in name.split(".")): x for name, x in lm.state_dict().items()}


def batch(step: int) -> Tensor:
    """Tokens [ROWS, TOKENS] of a step: runs of a rule that can be learnt."""
    first = torch.randint(CONFIG.vocab_size, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return (first + 3 * torch.arange(TOKENS)) % CONFIG.vocab_size


def documents(rows: int) -> tuple[Tensor, VarlenMetadata]:
    """positions [rows, TOKENS] and the masks of `rows` rows of two documents, as torchtitan makes them."""
    a, b = BOUNDS[1], BOUNDS[2]
    positions = torch.cat([torch.arange(a), torch.arange(b - a)]).expand(rows, -1)
    bounds = torch.tensor([row * TOKENS + start for row in range(rows) for start in BOUNDS[:-1]] + [rows * TOKENS])
    return positions, VarlenMetadata(bounds.int(), bounds.int(), a, a)


def train(logits_of: Callable[[Tensor], Tensor], model: nn.Module, rows: slice, packed: bool) -> list[float]:
    """The losses of STEPS steps, each the mean over the targets of all ranks, before the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)  # Adam would not see a gradient's scale
    losses = []
    for step in range(STEPS):
        tokens = batch(step)
        targets = next_tokens(tokens)
        if packed:
            targets[:, BOUNDS[1] - 1] = IGNORED
        count = (targets != IGNORED).sum()
        loss = summed_cross_entropy(logits_of(tokens[rows]), targets[rows]) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def alone(packed: bool) -> list[float]:
    """`nsa.model` in one process, on all rows."""
    lm = ours()
    if not packed:
        return train(lm, lm, slice(None), packed)
    bounds = documents(ROWS)[1].cu_seq_q
    return train(lambda x: lm(x.flatten()[None], cu_seqlens=bounds).view(*x.shape, -1), lm, slice(None), packed)


def options(**changes: Any) -> dict[str, Any]:
    """The arguments of `parallelize`, with the fields that torchtitan 0.3.0 gives them."""
    off = {f"{name}_enabled": False for name in ("cp", "tp", "pp", "ep", "dp_replicate")}
    given = {
        "parallel_dims": off,
        "training": {
            "enable_cpu_offload": False,
            "mixed_precision_param": "float32",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": {
            "spmd_backend": "partial_dtensor",
            "fsdp_reshard_after_forward": "default",
            "enable_fsdp_symm_mem": False,
        },
        "compile_config": {"enable": False, "components": ["model", "loss"], "backend": "eager"},
    }
    for name, change in changes.items():
        given[name] = given[name] | change
    return {**{name: SimpleNamespace(**fields) for name, fields in given.items()}, "ac_config": None}


def main(folder: Path, rank: int) -> None:
    """All variants as rank `rank` of RANKS."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    each = ROWS // RANKS
    rows = slice(rank * each, (rank + 1) * each)
    found = {}
    for name, chosen in VARIANTS.items():
        model = Decoder()
        model.load_state_dict(weights(ours()))
        found[name] = train(torchtitan.shard(model, mesh, **chosen), model, rows, packed=False)
    model = Decoder()
    model.load_state_dict(weights(ours()))
    torchtitan.parallelize(model, **options(parallel_dims={"get_mesh": lambda name: {"fsdp": mesh}[name]}))
    positions, masks = documents(each)
    found["packed"] = train(lambda x: model(x, positions, masks), model, rows, packed=True)
    (folder / f"losses-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    exit_with_threads(0)
