"""The limits of the design on its reference lengths, 902,087 of them."""

import runpy
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from plan_checks import TV_LIMITS, check_plan, groups_of, padded_tokens, shared_pairs, window_tv

from ds_dflash.batching import CLASSIC_EDGES, BatchSampler, PlanSettings, Position, samples
from ds_dflash.batching.edges import optimal_edges
from ds_dflash.batching.plan import EpochPlan
from ds_dflash.batching.statistics import EpochSurvey, LengthMix

BUDGET, RANKS, ROUNDS = 49_152, 7, 4
REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "reference_lengths.py"))


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    return REFERENCE["make"]()


@pytest.fixture(scope="module")
def plans(lengths: np.ndarray) -> list[EpochPlan]:
    sampler = BatchSampler(lengths, PlanSettings(token_budget=BUDGET), ranks=RANKS, rounds=ROUNDS)
    return [sampler.plan(Position(epoch, ())) for epoch in (0, 1)]


def test_the_default_plan_is_whole_and_within_the_budget(lengths, plans):
    for plan in plans:
        check_plan(lengths, plan.indices, plan.offsets, BUDGET, RANKS * ROUNDS)


def test_the_default_plan_pads_little_and_fills_lockstep_rounds(lengths, plans):
    for plan in plans:
        padded = padded_tokens(lengths, plan.indices, plan.offsets)
        assert lengths.sum() / padded.sum() >= 0.985
        assert lengths.sum() / (RANKS * padded.reshape(-1, RANKS).max(1).sum()) >= 0.975
        assert len(padded) <= 38_300


def test_updates_of_the_default_plan_mix_lengths_like_the_data(lengths, plans):
    for rounds, limits in TV_LIMITS.items():
        figures = window_tv(lengths, plans[0].indices, plans[0].offsets, rounds * RANKS)
        assert all(figure <= limit for figure, limit in zip(figures, limits, strict=True)), (rounds, figures)


def test_samples_of_the_default_plan_meet_others_in_the_next_epoch(plans):
    batches = [groups_of(plan.indices, plan.offsets) for plan in plans]
    pairs, samples_mean = shared_pairs(*batches)
    assert pairs <= 0.004
    assert samples_mean <= 0.0035
    updates = [groups_of(plan.indices, plan.offsets, RANKS * ROUNDS) for plan in plans]
    assert shared_pairs(*updates)[0] <= 0.0011


def test_an_epoch_is_planned_in_64_megabytes(lengths):
    sampler = BatchSampler(lengths, PlanSettings(token_budget=BUDGET), ranks=RANKS, rounds=ROUNDS)
    tracemalloc.start()
    try:
        assert len(sampler.plan(sampler.start())) > 0
        assert tracemalloc.get_traced_memory()[1] <= 64e6
    finally:
        tracemalloc.stop()


def test_the_optimal_edges_of_six_buckets(lengths):
    edges = optimal_edges(lengths, 6, BUDGET)
    assert np.allclose(edges, [784, 1344, 1952, 2704, 3520], rtol=0.01)


# padding efficiency, lockstep efficiency, pairs that meet again, window TV; shuffled's pairs by order of magnitude
TABLE = {
    "sorted": ({"grouping": "sorted", "ordering": "shuffled"}, 0.9999, 0.977, 1.0, 0.157),
    "shuffled": ({"grouping": "shuffled", "ordering": "shuffled"}, 0.478, 0.453, 1.1e-5, 0.050),
    "classic edges": (
        {"grouping": "bucketed", "ordering": "shuffled", "bucket_edges": CLASSIC_EDGES}, 0.843, 0.819, 2.7e-4, 0.158
    ),
    "32 edges": ({"grouping": "bucketed", "ordering": "shuffled", "num_buckets": 32}, 0.966, 0.941, 3.1e-3, 0.153),
    "pooled": ({}, 0.990, 0.979, 3.1e-3, 0.043),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_the_table_of_groupings(lengths, row):
    recipe, padding, lockstep, pairs, tv = row
    sampler = BatchSampler(lengths, PlanSettings(token_budget=BUDGET, **recipe), ranks=RANKS, rounds=ROUNDS)
    mix, before = LengthMix.of(sampler), None
    for epoch in (0, 1):
        survey = EpochSurvey(sampler, mix, before)
        assert sum(1 for _ in survey.follow(sampler.plan(Position(epoch, ())).dispatches())) == 1
        before = survey.tracked
    figures = survey.figures()
    assert figures.padding_efficiency == pytest.approx(padding, rel=0.01)
    assert figures.lockstep_efficiency == pytest.approx(lockstep, rel=0.01)
    assert figures.window_tv == pytest.approx(tv, rel=0.05)
    assert figures.pairs_that_meet_again == pytest.approx(pairs, rel=0.5 if pairs < 1e-4 else 0.1)


@pytest.mark.slow
def test_ten_million_samples_are_planned_in_blocks_and_bounded_memory():
    lengths = REFERENCE["draw"](samples.BLOCKS_FROM_ROWS + 3)
    seen = np.zeros(len(lengths), bool)
    tracemalloc.start()
    try:
        sampler = BatchSampler(lengths, PlanSettings(token_budget=BUDGET), ranks=RANKS, rounds=ROUNDS)
        plan = sampler.plan(sampler.start())
        blocks = padded = 0
        for dispatch in plan.dispatches():
            assert not seen[dispatch.indices].any()
            seen[dispatch.indices] = True
            padded += int((np.diff(dispatch.offsets) * dispatch.longest).sum())
            blocks += 1
        assert tracemalloc.get_traced_memory()[1] <= 160e6
    finally:
        tracemalloc.stop()
    assert seen.all()
    assert blocks == 10
    assert lengths.sum(dtype=np.int64) / padded >= 0.985
