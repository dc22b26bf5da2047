"""NSAForCausalLM: the numbers of `nsa.model`, with padding, packing, labels and checkpointing; refusals by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from nsa.integrations.transformers import NSACache, NSAForCausalLM, documents
from nsa.model import next_token_loss
from tests.nsa.integrations.models import VOCAB, decoder, make, mask_of, text
from tests.nsa.layers import PHIS

LENGTHS = [21, 5, 1, 34]
COLUMNS = 34


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("phi", "shared_kv", "tied_head"), [("avg", False, True), ("mlp", True, False)])
def test_logits_loss_and_gradients_are_bit_for_bit_those_of_nsa_model(
    dtype: torch.dtype, phi: str, shared_kv: bool, tied_head: bool
) -> None:
    theirs = decoder(dtype, phi, shared_kv=shared_kv, tied_head=tied_head, norm_eps=1e-5)
    ours = NSAForCausalLM.from_decoder(theirs)
    tokens = text(2, 33)
    logits = theirs(tokens)
    loss = next_token_loss(logits, tokens)
    loss.backward()
    output = ours(tokens, labels=tokens, num_items_in_batch=2 * 32)
    output.loss.backward()
    assert output.logits.dtype == dtype
    assert torch.equal(output.logits.float(), logits)
    assert torch.equal(output.loss, loss)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert len(gradients) == len(list(theirs.parameters()))
    for ours_grad, (name, parameter) in zip(gradients.values(), theirs.named_parameters(), strict=True):
        assert ours_grad is not None, name
        assert torch.equal(ours_grad, parameter.grad), name
    mean = ours(tokens, labels=tokens).loss  # the same terms, divided by PyTorch
    assert (mean - loss).abs() <= 2 * torch.finfo(torch.float32).eps * loss


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("phi", PHIS)
def test_a_padded_row_is_what_it_is_alone(side: str, phi: str) -> None:
    model, tokens, mask = make(phi=phi), text(4, COLUMNS), mask_of(LENGTHS, COLUMNS, side)
    logits = model(tokens, attention_mask=mask).logits
    for row, own in enumerate(mask.bool()):
        torch.testing.assert_close(logits[row, own], model(tokens[row, own][None]).logits[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_stands_in_the_padding_changes_nothing(side: str) -> None:
    model, tokens, mask = make(), text(4, COLUMNS), mask_of(LENGTHS, COLUMNS, side)
    other = torch.where(mask == 1, tokens, (tokens + 1) % VOCAB)
    a, b = (model(x, attention_mask=mask, labels=x) for x in (tokens, other))
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.loss, b.loss)
    assert not a.logits[mask == 0].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_a_padded_batch_is_that_of_its_rows(side: str) -> None:
    """Also where labels stand in the padding: no token follows it, and none is asked for there."""
    model, tokens, mask = make(), text(4, COLUMNS), mask_of(LENGTHS, COLUMNS, side)
    rows = [tokens[row, own][None] for row, own in enumerate(mask.bool())]
    summed = sum(model(x, labels=x, num_items_in_batch=1).loss for x in rows if x.shape[1] > 1)
    loss = model(tokens, attention_mask=mask, labels=tokens).loss
    torch.testing.assert_close(loss, summed / (sum(LENGTHS) - len(LENGTHS)))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cache_does_not_change_which_labels_count(side: str) -> None:
    """Labels that stand in the padding, in a call that is given a cache, or makes one."""
    model, tokens, mask = make(), text(4, COLUMNS), mask_of(LENGTHS, COLUMNS, side)
    wanted = model(tokens, attention_mask=mask, labels=tokens).loss
    for cache in ({"past_key_values": NSACache(COLUMNS)}, {"use_cache": True}):
        torch.testing.assert_close(model(tokens, attention_mask=mask, labels=tokens, **cache).loss, wanted)


def test_masks_are_read_once_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = documents.padding_mask
    monkeypatch.setattr(documents, "padding_mask", lambda *given: (calls.append(1), plain(*given))[1])
    tokens = text(4, COLUMNS)
    make()(tokens, attention_mask=mask_of(LENGTHS, COLUMNS), labels=tokens)
    assert len(calls) == 1


def test_positions_that_begin_anew_are_packed_documents() -> None:
    model, tokens = make(), text(2, 20)
    cut = [0, 7, 8, 20]
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cut)]).expand(2, -1)
    packed = model(tokens, position_ids=positions, labels=tokens)
    parts = [tokens[:, a:b] for a, b in pairwise(cut)]
    torch.testing.assert_close(packed.logits, torch.cat([model(part).logits for part in parts], 1))
    summed = sum(model(part, labels=part, num_items_in_batch=1).loss for part in parts if part.shape[1] > 1)
    torch.testing.assert_close(packed.loss, summed / (2 * (20 - 3)))


def test_masks_and_positions_that_say_nothing_new_change_nothing() -> None:
    model, tokens = make(), text(2, 30)
    alone = model(tokens).logits
    for said in (
        {"attention_mask": torch.ones(2, 30)},
        {"position_ids": torch.arange(30)[None]},
        {"attention_mask": torch.ones(2, 30).bool(), "position_ids": torch.arange(30).expand(2, -1)},
        {"cache_position": torch.arange(30)},
        {"use_cache": False},
    ):
        assert torch.equal(model(tokens, **said).logits, alone), said


def test_padded_positions_as_generate_counts_them() -> None:
    model, tokens, mask = make(), text(4, COLUMNS), mask_of(LENGTHS, COLUMNS)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    with_positions = model(tokens, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(with_positions, model(tokens, attention_mask=mask).logits)


@pytest.mark.parametrize("mask", [None, "ones", "left"])
def test_no_logit_and_no_loss_sees_the_future(mask: str | None) -> None:
    """transformers passes None where there is no padding: other tokens from any cut on leave what is before it."""
    model, tokens = make(), text(3, 30)
    masks = {"ones": torch.ones(3, 30).long(), "left": mask_of([30, 22, 9], 30)}
    attention_mask = None if mask is None else masks[mask]
    for cut in (1, 8, 23, 29):
        other = torch.cat([tokens[:, :cut], (tokens[:, cut:] + 3) % VOCAB], 1)
        labels = tokens.masked_fill(torch.arange(30) >= cut, -100)
        a, b = (model(x, attention_mask=attention_mask, labels=labels) for x in (tokens, other))
        assert torch.equal(a.logits[:, :cut], b.logits[:, :cut])
        assert cut == 1 or torch.equal(a.loss, b.loss)
        assert not torch.equal(a.logits[:, cut:], b.logits[:, cut:])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool, padded: bool) -> None:
    tokens, mask = text(2, 30), mask_of([30, 11], 30) if padded else None
    found = []
    for checkpointing in (False, True):
        model = make().train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)  # its name since transformers 5.22
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
        calls = []
        model.model.layers[0].attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(tokens, attention_mask=mask, labels=tokens).loss.backward()
        assert len(calls) == 1 + checkpointing
        found.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_embeddings_hidden_states_and_some_logits_alone() -> None:
    model, tokens = make(), text(2, 30)
    mask = mask_of([30, 11], 30)
    everything = model(tokens, attention_mask=mask, output_hidden_states=True)
    assert len(everything.hidden_states) == 3
    assert torch.equal(model.lm_head(everything.hidden_states[-1]), everything.logits)
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens), attention_mask=mask)
    assert torch.equal(embedded.logits, everything.logits)
    for kept, columns in ((3, [27, 28, 29]), (torch.tensor([4, 29]), [4, 29])):
        some = model(tokens, attention_mask=mask, logits_to_keep=kept).logits
        torch.testing.assert_close(some, everything.logits[:, columns])
    logits, states = model(tokens, attention_mask=mask, output_hidden_states=True, return_dict=False)
    assert torch.equal(logits, everything.logits)
    assert len(states) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output_attentions": True}, ValueError, "output_attentions: not served"),
        ({"head_mask": torch.ones(4)}, ValueError, "head_mask: not served"),
        ({"cu_seq_lens_q": torch.ones(4)}, ValueError, "cu_seq_lens_q: not served"),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, ValueError, r"attention_mask must say .* \[2, 9\]; got \[2, 1, 9"),
        ({"attention_mask": torch.ones(2, 8)}, ValueError, r"attention_mask must say .* \[2, 9\]; got \[2, 8\]"),
        ({"attention_mask": [[1] * 9] * 2}, TypeError, "attention_mask must be a tensor"),
        (
            {"attention_mask": torch.tensor([[1] * 9, [0, 1, 1, 0, 1, 1, 1, 1, 0]])},
            ValueError,
            "attention_mask .* row 1 has a gap",
        ),
        ({"attention_mask": torch.zeros(2, 9)}, ValueError, "attention_mask must leave at least one token"),
        ({"position_ids": torch.arange(1, 10)[None]}, ValueError, "position_ids must count .* from 0"),
        ({"position_ids": torch.arange(9).flip(0)[None]}, ValueError, "position_ids must count .* from 0"),
        ({"position_ids": torch.arange(9)}, ValueError, r"position_ids must be \[2, 9\]"),
        ({"position_ids": torch.rand(2, 9)}, TypeError, "position_ids must be an integer tensor"),
        ({"cache_position": torch.arange(1, 10)}, ValueError, "cache_position must count on from the 0"),
        ({"past_key_values": object()}, TypeError, "past_key_values must be an NSACache or None; got object"),
        ({"past_key_values": NSACache(9)}, ValueError, "use_cache is for inference"),
        ({"use_cache": True}, ValueError, "use_cache is for inference"),
        ({"inputs_embeds": torch.ones(2, 9, 12)}, ValueError, "input_ids or inputs_embeds must be given"),
        ({"labels": text(2, 9), "logits_to_keep": 1}, ValueError, "logits_to_keep must be 0"),
        ({"labels": text(2, 8)}, ValueError, r"labels must be \[2, 9\], as the inputs; got \[2, 8\]"),
        ({"labels": torch.ones(2, 9)}, TypeError, "labels must be an integer tensor; got torch.float32"),
        ({"input_ids": text(2, 0)}, ValueError, r"input_ids must be \[B, S\] .* one column; got \[2, 0\]"),
        ({"input_ids": text(0, 9)}, ValueError, r"input_ids must be \[B, S\] .* one row .*; got \[0, 9\]"),
        ({"input_ids": text(1, 9)[0]}, ValueError, r"input_ids must be \[B, S\] .*; got \[9\]"),
        ({"input_ids": torch.ones(2, 9)}, TypeError, "input_ids must be an integer tensor; got torch.float32"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be an integer tensor; got list"),
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 9, 11)}, ValueError, r"inputs_embeds must be \[B, S, 12\]"),
        ({"input_ids": None, "inputs_embeds": text(2, 9)}, TypeError, "inputs_embeds must be a floating-point"),
    ],
)
def test_what_is_not_served_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()(**{"input_ids": text(2, 9), **arguments})
