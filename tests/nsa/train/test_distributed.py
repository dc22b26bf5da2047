"""Two ranks over Gloo: the losses of one, DDP's checkpoint in FSDP2, and a dead rank ends the run clearly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa.io import read_json_lines
from nsa.model import SHOWCASE, DecoderLM
from nsa.train import checkpoint, distributed
from nsa.train.distributed import LostRankError, Ranks
from nsa.train.objective import Objective
from nsa.train.run_folder import Table
from tests.nsa.train import runs
from tests.nsa.train.runs import settings, train

_PATIENCE_S = 120.0
LONG = ("--steps", "4000", "--set", "train.save_every=400", "--allow-toy")


def _run(folder: Path, *arguments: str) -> str:
    child = runs.start(folder, *arguments, ranks=2)
    output, _ = child.communicate(timeout=_PATIENCE_S)
    assert child.returncode == 0, output
    return output


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """Under DDP, and from its checkpoint under FSDP2 to the end; the optimiser's state must come along."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    alone.mkdir()
    both.mkdir()
    steady = {"train__lr_schedule": "constant", "train__accumulate_grad_batches": 2}
    train(settings(alone, **steady, train__val_every=8))
    same = ("--set", "train.lr_schedule=constant", "--set", "train.accumulate_grad_batches=2")
    _run(both, *same, "--steps", "4", "--parallel", "ddp")
    output = _run(both, *same, "--resume", "--parallel", "fsdp2", "--set", "train.val_every=8")
    assert "resumed after step 4" in output
    one, two = runs.losses(alone / "run"), runs.losses(both / "run")
    assert sorted(two) == list(range(1, 9))
    assert [two[step] for step in sorted(two)] == pytest.approx([one[step] for step in sorted(one)], rel=2e-5)
    states = [checkpoint.newest_intact(folder / "run" / "checkpoints") for folder in (alone, both)]
    assert states[0] is not None
    assert states[1] is not None
    for name, weight in states[0].state["model"].items():
        assert torch.allclose(weight, states[1].state["model"][name], rtol=1e-3, atol=1e-5), name
    assert states[0].state["tokens_seen"] == states[1].state["tokens_seen"] == 8 * 2 * 92
    periodic = checkpoint.load(both / "run" / "checkpoints" / "step-00000006.ckpt")
    assert periodic["tokens_seen"] == 6 * 2 * 92  # figures arrive a step later, but a checkpoint has them all
    validations = [float(row["loss"]) for folder in (alone, both) for row in Table.rows(folder / "run" / "val.csv")]
    assert validations[1] == pytest.approx(validations[0], rel=2e-5)
    other_rank = list(read_json_lines(both / "run" / "heartbeat_rank1.jsonl"))
    assert {record["step"] for record in other_rank if "loss" in record} == set(range(1, 9))
    logged = [record for record in runs.records(both / "run") if "rank_imbalance" in record]
    assert logged
    assert all(len(record["rank_work_ms"]) == 2 and 0 <= record["rank_imbalance"] < 1 for record in logged)


def test_small_blocks_are_gathered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, each group as small as it may be; the host pays for each."""
    monkeypatch.setattr(distributed, "ENOUGH_PARAMETERS", 100)
    small, almost, large = (torch.nn.Linear(*size, bias=False) for size in ((4, 10), (9, 11), (10, 10)))
    groups = distributed.group_blocks([small, small, small, large, almost, small, small])
    assert groups == [[small, small, small], [large], [almost, small], [small]]
    assert distributed.group_blocks([]) == []


def test_fsdp2_shards_each_group_and_then_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    shards: list[object] = []

    def record(module: object, mesh: object) -> object:
        assert mesh == ("cpu", (2,))
        shards.append(module)
        return module

    monkeypatch.setattr(distributed, "init_device_mesh", lambda device, sizes: (device, sizes))
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", record)
    model = DecoderLM(replace(SHOWCASE, n_layers=5))
    a_block = sum(x.numel() for x in model.blocks[0].parameters())
    monkeypatch.setattr(distributed, "ENOUGH_PARAMETERS", 2 * a_block)
    objective = Objective(model)
    assert distributed.wrap(objective, Ranks(0, 2, 0), "fsdp2", torch.device("cpu")) is objective
    blocks = list(model.blocks)
    assert shards == [blocks[:2], blocks[2:4], blocks[4:], objective]


def _child_of(pid: int, rank: int) -> int:
    """The process of a rank under torchrun."""
    for path in Path(f"/proc/{pid}/task/{pid}").glob("children"):
        for child in map(int, path.read_text().split()):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return child
    raise AssertionError


def test_a_dead_rank_ends_the_run_with_a_clear_error(tmp_path: Path) -> None:
    launcher = runs.start(tmp_path, *LONG, ranks=2)
    end = time.monotonic() + _PATIENCE_S
    while max(runs.losses(tmp_path / "run"), default=0) < 3:
        assert time.monotonic() < end
        assert launcher.poll() is None
        time.sleep(0.02)
    os.kill(_child_of(launcher.pid, 1), signal.SIGKILL)
    begin = time.monotonic()
    output, _ = launcher.communicate(timeout=_PATIENCE_S)
    assert time.monotonic() - begin < 30
    assert launcher.returncode != 0
    stopped = [record["why"] for record in runs.records(tmp_path / "run") if record.get("event") == "stopped"]
    assert stopped, output
    assert "rank 0 of 2 lost another rank in step" in stopped[0]


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("0", "0")])
def test_collectives_need_not_wait_for_kernels(monkeypatch: pytest.MonkeyPatch, given: str | None, wanted: str) -> None:
    """NCCL's streams have priority from the first group on, unless the user says otherwise."""
    name, found = "TORCH_NCCL_HIGH_PRIORITY", list[str | None]()
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: found.append(os.environ.get(name)))
    for function in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, function, lambda: None)
    with distributed.process_group({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, on_gpu=True):
        pass
    monkeypatch.delenv(name)
    assert found == [wanted]


def test_only_what_says_so_is_a_lost_rank() -> None:
    with (
        pytest.raises(LostRankError, match="rank 1 of 2 lost another rank in step 7"),
        distributed.detect_lost_ranks(Ranks(1, 2), 7),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(RuntimeError, match="out of memory"), distributed.detect_lost_ranks(Ranks(1, 2), 7):
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="Connection closed"), distributed.detect_lost_ranks(Ranks(), 7):
        raise RuntimeError("Connection closed by peer")


def test_what_each_rank_alone_knows_comes_back() -> None:
    parts = distributed.gather_states({"a": torch.arange(3), "b": [1, None]}, Ranks(), torch.device("cpu"))
    found = distributed.own_state(parts, Ranks())
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"] == [1, None]
    places = [distributed.gather_states({"place": rank}, Ranks(), torch.device("cpu"))[0] for rank in range(2)]
    assert [distributed.own_state(places, Ranks(rank, 2))["place"] for rank in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="data positions of 1 ranks, and this run reads data in 2"):
        distributed.own_state(parts, Ranks(0, 2))


_THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(("ranks", "more"), [(1, ""), (2, ""), (1, _THREAD)], ids=["alone", "rank", "thread"])
def test_the_interpreter_is_not_taken_down_under_threads(tmp_path: Path, ranks: int, more: str) -> None:
    """One that asks for the GIL then would abort the process after a good run; exit code and output are kept."""
    taken_down = tmp_path / "taken_down"
    watched = f"import atexit; atexit.register(open, {str(taken_down)!r}, 'w')"
    (tmp_path / "sitecustomize.py").write_text(f"{watched}\n{more}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "nsa.train", "preflight", "no-such-profile"]
    ended = subprocess.run(command, env=environment, cwd=runs.ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no-such-profile" in ended.stderr
    assert taken_down.exists() == (ranks == 1 and not more)


def test_ranks_share_a_batch_evenly(tmp_path: Path) -> None:
    from nsa.train.data.loader import Shard

    assert [list(Shard(rank, 2).rows(4)) for rank in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"train\.batch_size must be a multiple of the 2 ranks; got 3"):
        Shard(0, 2).rows(3)
