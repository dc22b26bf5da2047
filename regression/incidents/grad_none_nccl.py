"""grad-none-nccl: grad-none-ddp where it was reported, on two GPUs.

What really happened: the same. NCCL has its own streams and its own way to wait, which Gloo on a CPU says nothing of.
"""

from __future__ import annotations

from regression.contract import Evidence, Incident, Needs, ReproVerdict, Step
from regression.incidents import grad_none_ddp
from regression.incidents.grad_none_ddp import inject as inject

INCIDENT = Incident(
    id="grad-none-nccl",
    symptom="DDP hangs; 37 tokens/s on two GPUs",
    cause="parameters without gradients under find_unused_parameters=False",
    detector="two GPUs' gradients over NCCL equal one GPU's",
    expects=ReproVerdict.CRASHED,
    says=grad_none_ddp.INCIDENT.says,
    needs=Needs.TWO_GPUS,
)


def product(step: Step) -> Evidence:
    """One GPU against two."""
    return grad_none_ddp.compare_ranks(step, "cuda")


def faulty(step: Step) -> Evidence:
    """The same GPUs with compressed keys that are a constant."""
    with inject():
        return product(step)
