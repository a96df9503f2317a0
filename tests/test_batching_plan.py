"""What holds for the plan of any epoch, of any samples, on any topology."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from plan_checks import check_plan, contents, ids_of, walk
from plan_recipes import BUDGET, EVERY_RECIPE, block_size, epochs, few, recipes, some_blocks, some_lengths

from ds_dflash.batching import CLASSIC_EDGES, GROUPINGS, BatchSampler, PlanSettings, Position
from ds_dflash.errors import UserError


@settings(deadline=None, max_examples=100)
@given(some_lengths, recipes(), few, few, epochs, some_blocks)
def test_every_sample_is_in_exactly_one_micro_batch_within_the_budget(lengths, recipe, ranks, rounds, epoch, rows):
    with block_size(rows):
        plan = BatchSampler(lengths, recipe, ranks=ranks, rounds=rounds).plan(Position(epoch, ()))
        check_plan(lengths, plan.indices, plan.offsets, recipe.token_budget, ranks * rounds)
        assert np.diff(plan.offsets).max() <= (recipe.max_batch_size or len(lengths))
        assert plan.indices.dtype == np.int32
        assert plan.offsets.dtype == np.int64


@settings(deadline=None, max_examples=50)
@given(some_lengths, recipes(), few, few, epochs, some_blocks)
def test_the_length_of_a_plan_is_what_it_yields(lengths, recipe, ranks, rounds, epoch, rows):
    with block_size(rows):
        sampler = BatchSampler(lengths, recipe, ranks=ranks, rounds=rounds)
        updates, position = walk(sampler, Position(epoch, ()))
        plan = sampler.plan(Position(epoch, ()))
        assert len(updates) == len(plan) == plan.num_updates == sampler.count_updates(epoch)
        assert len(plan.offsets) - 1 == len(updates) * ranks * rounds
        assert position == Position(epoch + 1, ((ranks * rounds, 0),))
        with pytest.raises(IndexError):
            plan.update(len(plan))


@settings(deadline=None, max_examples=40)
@given(some_lengths, recipes(), few, few, epochs, some_blocks)
def test_updates_are_the_micro_batches_of_the_saved_form_in_dispatch_order(lengths, recipe, ranks, rounds, epoch, rows):
    with block_size(rows):
        plan = BatchSampler(lengths, recipe, ranks=ranks, rounds=rounds).plan(Position(epoch, ()))
        micro_batches = np.split(plan.indices, plan.offsets[1:-1])
        for number in range(len(plan)):
            update = plan.update(number)
            assert [len(turn) for turn in update] == [ranks] * rounds
            for turn in range(rounds):
                for rank in range(ranks):
                    place = (number * rounds + turn) * ranks + rank
                    assert update[turn][rank].tolist() == micro_batches[place].tolist()


@settings(deadline=None, max_examples=40)
@given(some_lengths, recipes(), few, few, some_blocks)
def test_every_rank_computes_the_same_plan(lengths, recipe, ranks, rounds, rows):
    with block_size(rows):
        first, second = (BatchSampler(kind(lengths), recipe, ranks=ranks, rounds=rounds) for kind in (np.array, widen))
        second.count_updates(0)  # what one rank looked at before does not matter
        for epoch in (0, 1):
            ours, theirs = first.plan(Position(epoch, ())), second.plan(Position(epoch, ()))
            assert ours.indices.tobytes() == theirs.indices.tobytes()
            assert ours.offsets.tobytes() == theirs.offsets.tobytes()
        assert first.fingerprint == second.fingerprint


def widen(lengths: np.ndarray) -> np.ndarray:
    """The same numbers as another integer type."""
    return lengths.astype(np.int64)


@settings(deadline=None, max_examples=40)
@given(some_lengths, recipes(), epochs, some_blocks)
def test_an_update_holds_the_same_micro_batches_on_every_split_of_a_product(lengths, recipe, epoch, rows):
    with block_size(rows):
        splits = [BatchSampler(lengths, recipe, ranks=ranks, rounds=6 // ranks) for ranks in (1, 2, 3, 6)]
        first, *others = [contents(walk(sampler, Position(epoch, ()))[0]) for sampler in splits]
        for other in others:
            assert other == first


@pytest.mark.parametrize("grouping", ["pooled", "bucketed", "shuffled"])
@pytest.mark.parametrize("rows", [None, 1024])
def test_another_epoch_or_seed_has_other_batches(grouping, rows):
    lengths = np.arange(6000) % BUDGET + 1  # in pools of 1024

    def batches(epoch: int, seed: int) -> set[tuple[int, ...]]:
        sampler = BatchSampler(lengths, PlanSettings(token_budget=400, grouping=grouping, seed=seed), ranks=2, rounds=2)
        updates, _ = walk(sampler, Position(epoch, ()))
        return {batch for update in contents(updates) for batch in update if len(batch) > 1}

    with block_size(rows):
        plans = [batches(0, 0), batches(1, 0), batches(2, 0), batches(0, 1)]
        for number, plan in enumerate(plans):
            for other in plans[:number]:
                assert len(plan & other) < len(plan) / 4


def test_sorted_has_the_same_batches_in_another_order_every_epoch():
    sampler = BatchSampler(np.arange(1, 200), PlanSettings(token_budget=400, grouping="sorted"), ranks=1, rounds=1)
    first, second = (contents(walk(sampler, Position(epoch, ()))[0]) for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_plan_is_the_same_on_every_machine_and_numpy():
    lengths = np.arange(5000, dtype=np.int64) ** 2 % 7919 + 1
    digests = []
    for grouping, rows in (("pooled", None), ("bucketed", None), ("shuffled", 1000)):
        with block_size(rows):
            recipe = PlanSettings(grouping=grouping, bucket_edges=CLASSIC_EDGES, seed=3)
            plan = BatchSampler(lengths, recipe, ranks=3, rounds=2).plan(Position(1, ()))
            digests.append(hashlib.sha256(plan.indices.tobytes() + plan.offsets.tobytes()).hexdigest()[:16])
    assert digests == ["1298b4b7427d5563", "573ac2b47ccaf3cd", "004ef664f65c9783"]


@pytest.mark.parametrize(("grouping", "ordering"), EVERY_RECIPE)
@pytest.mark.parametrize("count", [1, 6, 7, 8])
@pytest.mark.parametrize("rounds", [1, 4])
def test_fewer_samples_than_micro_batches_are_all_trained(grouping, ordering, count, rounds):
    lengths = np.arange(1, count + 1)
    sampler = BatchSampler(lengths, PlanSettings(grouping=grouping, ordering=ordering), ranks=7, rounds=rounds)
    updates, _ = walk(sampler, sampler.start())
    assert sorted(ids_of(updates)) == list(range(count))
    assert len(updates) == 1
    assert all(ids_of([update]) for update in updates)


ODD_LENGTHS = {
    "all equal": np.full(500, 100),
    "only 100s and 8000s": np.tile([100, 8000], 300),
    "one outlier": np.append(np.full(700, 50), 8000),
    "all as long as the budget": np.full(30, 8192),
    "all of length 1": np.ones(3000, np.int64),
}


@pytest.mark.parametrize(("grouping", "ordering"), EVERY_RECIPE)
@pytest.mark.parametrize("lengths", ODD_LENGTHS.values(), ids=ODD_LENGTHS.keys())
def test_odd_lengths_make_a_plan(lengths, grouping, ordering):
    recipe = PlanSettings(token_budget=8192, grouping=grouping, ordering=ordering)
    plan = BatchSampler(lengths, recipe, ranks=7, rounds=4).plan(Position(0, ()))
    check_plan(lengths, plan.indices, plan.offsets, 8192, 28)


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_a_cap_of_one_sample_gives_each_its_own_micro_batch(grouping):
    recipe = PlanSettings(grouping=grouping, max_batch_size=1)
    plan = BatchSampler(np.arange(1, 100), recipe, ranks=7, rounds=1).plan(Position(0, ()))
    assert sorted(np.diff(plan.offsets).tolist()) == [0] * (-99 % 7) + [1] * 99


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize(("oversize", "dropped", "truncated"), [("drop", [2, 5], 0), ("truncate", [2], 1)])
def test_empty_and_oversize_samples_are_dropped_or_truncated_and_counted(rows, oversize, dropped, truncated):
    lengths = np.array([10, 20, 0, 40, 50, 101, 100])
    with block_size(rows):
        recipe = PlanSettings(token_budget=100, oversize=oversize)
        sampler = BatchSampler(lengths, recipe, ranks=2, rounds=1)
        plan = sampler.plan(sampler.start())
        assert sorted(plan.indices.tolist()) == [row for row in range(7) if row not in dropped]
        long = len(dropped) - 1
        assert sampler.accounting == {
            "rows": 7, "kept": 7 - len(dropped), "empty": 1, "too_long": long, "truncated": truncated
        }  # fmt: skip
        longest = sampler.lengths_of(np.arange(7))
        assert longest.max() == 100
        batches = np.split(plan.indices, plan.offsets[1:-1])
        assert all(len(batch) * longest[batch].max(initial=0) <= 100 for batch in batches)


def test_blocks_are_random_parts_of_all_samples_new_ones_every_epoch():
    lengths = np.ones(20_000, np.int64)
    with block_size(5000):
        sampler = BatchSampler(lengths, PlanSettings(token_budget=100), ranks=1, rounds=1)
        first, second = (next(sampler.plan(Position(epoch, ())).dispatches()).indices for epoch in (0, 1))
    assert len(first) == len(second) == 5000
    for quarter in np.histogram(first, 4, (0, 20_000))[0]:
        assert abs(quarter - 1250) < 150
    assert abs(len(np.intersect1d(first, second)) - 1250) < 150


def test_blocks_of_which_nothing_is_kept_are_passed_over():
    lengths = np.zeros(100, np.int64)
    lengths[[3, 50]] = 5
    with block_size(10):
        for grouping in GROUPINGS:
            sampler = BatchSampler(lengths, PlanSettings(grouping=grouping), ranks=2, rounds=1)
            updates, position = walk(sampler, sampler.start())
            assert sorted(ids_of(updates)) == [3, 50]
            assert sampler.plan(sampler.start()).heaviest().tolist() in ([3], [50], [3, 50], [50, 3])
            assert position.epoch == 1


@pytest.mark.parametrize(
    ("lengths", "recipe", "words"),
    [
        ([], {}, ["nothing to train on", "0 samples"]),
        ([0, 0], {}, ["nothing to train on", "2 of them of length 0"]),
        ([5, -1], {}, ["-1", "negative"]),
        ([[5]], {}, ["[1, 1]", "integers [rows]"]),
        ([5.0], {}, ["float64"]),
        ([200, 120, 0], {}, ["token_budget is 100", "120 tokens"]),
        ([200, 120], {"oversize": "drop"}, ["token_budget is 100", "120 tokens"]),
        ([200, 50, 130], {"oversize": "error"}, ["2 samples", "token_budget 100", "200 tokens"]),
    ],
)
def test_samples_that_cannot_be_planned_are_refused_in_one_sentence(lengths, recipe, words):
    array = np.array(lengths) if lengths else np.zeros(0, np.int32)
    with pytest.raises(UserError) as refusal:
        BatchSampler(array, PlanSettings(token_budget=100, **recipe), ranks=2, rounds=1)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"token_budget": 0}, ["token_budget is 0"]),
        ({"max_batch_size": 0}, ["max_batch_size is 0"]),
        ({"grouping": "poled"}, ["'poled'", "pooled, bucketed, shuffled, sorted"]),
        ({"ordering": "sorted"}, ["'sorted'", "stratified, shuffled"]),
        ({"oversize": "cut"}, ["'cut'", "truncate, drop, error"]),
        ({"num_buckets": 0}, ["num_buckets is 0"]),
        ({"bucket_edges": (10, 10)}, ["10 is followed by 10"]),
        ({"bucket_edges": ()}, ["at least one edge"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"quadratic_share": -0.1}, ["quadratic_share is -0.1"]),
    ],
)
def test_settings_that_cannot_hold_are_refused_in_one_sentence(wrong, words):
    with pytest.raises(UserError) as refusal:
        PlanSettings(**wrong)
    for word in words:
        assert word in str(refusal.value)


def test_the_heaviest_micro_batch_has_most_padded_tokens():
    lengths = np.random.default_rng(0).integers(1, 500, 1000)
    sampler = BatchSampler(lengths, PlanSettings(token_budget=1000, grouping="shuffled"), ranks=3, rounds=2)
    plan = sampler.plan(sampler.start())
    batches = [batch for update in walk(sampler, sampler.start())[0] for turn in update for batch in turn]
    heaviest = plan.heaviest()
    assert len(heaviest) * lengths[heaviest].max() == max(len(batch) * lengths[batch].max() for batch in batches)


def test_the_first_block_estimates_the_updates_of_all():
    lengths = np.random.default_rng(0).integers(1, 100, 5000)
    with block_size(500):
        sampler = BatchSampler(lengths, PlanSettings(token_budget=1000), ranks=2, rounds=1)
        assert abs(sampler.estimate_updates(0) / sampler.count_updates(0) - 1) < 0.05
    sampler = BatchSampler(lengths, PlanSettings(token_budget=1000), ranks=2, rounds=1)
    assert sampler.estimate_updates(0) == sampler.count_updates(0)
