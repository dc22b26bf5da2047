"""Rows of a PagedCache that are kept between steps, as generation keeps them, and forks under a model of two layers."""

from __future__ import annotations

import torch

from nsa import PagedCache
from nsa.model import DecoderLM, ModelConfig
from tests.nsa.layers import make_layer, small_config, tokens


def test_rows_that_are_kept_read_by_the_tables_of_each_step() -> None:
    """Pages are added, shared ones replaced and old ones given back while the same rows step on."""
    layer, x = make_layer(), tokens(2, 60)
    x[1, :11] = x[0, :11]
    with torch.no_grad():
        wanted = layer(x)
        cache = PagedCache(layer, num_pages=80, max_tokens=60, page_size=8)
        trunk = cache.new()
        layer(x[:1, :11], cache.rows([trunk]).layers[0])
        rows = cache.rows([trunk, cache.fork(trunk)])
        for token in range(11, 60):
            out = layer(x[:, token : token + 1], rows.layers[0])
            torch.testing.assert_close(out, wanted[:, token : token + 1], rtol=1e-9, atol=1e-9)


def test_a_fork_of_a_models_sequence_has_its_pages_in_every_layer() -> None:
    """The branch writes into a page that both read: every layer copies it first."""
    torch.manual_seed(0)
    config = ModelConfig(dim=16, n_layers=2, n_heads=4, num_kv_heads=2, d_k=6, d_v=5, nsa=small_config())
    model, text = DecoderLM(config).double(), torch.randint(256, (2, 30))
    text[1, :13] = text[0, :13]
    with torch.no_grad():
        wanted = model(text)
        cache = PagedCache(model.attentions(), num_pages=200, max_tokens=30, page_size=8)
        trunk = cache.new()
        model(text[:1, :13], cache.rows([trunk]))
        branch = cache.fork(trunk)
        for row, sequence in ((1, branch), (0, trunk)):
            out = model(text[row : row + 1, 13:], cache.rows([sequence]))
            torch.testing.assert_close(out, wanted[row : row + 1, 13:], rtol=1e-9, atol=1e-9)
