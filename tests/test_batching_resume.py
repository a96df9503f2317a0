"""Positions: what a run that stopped anywhere sees when it goes on."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import contents, ids_of, walk
from plan_recipes import block_size, few, recipes, some_blocks, some_lengths

from ds_dflash.batching import BatchSampler, PlanSettings, Position, check_fingerprint
from ds_dflash.errors import UserError


def through_json(position: Position) -> Position:
    return Position.from_dict(json.loads(json.dumps(position.to_dict())))


@settings(deadline=None, max_examples=40)
@given(some_lengths, recipes(), few, few, some_blocks, st.integers(0, 30))
def test_a_resume_in_the_middle_of_an_epoch_sees_the_same_remaining_batches(lengths, recipe, ranks, rounds, rows, stop):
    with block_size(rows):
        sampler = BatchSampler(lengths, recipe, ranks=ranks, rounds=rounds)
        everything, end = walk(sampler, Position(1, ()))
        before, position = walk(sampler, Position(1, ()), stop)
        again = BatchSampler(lengths, recipe, ranks=ranks, rounds=rounds)
        after, last = walk(again, again.resume(through_json(position)))
        if position.epoch == 1:
            assert contents(before + after) == contents(everything)
            assert last == end
        else:
            assert contents(after) == contents(walk(sampler, Position(2, ()))[0])


@settings(deadline=None, max_examples=40)
@given(some_lengths, recipes(), some_blocks, st.integers(1, 8))
def test_a_resume_with_another_split_of_the_product_goes_on_as_if_nothing_had_happened(lengths, recipe, rows, stop):
    with block_size(rows):
        first = BatchSampler(lengths, recipe, ranks=2, rounds=3)
        second = BatchSampler(lengths, recipe, ranks=6, rounds=1)
        whole = contents(walk(first, first.start())[0])
        before, position = walk(first, first.start(), stop)
        assert second.resume(position) == position
        if position.epoch == 0:
            assert contents(before + walk(second, position)[0]) == whole


topologies = st.tuples(few, st.integers(1, 3), st.integers(0, 4))


@settings(deadline=None, max_examples=60)
@given(some_lengths, recipes(), some_blocks, st.lists(topologies, min_size=2, max_size=5))
def test_any_number_of_topologies_in_an_epoch_see_each_sample_once(lengths, recipe, rows, runs):
    with block_size(rows):
        position, seen = Position(0, ()), []
        for ranks, rounds, stop in runs:
            if position.epoch == 0:
                sampler = BatchSampler(lengths, recipe, ranks=ranks, rounds=rounds)
                updates, position = walk(sampler, sampler.resume(through_json(position)), stop)
                seen += ids_of(updates)
                assert all(ids_of([update]) for update in updates)
        if position.epoch == 0:
            sampler = BatchSampler(lengths, recipe, ranks=3, rounds=1)
            left = len(sampler.plan(position)) - position.update
            updates, position = walk(sampler, sampler.resume(position))
            assert len(updates) == left
            seen += ids_of(updates)
        assert sorted(seen) == list(range(len(lengths)))
        assert position.epoch == 1


def test_a_topology_that_did_nothing_leaves_no_trace():
    lengths = np.arange(1, 100)
    first, second = (BatchSampler(lengths, PlanSettings(token_budget=200), ranks=ranks, rounds=2) for ranks in (2, 3))
    _, position = walk(first, first.start(), 3)
    assert second.resume(position).segments == ((4, 3), (6, 0))
    assert first.resume(second.resume(position)) == position


def test_updates_of_an_epoch_count_on_from_an_earlier_topology():
    lengths = np.arange(1, 100)
    first, second = (BatchSampler(lengths, PlanSettings(token_budget=200), ranks=ranks, rounds=2) for ranks in (2, 3))
    _, position = walk(first, first.start(), 3)
    plan = second.plan(position)
    assert plan.first == second.resume(position).update == 3
    assert plan.position_after(3) == Position(0, ((4, 3), (6, 1)))
    with pytest.raises(AssertionError, match="earlier topology"):
        plan.update(2)


BASE = {"lengths": np.arange(1, 50), "seed": 0, "token_budget": 1000}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": np.arange(2, 51)}, "the lengths of the samples differ"),
        ({"lengths": np.arange(1, 51)}, "rows was 49 and is 50"),
        ({"seed": 7}, "seed was 0 and is 7"),
        ({"token_budget": 900}, "token_budget was 1000 and is 900"),
        ({"grouping": "sorted"}, "grouping was pooled and is sorted"),
        ({"grouping": "bucketed", "bucket_edges": (7, 20)}, "bucket_edges was None and is [7, 20]"),
    ],
)
def test_a_resume_with_other_samples_or_settings_is_refused_naming_the_difference(change, words):
    def fingerprint(lengths: np.ndarray, **recipe: object) -> dict[str, object]:
        return BatchSampler(lengths, PlanSettings(**recipe), ranks=2, rounds=2).fingerprint

    saved = json.loads(json.dumps(fingerprint(**BASE)))
    with pytest.raises(UserError, match=re.escape(words)) as refusal:
        check_fingerprint(saved, fingerprint(**(BASE | change)))
    for name in ("seed", "token_budget"):
        assert (name in str(refusal.value)) == (name in change)


def test_a_resume_on_other_ranks_and_rounds_is_welcome():
    recipe = PlanSettings(grouping="bucketed", num_buckets=3)
    saved = BatchSampler(np.arange(1, 50), recipe, ranks=2, rounds=2).fingerprint
    check_fingerprint(
        json.loads(json.dumps(saved)), BatchSampler(np.arange(1, 50), recipe, ranks=5, rounds=1).fingerprint
    )
