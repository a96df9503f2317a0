"""Several prompts decoded at once: every row is what it is alone, for every kind of target."""

import numpy as np
import pytest
import small_targets
import torch
from drafters import make_drafter, sliding
from test_decode import EVERY_MODEL, MODELS, TAPS, Echo, drafter_for, own_output, prompt_of, target_of
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from ds_dflash.caches import TargetRows, join
from ds_dflash.decode import Drafter, SpeculativeDecoder, compare, greedy, plain
from ds_dflash.errors import UserError
from ds_dflash.sampling import Sampler

LENGTHS = (9, 1, 23, 4)
WRONG = (  # wrong slots of one step after another, for each prompt: rows part and meet again
    [[0], [1], [], [2], [0, 2], [], [], [1, 2], [0]],
    [[], [], [0]],
    [[0]],
    [[2], [1]],
)


def echo(kind):
    return Echo([own_output(kind, length) for length in LENGTHS], WRONG)


def prompts():
    return [prompt_of(length) for length in LENGTHS]


def own_outputs(kind, new):
    return [own_output(kind, length)[: length + new] for length in LENGTHS]


def outputs(generations):
    return [generation.output_ids.tolist() for generation in generations]


def lengths(generations):
    return [generation.acceptance_lengths.tolist() for generation in generations]


def accepted_alone(wrong, new):
    """The acceptance lengths of an answer of `new` tokens, from its wrong slots."""
    steps, tokens = [], 1
    while tokens < new:
        steps.append(1 + min(wrong[len(steps) % len(wrong)], default=3))
        tokens += steps[-1]
    return steps


@EVERY_MODEL
def test_every_row_of_a_batch_is_the_targets_own_and_accepts_what_it_accepts_alone(kind):
    generations = SpeculativeDecoder(target_of(kind), echo(kind)).generate_batch(
        prompts(), max_new_tokens=20, stop_ids=()
    )
    assert outputs(generations) == [ids.tolist() for ids in own_outputs(kind, 20)]
    assert lengths(generations) == [accepted_alone(wrong, 20) for wrong in WRONG]
    assert len({len(steps) for steps in lengths(generations)}) > 1


@torch.no_grad()
@EVERY_MODEL
def test_the_drafter_gets_the_features_of_a_whole_forward_for_every_row(kind):
    """Closer than ids can tell: what leaks from padding, another row or a rejected token would show."""
    target, drafter = target_of(kind), echo(kind)
    SpeculativeDecoder(target, drafter).generate_batch(prompts(), max_new_tokens=20, stop_ids=())
    for row, ids in enumerate(own_outputs(kind, 20)):
        features = torch.cat(drafter.features[row])
        assert len(features) >= LENGTHS[row] + 10
        hidden = target(input_ids=ids[None], output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[tap + 1][0] for tap in TAPS], -1)[: len(features)]
        torch.testing.assert_close(features[: len(expected)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("qwen3", sliding(6)), ("llama_tied", {}), ("moe", sliding(6)), ("hybrid", {}), ("windows", sliding(6))],
    ids=str,
)
def test_a_real_drafter_in_a_batch_accepts_what_it_accepts_alone(kind, fields):
    target = small_targets.build(MODELS[kind], seed=2, vocab_size=6)  # few ids: a random drafter is sometimes right
    decoder = SpeculativeDecoder(target, Drafter(make_drafter(drafter_for(target, **fields)), target))
    asked = [prompt % 6 for prompt in [*prompts(), prompt_of(9, seed=5)]]  # two of one length
    together = decoder.generate_batch(asked, max_new_tokens=12, stop_ids=())
    alone = [decoder.generate(prompt, max_new_tokens=12, stop_ids=()) for prompt in asked]
    assert outputs(together) == outputs(alone)
    assert lengths(together) == lengths(alone)
    assert outputs(together) == outputs(greedy(target, prompt, max_new_tokens=12, stop_ids=()) for prompt in asked)


@EVERY_MODEL
def test_plain_decoding_of_a_batch_is_that_of_each_prompt(kind):
    target = target_of(kind)
    together = plain(target, prompts(), max_new_tokens=12, stop_ids=())
    assert outputs(together) == [ids.tolist() for ids in own_outputs(kind, 12)]
    for prompt, generation in zip(prompts(), together, strict=True):
        alone = greedy(target, prompt, max_new_tokens=12, stop_ids=())
        np.testing.assert_allclose(generation.tie_margins, alone.tie_margins, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["windows", "hybrid"])
def test_rows_end_one_by_one_with_their_stop_ids_and_the_others_go_on(kind):
    target, full = target_of(kind), own_outputs(kind, 20)
    new = [ids[length:].tolist() for ids, length in zip(full, LENGTHS, strict=True)]
    stop_ids = (new[1][0], new[2][5])  # the first ends a row before its first block
    ends = [min([20, *(row.index(stop) + 1 for stop in stop_ids if stop in row)]) for row in new]
    assert len(set(ends)) > 2
    expected = [ids[: length + end].tolist() for ids, length, end in zip(full, LENGTHS, ends, strict=True)]
    options = {"max_new_tokens": 20, "stop_ids": stop_ids}
    generations = SpeculativeDecoder(target, echo(kind)).generate_batch(prompts(), **options)
    assert outputs(generations) == expected
    assert lengths(generations)[1] == []
    assert outputs(plain(target, prompts(), **options)) == expected


def test_a_batch_whose_rows_all_end_with_their_first_token_needs_no_draft():
    target = target_of("qwen3")
    decoder = SpeculativeDecoder(target, Echo([], []))  # it would fail if it were asked for a proposal
    generations = decoder.generate_batch(prompts(), max_new_tokens=1, stop_ids=())
    assert outputs(generations) == [ids.tolist() for ids in own_outputs("qwen3", 1)]
    assert outputs(plain(target, prompts(), max_new_tokens=1, stop_ids=())) == outputs(generations)


def test_equal_prompts_in_a_batch_stay_equal():
    target = target_of("hybrid")
    drafter = Drafter(make_drafter(drafter_for(target)), target)
    generations = SpeculativeDecoder(target, drafter).generate_batch([prompt_of()] * 3, max_new_tokens=9, stop_ids=())
    assert outputs(generations) == [own_output("hybrid")[:18].tolist()] * 3


@pytest.mark.parametrize("kind", ["qwen3", "hybrid", "windows"])
def test_a_sampled_row_is_the_same_in_any_batch(kind):
    target = small_targets.build(MODELS[kind], seed=2, vocab_size=6)
    decoder = SpeculativeDecoder(target, Drafter(make_drafter(drafter_for(target)), target))
    asked, options = [prompt % 6 for prompt in prompts()], {"max_new_tokens": 8, "stop_ids": ()}
    together = decoder.generate_batch(asked, choosers=[Sampler(1.0, 7, index) for index in range(4)], **options)
    alone = [
        decoder.generate_batch([prompt], choosers=[Sampler(1.0, 7, index)], **options)[0]
        for index, prompt in enumerate(asked)
    ]
    assert outputs(together) == outputs(alone)
    assert lengths(together) == lengths(alone)
    assert outputs(together) != outputs(greedy(target, prompt, **options) for prompt in asked)
    own = plain(target, asked, choosers=[Sampler(1.0, 7, index) for index in range(4)], **options)
    own_alone = [plain(target, [asked[index]], choosers=[Sampler(1.0, 7, index)], **options)[0] for index in range(4)]
    assert outputs(own) == outputs(own_alone)


def test_a_bf16_targets_rows_differ_from_plain_decoding_by_ties_at_most():
    target = small_targets.build(small_targets.qwen3, seed=1).bfloat16()
    model = make_drafter(drafter_for(target)).bfloat16()
    options = {"max_new_tokens": 12, "stop_ids": ()}
    generations = SpeculativeDecoder(target, Drafter(model, target)).generate_batch(prompts(), **options)
    own = plain(target, prompts(), **options)
    verdicts = [compare(*pair, length, torch.bfloat16) for *pair, length in zip(generations, own, LENGTHS, strict=True)]
    assert set(verdicts) <= {"equal", "tie"}
    assert "equal" in verdicts


def test_a_cache_that_cannot_hold_several_rows_is_refused_and_one_row_is_not():
    target = target_of("qwen3")
    cache = DynamicCache(config=target.config)
    cache.layers[2] = DynamicIndexedLayer()
    rows = TargetRows(target, cache, [0])
    rows.forward(prompt_of()[None])
    assert join([rows]).lengths == [9]
    with pytest.raises(UserError, match=r"DynamicIndexedLayer.*--batch-size 1"):
        join([rows, rows])


def test_a_copy_of_rows_is_not_changed_by_what_the_original_sees_next():
    """What replaying after a block rests on: a cache that updates its state in place would break it."""
    target = target_of("hybrid")
    rows = TargetRows.empty(target)
    rows.forward(prompt_of()[None])
    copied = rows.select([0])
    expected = copied.select([0]).forward(torch.tensor([[7, 8]]))
    rows.forward(torch.tensor([[11, 12, 13]]))
    assert torch.equal(copied.forward(torch.tensor([[7, 8]])), expected)
    assert (rows.lengths, copied.lengths) == ([12], [11])
