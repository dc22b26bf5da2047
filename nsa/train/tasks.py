"""Two tasks whose answer stands far back in a text: the needle, and variable tracking (as in RULER, arXiv 2404.06654).

A text is filler with statements at random places: `x = value`, and, with hops, `y = x`, `z = y`; one token each. Behind
it the values of variables are asked for. The needle has no hops: one statement tells the answer. With two hops three
statements lead to it, one after the other, so that a model must find each by what the one before says.

Every statement stands further back than the window reaches, and their number is above that of the blocks that a query
may choose: which block to read must be decided by what is asked. Texts are made of random numbers alone, so that what
is learnt is the task and no text of it is seen twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.loss import IGNORED
from nsa.model import DecoderLM, ModelConfig
from nsa.train.data.packing import Batch
from nsa.train.distributed import Ranks
from nsa.train.settings import Data, Runtime, Settings, Train
from nsa.train.trainer import Trainer

QUESTIONS = 16
"""Behind each text."""
VALUES = 8
CHANCE = 1 / VALUES
ASKED_TOKENS = 2**17
"""In one call, when a model is asked."""
_FILLER = 32
"""Tokens that say nothing."""


@dataclass(frozen=True)
class Task:
    """What is asked. Raises ValueError for sizes that are no task."""

    name: str
    hops: int
    """Statements between the one that is asked for and the one with the value; 0 is the needle."""
    chains: int
    """Values that are told, each reached over its own `hops` + 1 statements."""

    def __post_init__(self) -> None:
        if self.hops < 0 or self.chains < 1:
            raise ValueError(f"a task must have hops >= 0 and chains >= 1; got {self.hops} and {self.chains}")

    @property
    def variables(self) -> int:
        """Each is stated once."""
        return self.chains * (self.hops + 1)

    @property
    def sources(self) -> int:
        """What may stand right of a statement's `=`: a variable or a value."""
        return self.variables + VALUES

    @property
    def first_question(self) -> int:
        """Below it are statements, target · sources + source; from it on the token that asks for each variable."""
        return self.variables * self.sources

    @property
    def first_filler(self) -> int:
        return self.first_question + self.variables

    @property
    def vocab_size(self) -> int:
        return self.first_filler + _FILLER

    def least_length(self, gap: int) -> int:
        """Tokens of a text whose statements stand `gap` or more before its questions."""
        return QUESTIONS + gap + self.variables


NEEDLE = Task("needle", hops=0, chains=32)
TRACKING = Task("tracking", hops=2, chains=8)
TASKS = {task.name: task for task in (NEEDLE, TRACKING)}


def draw(
    task: Task, batch_size: int, length: int, generator: torch.Generator, *, gap: int, ends_only: bool = False
) -> Batch:
    """Random texts: tokens int64 [B, length]; statements stand `gap` or more before the questions.

    Targets are the values that are asked for and, at each statement, the value that its variable has by it: fewer hops.
    `ends_only` asks for the last variable of a chain alone, over all of its hops; else for any.
    Raises ValueError where the statements do not fit.
    """
    if length < (least := task.least_length(gap)):
        raise ValueError(f"length must be at least {least} for {task.variables} statements; got {length}")
    room = length - QUESTIONS - gap
    chains = torch.rand(batch_size, task.variables, generator=generator).argsort(1).unflatten(1, (task.chains, -1))
    value = torch.randint(VALUES, (batch_size, task.chains, 1), generator=generator)
    statement = chains * task.sources + torch.cat([task.variables + value, chains[..., :-1]], 2)
    places = torch.rand(batch_size, room, generator=generator).topk(task.variables).indices  # a sort takes tenfold
    places = places.unflatten(1, (task.chains, -1)).sort(2).values  # a statement's source is stated before it
    text = task.first_filler + torch.randint(_FILLER, (batch_size, length - QUESTIONS), generator=generator)
    text.scatter_(1, places.flatten(1), statement.flatten(1))
    chain = torch.randint(task.chains, (batch_size, QUESTIONS), generator=generator)
    which = torch.randint(task.hops + 1, (batch_size, QUESTIONS), generator=generator)
    if ends_only:
        which = torch.full_like(which, task.hops)
    asked = chains.flatten(1).gather(1, chain * (task.hops + 1) + which)
    answers = value[..., 0].gather(1, chain)
    known = torch.full_like(text, IGNORED).scatter_(1, places.flatten(1), value.expand_as(places).flatten(1))
    tokens, targets = torch.cat([text, task.first_question + asked], 1), torch.cat([known, answers], 1)
    return Batch(tokens, targets, answers.numel() + places.numel())


def model(task: Task, nsa: NSAConfig | None = None, *, dim: int = 256, head_dim: int = 64) -> ModelConfig:
    """A small model with a layer for each statement on the way, and one more."""
    return ModelConfig(
        dim=dim,
        n_layers=task.hops + 2,
        n_heads=8,
        num_kv_heads=2,
        d_k=head_dim,
        d_v=head_dim,
        nsa=nsa or NSAConfig(),
        vocab_size=task.vocab_size,
        tied_head=False,
        rope_base=1e6,
    )


@dataclass(frozen=True)
class Plan:
    """How a model is trained on a task: over growing lengths, so that it finds the task before it must choose."""

    lengths: tuple[int, ...]
    """At which it is asked, ascending."""
    steps: int
    """Over all lengths."""
    tokens_per_step: int
    seed: int = 0
    lr: float = 1e-3

    def stages(self, first: int) -> list[tuple[int, int]]:
        """(length, steps) from `first` on, doubled up to each length that is asked at.

        Half of the steps are taken at the first one, where the task is learnt; the others share the rest evenly.
        Raises ValueError where they are too few.
        """
        lengths: list[int] = []
        for asked in self.lengths:
            length = 2 * lengths[-1] if lengths else min(first, asked)
            while length < asked:
                lengths.append(length)
                length *= 2
            lengths.append(asked)
        if len(lengths) == 1:
            return [(lengths[0], self.steps)]
        if self.steps < (least := 2 * (len(lengths) - 1)):
            raise ValueError(f"steps must be at least {least} for the lengths {lengths}; got {self.steps}")
        each = self.steps // 2 // (len(lengths) - 1)
        begin = self.steps - each * (len(lengths) - 1)
        return [(length, each if number else begin) for number, length in enumerate(lengths)]


@dataclass(frozen=True)
class Answers:
    """What a model answered at one length."""

    length: int
    steps: int
    """Trained up to then."""
    tokens: int
    """Trained on up to then."""
    asked: int
    """Texts, of each the first question."""
    right: int
    loss: float
    """Mean of the last steps before, nats per answer."""


def train_and_ask(
    task: Task, config: ModelConfig, plan: Plan, device: torch.device, *, texts: int, say: Callable[[str], None]
) -> list[Answers]:
    """Train one model by the plan, ask it at each of its lengths; the same texts for every model with this plan."""
    trainer = trainer_of(task, config, plan, device)
    generator = torch.Generator().manual_seed(plan.seed)
    found, tokens = [], 0
    every_block_is_chosen = config.nsa.n_sel * config.nsa.l_sel
    for length, steps in plan.stages(max(every_block_is_chosen, task.least_length(config.nsa.w) + task.variables)):
        recent: list[Tensor] = []
        for _ in range(steps):
            batch = draw(task, max(1, plan.tokens_per_step // length), length, generator, gap=config.nsa.w)
            tokens += batch.tokens.numel()
            recent = [*recent[-49:], trainer.step([batch.to(device)]).loss]
        loss = float(torch.stack(recent).mean())
        say(f"{task.name}, {config.attention}: {length} tokens, step {trainer.done}/{plan.steps}, loss {loss:.4f}")
        if length in plan.lengths:
            right = correct(trainer, task, length, texts, seed=plan.seed + 1)
            found.append(Answers(length, trainer.done, tokens, texts, right, loss))
            say(f"{task.name}, {config.attention}: {length} tokens, {right} of {texts} right")
    return found


def trainer_of(task: Task, config: ModelConfig, plan: Plan, device: torch.device) -> Trainer:
    """The model before its first step; in bf16 on a GPU."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    train = Train(
        steps=plan.steps, seq_len=max(plan.lengths), batch_size=1, lr=plan.lr, warmup_steps=min(100, plan.steps // 10),
        weight_decay=0.0, seed=plan.seed,
    )  # fmt: skip
    runtime = Runtime(device=device.type, precision=precision)
    trainer = Trainer(Settings(task.name, config, runtime, train, Data(packing=False)), device, Ranks())
    _begin_with_parts(trainer.lm, task)
    return trainer


@torch.no_grad()
def correct(trainer: Trainer, task: Task, length: int, texts: int, *, seed: int) -> int:
    """Of so many fresh texts: in how many the first question is answered with the right value, over all hops."""
    config, generator = trainer.settings.model, torch.Generator().manual_seed(seed)
    trainer.lm.eval()
    right = 0
    each = max(1, ASKED_TOKENS // length)
    for first in range(0, texts, each):
        size = min(each, texts - first)
        batch = draw(task, size, length, generator, gap=config.nsa.w, ends_only=True).to(trainer.device)
        with trainer.computing():
            hidden = trainer.lm.hidden(batch.tokens)[:, -QUESTIONS]
            said = trainer.lm.head(hidden)[:, :VALUES].argmax(-1)
        right += int((said == batch.targets[:, -QUESTIONS]).sum())
    trainer.lm.train()
    return right


def _begin_with_parts(lm: DecoderLM, task: Task) -> None:
    """A statement's embedding begins as the sum of its target's and its source's, so that these need not be found out.

    The question for a variable begins as that variable; as a source it has another embedding than as a target.
    """
    generator = torch.Generator().manual_seed(0)
    targets = 0.3 * torch.randn(task.variables, lm.config.dim, generator=generator)
    sources = 0.3 * torch.randn(task.sources, lm.config.dim, generator=generator)
    with torch.no_grad():
        lm.embedding.weight[: task.first_question] = (targets[:, None] + sources).flatten(0, 1)
        lm.embedding.weight[task.first_question : task.first_filler] = targets
