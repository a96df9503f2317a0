"""The figures of a plan, against their definitions written out."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_checks import groups_of, padded_tokens, shared_pairs

from ds_dflash.batching import BatchSampler, PlanSettings, Position, statistics
from ds_dflash.batching.statistics import EpochSurvey, LengthMix, pairs_that_meet_again


def survey_epochs(sampler: BatchSampler, count: int) -> list[statistics.EpochFigures]:
    mix, before, figures = LengthMix.of(sampler), None, []
    for epoch in range(count):
        survey = EpochSurvey(sampler, mix, before)
        assert sum(1 for _ in survey.follow(sampler.plan(Position(epoch, ())).dispatches())) >= 1
        before = survey.tracked
        figures.append(survey.figures())
    return figures


@pytest.fixture
def lengths() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 2000, 4000)


@pytest.mark.parametrize("grouping", ["pooled", "shuffled"])
def test_efficiencies_follow_their_definitions(lengths, grouping):
    sampler = BatchSampler(lengths, PlanSettings(token_budget=8000, grouping=grouping), ranks=3, rounds=4)
    plan = sampler.plan(sampler.start())
    [figures] = survey_epochs(sampler, 1)
    padded = padded_tokens(lengths, plan.indices, plan.offsets)
    slowest = [max(padded[start : start + 3]) for start in range(0, len(padded), 3)]
    assert figures.tokens == lengths.sum()
    assert figures.samples == len(lengths)
    assert figures.padded_tokens == padded.sum()
    assert figures.padding_efficiency == lengths.sum() / padded.sum()
    assert figures.lockstep_efficiency == lengths.sum() / (3 * sum(slowest))
    assert figures.micro_batches == len(padded)
    assert figures.updates == len(padded) // 12 == len(plan)
    assert figures.pairs_that_meet_again is None


def test_window_tv_follows_its_definition(lengths):
    sampler = BatchSampler(lengths, PlanSettings(token_budget=8000), ranks=3, rounds=4)
    edges = [0, *np.quantile(lengths, np.arange(1, 6) / 6, method="inverted_cdf"), 10_000]
    whole = np.histogram(lengths, edges, weights=lengths)[0] / lengths.sum()
    plan, distances = sampler.plan(sampler.start()), []
    for number in range(len(plan)):
        window = lengths[np.concatenate([batch for turn in plan.update(number) for batch in turn])]
        distances.append(np.abs(np.histogram(window, edges, weights=window)[0] / window.sum() - whole).sum() / 2)
    # the data's own sextiles differ from the quantiles here by a token at most
    assert survey_epochs(sampler, 1)[0].window_tv == pytest.approx(np.mean(distances), rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20))
def test_pairs_that_meet_again_are_counted_pair_by_pair(batches):
    before, now = np.array(batches).T
    pairs = [(i, j) for i, j in itertools.combinations(range(len(batches)), 2) if before[i] == before[j]]
    again = [(i, j) for i, j in pairs if now[i] == now[j]]
    assert pairs_that_meet_again(before, now) == (len(again) / len(pairs) if pairs else 0.0)


def test_the_survey_follows_pairs_from_epoch_to_epoch(lengths):
    sampler = BatchSampler(lengths, PlanSettings(token_budget=8000), ranks=3, rounds=4)
    first, second = (sampler.plan(Position(epoch, ())) for epoch in (0, 1))
    expected, _ = shared_pairs(*(groups_of(plan.indices, plan.offsets) for plan in (first, second)))
    assert survey_epochs(sampler, 2)[1].pairs_that_meet_again == pytest.approx(expected)


def test_pairs_of_large_data_are_estimated_from_some_micro_batches(lengths, monkeypatch):
    lengths = np.tile(lengths, 5)
    sampler = BatchSampler(lengths, PlanSettings(token_budget=16_000), ranks=1, rounds=1)
    exact = survey_epochs(sampler, 2)[1].pairs_that_meet_again
    monkeypatch.setattr(statistics, "TRACKED_SAMPLES", 7000)
    assert survey_epochs(sampler, 2)[1].pairs_that_meet_again == pytest.approx(exact, rel=0.2)
    survey = EpochSurvey(sampler, LengthMix.of(sampler))
    assert sum(1 for _ in survey.follow(sampler.plan(sampler.start()).dispatches())) == 1
    assert 5000 < len(survey.tracked.ids) < 8000


def test_sorted_batches_meet_again_entirely():
    sampler = BatchSampler(np.arange(1, 400), PlanSettings(token_budget=2000, grouping="sorted"), ranks=2, rounds=1)
    assert survey_epochs(sampler, 3)[2].pairs_that_meet_again == 1.0


def test_the_mix_of_equal_lengths_is_the_same_everywhere():
    sampler = BatchSampler(np.full(100, 30), PlanSettings(token_budget=300), ranks=2, rounds=1)
    assert survey_epochs(sampler, 1)[0].window_tv == 0.0


def test_dropped_samples_are_in_no_figure():
    lengths = np.array([0, 500, 20, 30, 0])
    sampler = BatchSampler(lengths, PlanSettings(token_budget=100, oversize="drop"), ranks=1, rounds=1)
    mix = LengthMix.of(sampler)
    assert np.flatnonzero(mix.histogram).tolist() == [20, 30]
    assert survey_epochs(sampler, 1)[0].tokens == 50
