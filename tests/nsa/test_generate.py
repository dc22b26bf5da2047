"""generate: what a prefill of the whole text would have said next, row by row, however the rows stand."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import PagedCache
from nsa.generate import Step, generate, with_progress
from nsa.model import DecoderLM, ModelConfig
from nsa.sampling import Sampling
from tests.nsa.layers import small_config

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [7, 7, 1], [3]]
NEW = 30
ROOT = Path(__file__).parents[2]


def make(seed: int = 0, **changes: Any) -> DecoderLM:
    torch.manual_seed(seed)
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "num_kv_heads": 2, "d_k": 6, "d_v": 5, "vocab_size": 17}
    return DecoderLM(ModelConfig(**{**sizes, "nsa": small_config("mlp"), "tied_head": False, **changes})).double()


def columns(steps: list[Step]) -> list[list[int]]:
    """The tokens of each row."""
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("chunk", [1, 4, 4096])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_the_likeliest_token_is_that_of_a_prefill(chunk: int, shared_kv: bool) -> None:
    model = make(shared_kv=shared_kv)
    steps = list(generate(model, PROMPTS, max_new_tokens=NEW, sampling=Sampling(0), prefill_chunk=chunk))
    assert len(steps) == NEW
    for prompt, new in zip(PROMPTS, columns(steps), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == new


@pytest.mark.parametrize("chunk", [4, 6, 4096])
def test_prompts_that_begin_alike_go_on_each_by_itself(chunk: int) -> None:
    """Equal in their first chunk, or in all but their last token, or one the beginning of the other; two are equal."""
    begin = [5, 9, 2, 14, 3, 11]
    prompts = [[*begin, 1, 2], [*begin, 1, 7], begin, [*begin, 16, 4, 4], [*begin, 1, 2], begin[:4]]
    model = make()
    new = columns(list(generate(model, prompts, max_new_tokens=12, sampling=Sampling(0), prefill_chunk=chunk)))
    for prompt, row in zip(prompts, new, strict=True):
        assert row == columns(list(generate(model, [prompt], max_new_tokens=12, sampling=Sampling(0))))[0]
    assert new[0] == new[4]
    assert len({tuple(row) for row in new}) > 3  # else nothing was shown


def test_a_row_draws_alike_alone_and_beside_others() -> None:
    model = make()
    together = columns(list(generate(model, PROMPTS, max_new_tokens=NEW, sampling=Sampling(seed=5))))
    for row, prompt in enumerate(PROMPTS):
        (alone,) = columns(list(generate(model, [prompt], max_new_tokens=NEW, sampling=Sampling(seed=5 + row))))
        assert alone == together[row]
    assert together[1] != together[3]  # the same prompt, another seed
    again = columns(list(generate(model, PROMPTS, max_new_tokens=NEW, sampling=Sampling(seed=6))))
    assert again != together


def test_a_row_ends_with_eos_and_the_others_go_on() -> None:
    model, eos = make(), 4
    whole = columns(list(generate(model, PROMPTS, max_new_tokens=NEW)))
    steps = list(generate(model, PROMPTS, max_new_tokens=NEW, eos=eos))
    for full, cut in zip(whole, columns(steps), strict=True):
        assert cut == (full[: full.index(eos) + 1] if eos in full else full)
    assert any(eos in full[:-1] for full in whole)  # else nothing was shown
    assert len(steps) == max(map(len, columns(steps)))


def test_it_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make(), []
    model.register_forward_hook(lambda module, arguments, out: calls.append(arguments[0].shape))
    steps = generate(model, [[1, 2]], max_new_tokens=5)
    assert not calls
    next(steps)
    assert calls == [(1, 2)]
    next(steps)
    assert calls == [(1, 2), (1, 1)]
    assert not torch.is_inference_mode_enabled()


def test_equal_prompts_are_computed_once_and_ended_rows_give_their_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches, calls = make(), [], []
    healthy = PagedCache.__init__

    def noted(self: PagedCache, *arguments: Any, **options: Any) -> None:
        healthy(self, *arguments, **options)
        caches.append(self)

    monkeypatch.setattr(PagedCache, "__init__", noted)
    model.register_forward_hook(lambda module, arguments, out: calls.append(arguments[0].shape))
    ended, steps = set[int](), generate(model, [list(range(16))] * 3, max_new_tokens=60, eos=4)
    for step in steps:
        assert caches[0].sequences == [row for row in range(3) if row not in ended]
        ended |= {row for row in range(3) if step[row] == 4}
    assert ended
    assert calls[:2] == [(1, 16), (3, 1)]


def test_progress_tells_how_far_and_how_fast_and_passes_every_step_on() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    steps: list[Step] = [[1, 2], [3, None]]
    for to in (io.StringIO(), Terminal()):
        assert list(with_progress(steps, 9, to)) == steps
        assert to.getvalue().startswith("\rstep 2 of 9, " if to.isatty() else "step 2 of 9, ")
        assert to.getvalue().endswith(" tokens/s\n")


def test_progress_stays_out_of_a_text_that_shares_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock_s)
    screen = io.StringIO()
    for (token,) in with_progress([[97], [98], [99]], 3, screen, only_last=True):
        assert token is not None
        screen.write(chr(token))
        clock_s += 60
    assert screen.getvalue() == "abc\nstep 3 of 3, 0.0 tokens/s\n"


def test_the_example_writes_its_text_in_one_piece(tmp_path: Path) -> None:
    """stdout and stderr are one file here, as on a terminal."""
    text = tmp_path / "text"
    text.write_bytes(b"ab" * 400)
    command = [sys.executable, "examples/generate.py", "--text", str(text), "--train-steps", "1"]
    command += ["--prompt", "abab", "--max-new-tokens", "20"]
    own = os.environ | {"PYTHONPATH": str(ROOT)}  # in an image the package is not installed
    done = subprocess.run(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    written = done.stdout.partition(b"nats per byte\n")[2]
    assert done.returncode == 0
    assert written.startswith(b"abab")
    assert written[24:].startswith(b"\nstep 20 of 20, ")
    assert written.endswith(b" tokens/s\n")


def test_the_rate_counts_the_tokens_of_rows_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock_s)

    def steps() -> Iterator[Step]:
        nonlocal clock_s
        for step in ([1, 2], [3, None]):
            clock_s += 1
            yield step

    to = io.StringIO()
    list(with_progress(steps(), 2, to))
    assert "1.5 tokens/s" in to.getvalue()


def test_logits_that_are_not_finite_are_named() -> None:
    model = make()
    with torch.no_grad():
        model.head.weight[3] = torch.nan
    with pytest.raises(ValueError, match="logits of row 0 are not finite at its new token 0"):
        next(generate(model, [[1]], max_new_tokens=1))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "model must be a DecoderLM; got Linear"),
        ({"model": make(attention="dense")}, ValueError, "attention must be 'nsa' for a cache"),
        ({"prompts": []}, TypeError, "prompts must be a sequence of sequences of tokens, at least one"),
        ({"prompts": "abc"}, TypeError, "prompts must be a sequence of sequences of tokens"),
        ({"prompts": [[1], []]}, ValueError, r"prompts\[1\] must be a sequence of at least one token; got \[\]"),
        ({"prompts": [[17]]}, ValueError, r"prompts\[0\] must hold ints between 0 and 16; got 17"),
        ({"prompts": [[1.0]]}, ValueError, r"prompts\[0\] must hold ints between 0 and 16; got 1\.0"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1; got 0"),
        ({"prefill_chunk": 0}, ValueError, "prefill_chunk must be at least 1; got 0"),
        ({"sampling": 0.5}, TypeError, "sampling must be a Sampling; got float"),
        ({"cuda_graph": True}, ValueError, "cuda_graph must be False where the model is not on an NVIDIA GPU"),
        ({"eos": "x"}, TypeError, "eos must be an int or None; got str"),
    ],
)
def test_wrong_arguments_are_named_at_once(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"model": make(), "prompts": [[1]], "max_new_tokens": 2, **wrong}
    with pytest.raises(error, match=message):
        generate(**arguments)


def test_the_example_writes() -> None:
    command = [sys.executable, "examples/generate.py", "--train-steps", "2", "--max-new-tokens", "5", "--rows", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--- 0\ndef ")
    assert "step 5 of 5, " in done.stderr
    refused = subprocess.run([*command, "--top-p", "2"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "top_p must be above 0 and at most 1; got 2.0" in refused.stderr
