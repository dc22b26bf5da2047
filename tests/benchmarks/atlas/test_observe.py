"""A length's curves are those of what the model chose, in the rows and steps that they are said to be of."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch

from benchmarks.atlas import measures, observe
from benchmarks.atlas.observe import Measured
from nsa import loss
from nsa.config import NSAConfig
from nsa.loss import next_token_loss
from nsa.model import DecoderLM, ModelConfig
from nsa.train.data.packing import Batch
from nsa.train.monitoring.attention_stats import AttentionObserver

CONFIG = NSAConfig(l=8, d=4, l_sel=8, n_sel=5, w=16)
TOKENS, STEPS = 256, 6


@pytest.fixture(scope="module")
def lm() -> DecoderLM:
    torch.manual_seed(0)
    sizes = ModelConfig(dim=16, n_layers=2, n_heads=4, num_kv_heads=2, d_k=8, d_v=8, nsa=CONFIG, vocab_size=32)
    return DecoderLM(sizes).eval().requires_grad_(False)


def batch(seed: int, tokens: int = TOKENS) -> Batch:
    drawn = torch.randint(32, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return Batch(drawn, loss.next_tokens(drawn), tokens - 1)


@pytest.fixture(scope="module")
def measured(lm: DecoderLM) -> Measured:
    return observe.measure(lm, [batch(0), batch(1)], seed=5, steps=STEPS)


def choices(lm: DecoderLM, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(block indices [S, H, n], gates [S, Hq, 3]) of each layer, through the layer's own observer."""
    found = []
    for layer in lm.attentions():
        layer.observer = lambda gates, aux, cu: found.append((aux.block_indices[0], gates[0]))
    lm(tokens)
    for layer in lm.attentions():
        layer.observer = None
    return found


def test_curves_are_of_the_later_half_of_the_held_out_rows(lm: DecoderLM, measured: Measured) -> None:
    half = TOKENS // 2
    of_both = [choices(lm, batch(seed).tokens) for seed in (0, 1)]
    for head in measured.curves.heads:
        rows = [found[head.layer][0][half:, head.kv_head : head.kv_head + 1] for found in of_both]
        for lag in (1, 64):
            wanted = sum(float(measures.at_lag(one, lag)) for one in rows) / 2
            assert head.jaccard[str(lag)] == pytest.approx(wanted, abs=1e-5)
        assert head.union["8"] == pytest.approx(sum(float(measures.union_size(one, 8)) for one in rows) / 2, abs=1e-5)
        group = slice(2 * head.kv_head, 2 * head.kv_head + 2)
        gates = [found[head.layer][1][half:, group].mean((0, 1)) for found in of_both]
        assert head.gates == pytest.approx((sum(gates) / 2).tolist(), abs=1e-5)
        assert len(head.distance) == len(measures.distance_edges(TOKENS // 8))
    between = sum(measures.most_alike(found[0][0][half:], found[1][0][half:]) for found in of_both) / 2
    assert measured.curves.layers_jaccard == pytest.approx([between], abs=1e-5)
    assert (measured.curves.n_sel, measured.curves.forced, measured.curves.l_sel) == (5, 3, 8)


def test_the_loss_is_that_of_the_text(lm: DecoderLM, measured: Measured) -> None:
    wanted = [float(next_token_loss(lm(batch(seed).tokens), batch(seed).tokens)) for seed in (0, 1)]
    assert measured.loss == pytest.approx(sum(wanted) / 2, rel=1e-5)


def test_samples_are_what_was_chosen(lm: DecoderLM, measured: Measured) -> None:
    found = choices(lm, batch(0).tokens)
    read = [sample for sample in measured.samples if not sample.decode]
    assert {(sample.layer, sample.kv_head) for sample in read} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for sample in read:
        rows = found[sample.layer][0][sample.first_row : sample.first_row + observe.SAMPLED_ROWS, sample.kv_head]
        assert torch.equal(torch.tensor(sample.block_indices), rows)


def test_decode_steps_are_the_models_own(lm: DecoderLM, measured: Measured) -> None:
    """A step's choice is that of its row in a text that ends with what the model wrote."""
    written = [sample for sample in measured.samples if sample.decode]
    first = TOKENS - STEPS
    assert {(len(sample.block_indices), sample.first_row) for sample in written} == {(STEPS, first)}
    generator = torch.Generator().manual_seed(5)
    text = batch(0).tokens[:, :first]
    for _ in range(STEPS):
        drawn = torch.multinomial(lm(text)[:, -1].softmax(-1), 1, generator=generator)
        text = torch.cat([text, drawn], 1)
    found = choices(lm, text)
    for sample in written:
        assert torch.equal(torch.tensor(sample.block_indices), found[sample.layer][0][first:, sample.kv_head])
    for head in observe.measure(lm, [batch(0)], seed=5, steps=STEPS).curves.heads:
        own = found[head.layer][0][first:, head.kv_head : head.kv_head + 1]
        assert head.step_jaccard == pytest.approx(float(measures.at_lag(own, 1)), abs=1e-5)


def test_the_first_sequences_alone_are_written_on(lm: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = observe.measure(lm, [batch(0)], seed=5, steps=STEPS).curves.heads
    monkeypatch.setattr(observe, "WRITTEN_ON", 1)
    several = observe.measure(lm, [batch(0), batch(1)], seed=5, steps=STEPS).curves.heads
    assert [head.step_jaccard for head in several] == [head.step_jaccard for head in alone]
    assert [head.mass for head in several] != [head.mass for head in alone]


def test_whole_sequences_are_kept_the_most_typical_head_first(lm: DecoderLM, measured: Measured) -> None:
    kept, found = measured.choices, choices(lm, batch(0).tokens)
    assert kept is not None
    near = {(head.layer, head.kv_head): head.jaccard["1"] for head in measured.curves.heads}
    off = [abs(near[head.layer, head.kv_head] - statistics.median(near.values())) for head in kept.heads]
    assert len(off) == len(near)
    assert off == sorted(off) != sorted(off, reverse=True)
    for head in kept.heads:
        rows = found[head.layer][0][:, head.kv_head]
        assert torch.equal(torch.from_numpy(kept.indices(head, CONFIG)), rows)


def test_a_model_is_left_as_it_was(lm: DecoderLM) -> None:
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    observe.measure(lm, [batch(0)], seed=0, steps=STEPS)
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    assert AttentionObserver(lm)  # its layers are NSA's still
    assert all(layer.observer is None for layer in lm.attentions())


@pytest.mark.parametrize(
    ("config", "tokens", "message"),
    [
        (CONFIG, 255, "at least 256"),
        (dataclasses.replace(CONFIG, n_sel=20), 335, "at least 336"),
        (dataclasses.replace(CONFIG, n_sel=3), 4096, "no choice to measure"),
    ],
)
def test_a_length_without_a_choice_is_refused(config: NSAConfig, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        observe.check_length(tokens, config, STEPS)


def test_every_row_of_the_shortest_length_has_a_choice(lm: DecoderLM) -> None:
    for indices, _ in choices(lm, batch(3, 256).tokens):
        assert (indices[128:] >= 0).all()


def test_lengths_are_not_mixed(lm: DecoderLM) -> None:
    with pytest.raises(ValueError, match="one length"):
        observe.measure(lm, [batch(0), batch(1, 512)], seed=0, steps=STEPS)
    with pytest.raises(ValueError, match="at least one"):
        observe.measure(lm, [], seed=0, steps=STEPS)


def test_numbers_are_spread_from_end_to_end() -> None:
    assert observe._spread(3, 4) == [0, 1, 2]
    assert observe._spread(12, 4) == [0, 4, 7, 11]
