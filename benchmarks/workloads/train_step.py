"""One step of `nsa.train`'s trainer on the decoder LM, with NSA and with dense attention.

Timed is what a run repeats: forward, loss in pieces, backward, clipping, AdamW. Weights in float32, compute in the
key's dtype under autocast; launched as a graph the trainer replays its own, of forward, loss and backward. The check
compares logits and gradients of the same weights on a short text with the float64 model, whose attention is
nsa.reference; the text is short enough for every block to be selected, since a near-tie that falls the other way
changes a gradient by more than rounding does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from benchmarks.baselines import sdpa
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import Correctness
from benchmarks.cases.work import Call, Recheck, Work
from benchmarks.correctness import anti_cheat, row_sampling, tolerance
from benchmarks.correctness.verify import IncorrectError, require_finite, require_passed
from benchmarks.workloads import roofline
from nsa import NSAConfig, backends, loss
from nsa.model import BASE_125M, SHOWCASE, DecoderLM, ModelConfig, next_token_loss
from nsa.train.distributed import Ranks
from nsa.train.settings import Data, Runtime, Settings, Train
from nsa.train.trainer import Batch, Trainer

TINY = ModelConfig(
    dim=32, n_layers=1, n_heads=2, num_kv_heads=1, d_k=16, d_v=16, nsa=NSAConfig(l=16, d=8, l_sel=32, n_sel=4, w=32)
)
"""What the host takes, and next to nothing else."""
MODELS = {"tiny": TINY, "showcase": SHOWCASE, "125m": BASE_125M}
CHECKED_TOKENS = 64
_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def prepare(key: Key, device: str) -> Work:
    """The work of a key whose mode is train-step; a baseline's name is the kernel of the dense twin."""
    trainer = Trainer(_settings(key, device), torch.device(device), Ranks())
    tokens = torch.randint(trainer.lm.config.vocab_size, (key.batch, key.num_queries), device=device)
    targets = loss.next_tokens(tokens)
    batch = Batch(tokens, targets, key.batch * (key.num_queries - 1))

    def call() -> tuple[Tensor, ...]:
        with kernel(key.implementation):
            return (trainer.step([batch]).loss,)

    timed = tokens.clone()

    def redraw(seed: int) -> None:
        draw(batch, timed, trainer.lm.config.vocab_size, seed)

    return Work(
        check_model(key, trainer.lm, tokens[:1, :CHECKED_TOKENS], device),
        call,
        key.batch * key.num_queries,
        roofline.of_train_step(key, trainer.lm),
        refusals=lambda: refusals(key.implementation),
        inputs={"tokens": tokens, "targets": targets},
        recheck=recheck_step(key, trainer.lm, batch, redraw),
        redraw=redraw,
        replays=key.replays,
    )


def _settings(key: Key, device: str) -> Settings:
    """Rows of one text each, a learning rate that stays, and nothing recomputed."""
    rows = Train(steps=1, seq_len=key.num_queries, batch_size=key.batch, lr=1e-4, lr_schedule="constant")
    runtime = Runtime(device=device, precision=_PRECISION[key.dtype], cuda_graph=key.launch == "graph")
    return Settings("bench", model_config(key), runtime, rows, Data(packing=False))


def model_config(key: Key) -> ModelConfig:
    """The model of a key, or its dense twin."""
    assert key.model is not None
    config = MODELS[key.model]
    if key.implementation != NSA:
        return config.dense_twin()
    assert key.config is not None
    assert key.backend_asked is not None
    return dataclasses.replace(config, nsa=NSAConfig.from_mapping(key.config), backend=key.backend_asked)


def check_model(key: Key, model: DecoderLM, tokens: Tensor, device: str) -> Callable[[int], Correctness]:
    """Compares logits and gradients on a short text with the float64 model; raises unless they agree."""

    def check(_: int) -> Correctness:
        oracle = DecoderLM(dataclasses.replace(model.config, backend="reference")).to(device)
        oracle.load_state_dict(model.state_dict())
        with precision(key.dtype, device):
            with kernel(key.implementation), sdpa.refusals_named(key.implementation):
                found = _logits_and_gradients(model, tokens)
            with kernel("sdpa-math"):
                eager = _logits_and_gradients(oracle, tokens)
        with kernel("sdpa-math"):
            truth = _logits_and_gradients(oracle.double(), tokens)
        for name, x in found.items():
            require_finite(name, x)
        checks = tolerance.tensors(found, truth, eager)
        return require_passed(Correctness(tokens.shape[1], tuple(checks), _path(key, model, tokens)))

    return check


def draw(batch: Batch, timed: Tensor, vocab_size: int, seed: int) -> None:
    """Overwrite the batch with the tokens of a seed."""
    if seed == row_sampling.TIMED_SEED:
        batch.tokens.copy_(timed)
    else:
        batch.tokens.random_(vocab_size, generator=torch.Generator(timed.device).manual_seed(seed))
    batch.targets.copy_(loss.next_tokens(batch.tokens))


def recheck_step(key: Key, model: DecoderLM, batch: Batch, redraw: Callable[[int], None]) -> Recheck:
    """The loss that the timed step returns for tokens it has never seen, beside that of the same weights evaluated
    apart; and the step must have moved these weights. The loss is of all tokens, whatever share of rows is asked."""

    tokens = batch.tokens

    def recheck(call: Call, seed: int, rows_share: float = 1.0) -> Correctness:
        anti_cheat.poison(call())
        redraw(seed)
        with torch.no_grad(), precision(key.dtype, tokens.device.type), kernel(key.implementation):
            expected = next_token_loss(model(tokens), tokens)
        before = anti_cheat.digests(dict(model.named_parameters()))
        (found,) = anti_cheat.as_read_by_this_stream(call())
        require_finite("loss", found)
        if anti_cheat.digests(dict(model.named_parameters())) == before:
            raise IncorrectError("the step left every weight as it was")
        error = ((found - expected).abs() / expected.abs()).item()
        # one kernel on the same weights and tokens twice: what is rounded in the compute type may fall the other way
        budget = tolerance.FORWARD_FACTOR * torch.finfo(getattr(torch, key.dtype)).eps
        return require_passed(
            Correctness(tokens.numel(), (tolerance.check("loss", error, budget),), _path(key, model, tokens), seed)
        )

    return recheck


def _logits_and_gradients(model: DecoderLM, tokens: Tensor) -> dict[str, Tensor]:
    logits = model(tokens)
    gradients = torch.autograd.grad(next_token_loss(logits, tokens), list(model.parameters()))
    return {"logits": logits.detach(), "dparameters": torch.cat([gradient.flatten() for gradient in gradients])}


def precision(dtype: str, device: str) -> AbstractContextManager[object]:
    """Autocast to the key's dtype."""
    return nullcontext() if dtype == "float32" else torch.autocast(device, dtype=getattr(torch, dtype))


def kernel(implementation: str) -> AbstractContextManager[object]:
    """The one kernel that the dense twin may use; NSA uses none of them."""
    return nullcontext() if implementation == NSA else sdpa_kernel(sdpa.BACKENDS[implementation])


def refusals(implementation: str) -> AbstractContextManager[None]:
    """Names what the dense twin's kernel refuses."""
    return nullcontext() if implementation == NSA else sdpa.refusals_named(implementation)


def _path(key: Key, model: DecoderLM, tokens: Tensor) -> str:
    """The kernel that was forced, or the backend that a call with these sizes chooses."""
    if key.implementation != NSA:
        return key.implementation
    dtype = getattr(torch, key.dtype)
    q, v = (
        torch.empty(1, 1, key.heads, size, dtype=dtype, device=tokens.device)
        for size in (key.head_dim_k, key.head_dim_v)
    )
    return backends.choose(model.config.backend, q, v)[0]
