"""The learning-rate curve over a number of updates that changes while training."""

import json

import numpy as np
import pytest

from ds_dflash.schedule import ProgressCurve, multiplier


def multipliers(totals, schedule="cosine", warmup_ratio=0.04, min_lr_ratio=0.0):
    """What updates 1, 2, ... get, where before update u the run is estimated at totals[u - 1] updates."""
    curve, values = ProgressCurve(), []
    for done, total in enumerate(totals):
        curve.set_total(done, total)
        values.append(multiplier(curve.at(done + 1), schedule, warmup_ratio, min_lr_ratio))
    return values


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
def test_the_last_update_gets_exactly_the_lowest_rate(schedule, min_lr_ratio):
    for totals in ([100] * 100, [100] * 30 + [180] * 150, [100] * 30 + [57] * 27, [1], [2, 2]):
        assert multipliers(totals, schedule, min_lr_ratio=min_lr_ratio)[-1] == min_lr_ratio


def test_without_a_change_the_curve_is_the_textbook_one():
    values = multipliers([200] * 200, "linear", warmup_ratio=0.25, min_lr_ratio=0.2)
    assert values[:50] == pytest.approx([update / 50 for update in range(1, 51)])
    assert values[50:] == pytest.approx([0.2 + 0.8 * (200 - update) / 150 for update in range(51, 201)])
    cosine = multipliers([200] * 200, "cosine", warmup_ratio=0.0)
    assert cosine[99] == pytest.approx(0.5)
    assert cosine[49] == pytest.approx(0.5 + 0.5**1.5)


def test_a_constant_schedule_stays_at_the_full_rate_after_its_warmup():
    assert multipliers([100] * 100, "constant", warmup_ratio=0.1)[9:] == [1.0] * 91


def test_without_a_warmup_the_first_update_has_nearly_the_full_rate():
    assert multipliers([1000] * 1000, "linear", warmup_ratio=0.0)[0] == pytest.approx(0.999)


@pytest.mark.parametrize(
    "totals",
    [
        [200] * 100 + [400] * 300,
        [400] * 100 + [200] * 100,
        [300 + update * 37 % 11 for update in range(300)],
        [200] * 5 + [300] * 100 + [150] * 45,
    ],
    ids=["longer", "shorter", "noisy", "in_the_warmup"],
)
def test_a_change_of_the_estimate_moves_nothing_and_sets_an_even_pace_to_the_end(totals):
    curve = ProgressCurve()
    for done, total in enumerate(totals):
        before = curve.at(done) if done else 0.0
        curve.set_total(done, total)
        assert curve.at(done) == pytest.approx(before, abs=1e-12)
        assert curve.at(done + 1) - before == pytest.approx((1 - before) / (total - done))
        assert curve.at(total) == 1.0


def test_the_curve_goes_on_after_json_as_if_nothing_had_happened():
    totals = [120] * 40 + [150] * 30 + [90] * 20
    curve, values = ProgressCurve(), []
    for done, total in enumerate(totals):
        curve = ProgressCurve.from_json(json.loads(json.dumps(curve.to_json())))
        curve.set_total(done, total)
        values.append(multiplier(curve.at(done + 1), "cosine", 0.04, 0.0))
    assert values == multipliers(totals)


def test_a_finished_run_that_is_made_longer_leaves_the_floor():
    values = multipliers([100] * 100 + [200] * 100)
    assert values[99] == 0.0
    assert values[100] == pytest.approx(0.5, abs=0.1)  # about where a run of 200 stands in its middle
    assert values[199] == 0.0
    assert max(values[101:]) <= values[100]


def test_a_run_cut_off_by_its_estimate_ends_at_the_lowest_rate_and_stays_there():
    curve = ProgressCurve()
    curve.set_total(0, 10)
    assert [curve.at(update) for update in (0, 5, 10, 11)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_epochs_that_vary_by_a_fifth_give_a_rate_without_jumps_that_ends_at_the_floor(schedule):
    """Each epoch's number of updates is known at its start only, and stands in for the later ones until then."""
    counts = [100, 120, 96, 115]
    curve, rates = ProgressCurve(), []
    for epoch, count in enumerate(counts):
        total = sum(counts[:epoch]) + count * (len(counts) - epoch)
        for _ in range(count):
            curve.set_total(len(rates), total)
            rates.append(multiplier(curve.at(len(rates) + 1), schedule, 0.04, 0.1))
    assert len(curve.segments) == len(counts)
    steepest_in_one_piece = np.pi / 2 * 0.9 / 0.96 / sum(counts) * (1 if schedule == "cosine" else 2 / np.pi)
    falling = -np.diff(rates)[20:]
    assert falling.min() > 0
    assert falling.max() < 2.0 * steepest_in_one_piece
    assert rates[-1] == pytest.approx(0.1)
    assert rates[-2] > 0.1
