"""A decode step of a model as one CUDA graph, replayed while the sequences grow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from nsa.backends import MAX_DECODE_QUERIES
from nsa.layer import a_size
from nsa.model import DecoderLM
from nsa.paged.cache import PagedRows


class GraphedStep:
    """`num_tokens` more tokens in each of `rows`, again and again: tokens [B, num_tokens] -> logits.

    Capturing runs the step twice on tokens 0, by which the sequences do not grow. Then only what the host must do is
    done by the host: pages for the new rows, and their tables and lengths brought to the device; the graph reads them
    there.

    Raises ValueError where the model is not on a GPU, or a layer's backend cannot decode from pages: another one
    computes what it captures for the lengths of that moment.
    """

    def __init__(self, model: DecoderLM, rows: PagedRows, num_tokens: int = 1) -> None:
        if a_size("num_tokens", num_tokens) > MAX_DECODE_QUERIES:
            raise ValueError(f"num_tokens must be at most {MAX_DECODE_QUERIES}; got {num_tokens}")
        device = model.embedding.weight.device
        if device.type != "cuda":
            raise ValueError(f"model must be on an NVIDIA GPU for a CUDA graph; it is on {device}")
        for layer in rows.layers:
            if reason := layer.why_no_graph():
                raise ValueError(f"model must decode by backend 'triton' for a CUDA graph: {reason}")
        rows.every_step_alike = True
        self.rows, self.num_tokens = rows, num_tokens
        self._model, self._graph = model, torch.cuda.CUDAGraph()
        with torch.inference_mode(False):
            self._tokens = torch.zeros(len(rows.sequences), num_tokens, dtype=torch.int64, device=device)
        self._capture()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [B, num_tokens, vocab_size] behind tokens [B, num_tokens], overwritten by the next call."""
        if tokens.shape != self._tokens.shape:
            raise ValueError(f"tokens must have shape {list(self._tokens.shape)}; got {list(tokens.shape)}")
        self.rows.prepare(self.num_tokens)
        self._tokens.copy_(tokens)
        self._graph.replay()
        self.rows.commit(self.num_tokens)
        return self._logits

    @torch.no_grad()
    def _capture(self) -> None:
        device = self._tokens.device
        aside = stream_aside(device)
        with torch.cuda.device(device), _own_casts(), self.rows.dry_run():
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # compiles kernels and warms up libraries, which a capture must not
                self._model(self._tokens, self.rows)
            torch.cuda.current_stream().wait_stream(aside)
            self.rows.prepare(self.num_tokens)
            with torch.cuda.graph(self._graph, stream=aside):
                self._logits = self._model(self._tokens, self.rows)


@cache
def stream_aside(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _own_casts() -> Iterator[None]:
    """Under autocast the graph casts weights itself: those that autocast keeps are freed when it ends."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
