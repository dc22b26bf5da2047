"""generate(): rows of a padded batch go on as they would alone, with the cache as without; refusals by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from nsa.generate import generate
from nsa.integrations.transformers import NSACache, NSAForCausalLM
from nsa.sampling import Sampling
from tests.nsa.integrations.models import decoder, make, mask_of, text

LENGTHS = [13, 1, 5, 13]
NEW = 24


def padded(lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask; the first and the last row are the same."""
    columns = max(lengths)
    tokens = text(len(lengths), columns)
    tokens[-1] = tokens[0]
    return tokens, mask_of(lengths, columns)


def continued(model: NSAForCausalLM, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(tokens, attention_mask=mask, **options)


@pytest.mark.parametrize(("phi", "shared_kv"), [("mlp", False), ("avg", True)])
def test_padded_rows_go_on_as_they_would_alone(phi: str, shared_kv: bool) -> None:
    model, (tokens, mask) = make(phi=phi, shared_kv=shared_kv), padded()
    together = continued(model, tokens, mask)
    for row, own in enumerate(mask.bool()):
        alone = continued(model, tokens[row, own][None])[0]
        assert together[row, tokens.shape[1] - LENGTHS[row] :].tolist() == alone.tolist()
    assert len({tuple(row) for row in together[:, -NEW:].tolist()}) == 3  # else nothing was shown
    assert torch.equal(together[0], together[3])


def test_it_is_what_nsa_generate_says() -> None:
    theirs = decoder(phi="mlp")
    tokens, mask = padded()
    prompts = [tokens[row, own].tolist() for row, own in enumerate(mask.bool())]
    steps = list(generate(theirs, prompts, max_new_tokens=NEW, sampling=Sampling(0)))
    ours = continued(NSAForCausalLM.from_decoder(theirs).eval(), tokens, mask)
    assert ours[:, -NEW:].T.tolist() == [list(step) for step in steps]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.7, "top_k": 9},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
        {"prefill_chunk_size": 4},
        {"prefill_chunk_size": 1},
    ],
    ids=str,
)
def test_the_cache_changes_no_token(options: dict[str, Any]) -> None:
    model, (tokens, mask) = make(), padded()
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        chosen = dict(options) if use_cache else {k: v for k, v in options.items() if k != "prefill_chunk_size"}
        found.append(continued(model, tokens, mask, use_cache=use_cache, **chosen))
    assert torch.equal(*found)


def test_a_row_that_has_ended_leaves_the_others_alone() -> None:
    model, (tokens, mask) = make(), padded()
    free = continued(model, tokens, mask)
    eos = int(free[1, tokens.shape[1] + 3])
    ended = continued(model, tokens, mask, eos_token_id=eos, pad_token_id=0)
    for row, new in enumerate(free[:, tokens.shape[1] :].tolist()):
        upto = new.index(eos) + 1 if eos in new else NEW
        assert ended[row, tokens.shape[1] :][:upto].tolist() == new[:upto]


def test_embedded_prompts_go_on_alike() -> None:
    model, (tokens, mask) = make(), padded()
    embedded = model.generate(
        inputs_embeds=model.get_input_embeddings()(tokens), attention_mask=mask, max_new_tokens=NEW, do_sample=False
    )
    assert torch.equal(embedded, continued(model, tokens, mask)[:, -NEW:])


def test_a_cache_that_is_kept_goes_on_with_the_next_turn() -> None:
    model, (tokens, mask) = make(), padded()
    cache = NSACache(max_tokens=tokens.shape[1] + 2 * NEW + 6)
    first = continued(model, tokens, mask, past_key_values=cache)
    assert len(cache) == 2
    assert cache.get_seq_length() == first.shape[1] - 1  # the last token was never read
    assert cache.lengths == [length + NEW - 1 for length in LENGTHS]
    longer = torch.cat([first, text(4, 6, seed=5)], 1)
    longer_mask = torch.cat([mask, torch.ones(4, NEW + 6).long()], 1)
    again = continued(model, longer, longer_mask, past_key_values=cache)
    assert torch.equal(again, continued(model, longer, longer_mask))


@torch.no_grad()
def test_a_loop_by_hand_gives_the_logits_of_one_call() -> None:
    """Prefill, a chunk in which some rows are still padding, and tokens one by one; every position is checked."""
    model, mask = make(), mask_of([20, 3, 9], 20)
    tokens = text(3, 20)
    whole = model(tokens, attention_mask=mask).logits
    cache, parts = None, []
    for first, last in ((0, 6), (6, 15), (15, 16), (16, 17), (17, 20)):
        positions = (mask[:, :last].cumsum(-1) - 1)[:, first:last]
        output = model(
            tokens[:, first:last],
            attention_mask=mask[:, :last],
            position_ids=positions,
            cache_position=torch.arange(first, last),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        cache = output.past_key_values
        parts.append(output.logits)
        assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    logits = torch.cat(parts, 1)
    torch.testing.assert_close(logits[mask == 1], whole[mask == 1])
    assert not logits[mask == 0].any()


@torch.no_grad()
def test_right_padding_is_read_into_a_cache() -> None:
    """As an evaluation does; what follows such padding would leave a gap."""
    model, tokens, mask = make(), text(2, 12), mask_of([12, 7], 12, "right")
    output = model(tokens, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(output.logits, model(tokens, attention_mask=mask).logits)
    assert output.past_key_values.lengths == [12, 7]
    with pytest.raises(ValueError, match=r"attention_mask .* row 1 has a gap"):
        model(tokens[:, :1], attention_mask=torch.cat([mask, mask[:, :1]], 1), past_key_values=output.past_key_values)


@torch.no_grad()
def test_what_contradicts_the_cache_is_refused_and_leaves_it_as_it_was() -> None:
    model, (tokens, mask) = make(), padded()
    cache = NSACache(tokens.shape[1] + 2)
    model(tokens, attention_mask=mask, past_key_values=cache)
    one, longer = tokens[:, :1], torch.cat([mask, mask[:, -1:]], 1)
    for changes, message in (
        ({"attention_mask": torch.ones(4, 14)}, r"attention_mask must leave the tokens .* \[13, 1, 5, 13\]"),
        ({"attention_mask": mask}, r"attention_mask must say .* \[4, 14\]; got \[4, 13\]"),
        ({"position_ids": torch.full((4, 1), 13)}, "position_ids must count on"),
        ({"cache_position": torch.arange(1)}, "cache_position must count on from the 13 columns"),
        ({"use_cache": False}, "use_cache must not be False"),
        ({"attention_mask": torch.cat([mask, mask[:, :1] * 0], 1)}, "at least one new token"),
    ):
        with pytest.raises(ValueError, match=message):
            model(one, **{"attention_mask": longer, "past_key_values": cache, **changes})
    with pytest.raises(ValueError, match="past_key_values holds 4 rows; got 3"):
        model(one[:3], attention_mask=longer[:3], past_key_values=cache)
    with pytest.raises(ValueError, match=r"room for max_tokens=15; it holds 13 and 3 more came"):
        model(tokens[:, :3], past_key_values=cache)
    assert cache.lengths == LENGTHS
    after = model(one, attention_mask=longer, past_key_values=cache).logits[:, -1]
    whole = model(torch.cat([tokens, one], 1), attention_mask=longer).logits[:, -1]
    torch.testing.assert_close(after, whole)


@torch.no_grad()
def test_a_call_that_fails_halfway_leaves_no_row_ahead_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens, mask) = make(), padded()
    cache, layer, calls = NSACache(50), model.model.layers[1], []
    healthy = layer.forward

    def failing(x: Tensor, *others: Any) -> Tensor:
        calls.append(x.shape[0])
        if len(calls) == 2:
            raise MemoryError("the second group")
        return healthy(x, *others)

    monkeypatch.setattr(layer, "forward", failing)
    with pytest.raises(MemoryError, match="second group"):
        model(tokens, attention_mask=mask, past_key_values=cache)
    assert (cache.get_seq_length(), cache.lengths) == (0, [0] * 4)
    again = model(tokens, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(again, model(tokens, attention_mask=mask).logits)


@torch.no_grad()
def test_chosen_rows_go_on_apart() -> None:
    """What beam search asks for: pages are shared until a row writes, and never after."""
    model, tokens = make(), text(3, 17)
    cache = NSACache(40)
    model(tokens, past_key_values=cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_select_indices(torch.tensor([1, 2]))
    new = text(2, 5, seed=4)
    logits = torch.cat([model(new[:, i : i + 1], past_key_values=cache).logits for i in range(5)], 1)
    whole = model(torch.cat([tokens[[0, 0]], new], 1)).logits[:, 17:]
    torch.testing.assert_close(logits, whole)
    cache.reset()
    torch.testing.assert_close(model(tokens[:2], past_key_values=cache).logits, model(tokens[:2]).logits)


@torch.no_grad()
def test_rows_are_chosen_as_tensors_are_indexed_and_no_more_than_were_reserved() -> None:
    model, tokens = make(), text(3, 17)
    cache = NSACache(40)
    model(tokens, past_key_values=cache)
    for rows, message in (
        (torch.tensor([0, 1, 2, 2]), "indices must choose at most the 3 rows of the first call"),
        (torch.tensor([3]), r"indices must be rows of the 3 that past_key_values holds; got \[3\]"),
        (torch.tensor([True, False]), r"indices as a mask must be \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.batch_select_indices(rows)
    assert cache.lengths == [17] * 3
    cache.batch_select_indices(torch.tensor([False, True, True]))
    one = tokens[:, :1]
    logits = model(one[1:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(torch.cat([tokens, one], 1)).logits[1:, -1:])


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_cache_is_not_copied(way: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"NSACache cannot be .*NSACache\(max_tokens=\.\.\.\)"):
        way(NSACache(9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation is not served"),
        ({"cache_implementation": "static"}, "cache_implementation must be None"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged' are not served"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: not served"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"attention_mask": torch.ones(4, 1, 13, 13)}, "attention_mask"),
        ({"attention_mask": mask_of([13, 0, 5, 13], 13)}, "attention_mask must not be 0 .* row 1 ends with padding"),
        ({"attention_mask": mask_of(LENGTHS, 13, "right")}, "attention_mask must not be 0 .* Pad prompts on the left"),
    ],
)
def test_ways_to_generate_that_are_not_served_are_named(options: dict[str, Any], message: str) -> None:
    model, (tokens, mask) = make(), padded()
    with pytest.raises(ValueError, match=message):
        model.generate(tokens, **{"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, **options})


def test_assisted_decoding_is_refused_from_both_sides() -> None:
    model, tokens = make(), text(1, 9)
    with pytest.raises(ValueError, match="assisted_generation is not served"):
        model.generate(tokens, assistant_model=make(), max_new_tokens=3)
    assistant = GenerationConfig(max_new_tokens=3)
    assistant.is_assistant = True
    with pytest.raises(ValueError, match="assistant_model must not be an NSAForCausalLM"):
        model.generate(tokens, generation_config=assistant)
    with pytest.raises(ValueError, match="cannot be cropped"):
        NSACache(9).crop(1)
