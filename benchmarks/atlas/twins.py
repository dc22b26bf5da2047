"""NSA and its dense twin on one task: the same texts, steps and seed, then the same questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from benchmarks.atlas.task_record import SCHEMA, TaskRecord, TaskResult, TaskScore
from harness.fingerprint import Fingerprint
from nsa.model import DecoderLM, ModelConfig
from nsa.train import tasks
from nsa.train.tasks import Plan, Task


def compare(
    task: Task, config: ModelConfig, plan: Plan, fingerprint: Fingerprint, device: torch.device, *,
    texts: int, say: Callable[[str], None] = print,
) -> TaskRecord:  # fmt: skip
    """Train both, ask both; one result for each length of the plan. Raises ValueError where a length is too short."""
    for length in plan.lengths:
        if length < (least := task.least_length(config.nsa.w)):
            raise ValueError(f"--lengths: {task.name} needs {least} tokens or more; got {length}")
    nsa, dense = (
        tasks.train_and_ask(task, one, plan, device, texts=texts, say=say) for one in (config, config.dense_twin())
    )
    results = tuple(
        TaskResult(
            task.name, task.hops, task.chains, ours.length, ours.steps, ours.tokens, plan.seed,
            TaskScore(ours.right, ours.asked, ours.loss), TaskScore(theirs.right, theirs.asked, theirs.loss),
        )
        for ours, theirs in zip(nsa, dense, strict=True)
    )  # fmt: skip
    sizes = {"parameters": _parameters(config), "parameters_dense": _parameters(config.dense_twin())}
    model = {**dataclasses.asdict(config), **sizes}
    return TaskRecord(SCHEMA, fingerprint, fingerprint.commit, model, tasks.CHANCE, results)


def _parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return DecoderLM(config).num_parameters()
