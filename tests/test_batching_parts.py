"""The parts of a plan, each for itself: packing, filling up, windows, rounds, edges, permutation, streams."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dflash.batching import grouping
from ds_dflash.batching.edges import optimal_edges
from ds_dflash.batching.grouping import fill_updates, group, longest_of, pack, pool_size
from ds_dflash.batching.ordering import balanced_rounds, shuffled_windows, stratified_windows
from ds_dflash.batching.permutation import IndexPermutation
from ds_dflash.batching.settings import CLASSIC_EDGES, PlanSettings
from ds_dflash.batching.streams import PlanKey


def stream(name="grouping", epoch=0):
    return PlanKey(seed=5, epoch=epoch).stream(name)


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.sets(st.integers(0, 60)), st.integers(1, 9))
def test_greedy_packing_takes_samples_while_they_fit(capacities, cuts, chunk):
    whole = grouping.PACK_CHUNK
    grouping.PACK_CHUNK = chunk
    try:
        offsets = pack(np.array(capacities), np.array(sorted(cuts), np.int64)).tolist()
    finally:
        grouping.PACK_CHUNK = whole
    assert offsets[0] == 0
    assert offsets[-1] == len(capacities)
    for start, end in itertools.pairwise(offsets):
        assert 1 <= end - start <= min(capacities[start:end])
        assert not cuts & set(range(start + 1, end))
        fits_one_more = end < len(capacities) and end - start + 1 <= min(capacities[start : end + 1])
        assert not fits_one_more or end in cuts


def halve_by_the_book(sizes: list[int], product: int) -> list[int]:
    sizes = list(sizes)
    while len(sizes) % product and max(sizes) > 1:
        largest = sizes.index(max(sizes))
        sizes[largest : largest + 1] = [-(-sizes[largest] // 2), sizes[largest] // 2]
    return sizes + [0] * (-len(sizes) % product)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 40))
def test_the_largest_micro_batches_are_halved_until_updates_are_whole(sizes, product):
    offsets = fill_updates(np.append(0, np.cumsum(sizes)), product)
    assert np.diff(offsets).tolist() == halve_by_the_book(sizes, product)


def test_an_empty_micro_batch_has_length_zero():
    assert longest_of(np.array([3, 9, 2]), np.array([0, 0, 2, 2, 3, 3])).tolist() == [0, 9, 0, 2, 0]


@pytest.mark.parametrize(("count", "size"), [(1, 1024), (131_071, 1024), (300_000, 2343), (902_087, 4096)])
def test_a_pool_is_a_128th_of_the_samples_within_bounds(count, size):
    assert pool_size(count) == size


def test_pools_rise_and_fall_in_turn():
    lengths = np.random.default_rng(0).integers(1, 1000, 3000).astype(np.int32)
    order, ordered, _ = group(lengths, PlanSettings(grouping="pooled"), (), stream())
    assert (ordered == lengths[order]).all()
    first, second, third = np.split(ordered, [1024, 2048])
    assert (np.diff(first) >= 0).all()
    assert (np.diff(second) <= 0).all()
    assert (np.diff(third) >= 0).all()


def test_no_micro_batch_crosses_a_bucket_edge():
    lengths = np.random.default_rng(0).integers(1, 8000, 5000).astype(np.int32)
    _, ordered, offsets = group(lengths, PlanSettings(grouping="bucketed"), CLASSIC_EDGES, stream())
    for batch in np.split(ordered, offsets[1:-1]):
        assert len(np.unique(np.searchsorted(CLASSIC_EDGES, batch, "right"))) == 1


@pytest.mark.parametrize("windows", [1, 3, 16, 21, 100])
@pytest.mark.parametrize("product", [1, 6, 28])
def test_stratified_windows_hold_every_micro_batch_once(windows, product):
    longest = np.random.default_rng(1).integers(1, 50, windows * product)
    dealt = stratified_windows(longest, product, stream("windows"))
    assert dealt.shape == (windows, product)
    assert sorted(dealt.reshape(-1).tolist()) == list(range(windows * product))


def test_every_stratum_of_length_is_in_every_window_once():
    product, windows = 6, 64
    longest = np.random.default_rng(1).permutation(product * windows)
    dealt = stratified_windows(longest, product, stream("windows"))
    for window in dealt:
        assert sorted(longest[window] // windows) == list(range(product))


def test_leftover_windows_have_all_lengths_too():
    product, windows = 8, 16 * 3 + 5
    longest = np.random.default_rng(1).permutation(product * windows)
    dealt = stratified_windows(longest, product, stream("windows"))
    for window in dealt:
        strata = np.sort(longest[window]) / windows
        assert np.abs(strata - (np.arange(product) + 0.5)).max() < 1.5


def test_rounds_are_cut_from_the_cost_order_of_their_window():
    cost = np.random.default_rng(2).random(120)
    windows = shuffled_windows(120, 12, stream("windows"))
    dispatch = balanced_rounds(windows, cost, 3, stream("rounds")).reshape(10, 4, 3)
    assert [sorted(window.reshape(-1)) for window in dispatch] == [sorted(window) for window in windows]
    for window in dispatch:
        by_cost = sorted(cost[turn].tolist() for turn in window)
        for lower, higher in itertools.pairwise(by_cost):
            assert max(lower) <= min(higher)
    positions = np.argsort(np.argsort(cost[dispatch].max(2), axis=1), axis=1)
    assert len({tuple(row) for row in positions.tolist()}) > 5  # rounds are not in the order of cost
    assert len({tuple(np.argsort(cost[turn]).tolist()) for window in dispatch for turn in window}) == 6


@given(st.integers(1, 3000), st.integers(0, 2**60))
def test_the_index_permutation_is_one(count, seed):
    images = IndexPermutation(count, np.random.SeedSequence(seed))(np.arange(count))
    assert sorted(images.tolist()) == list(range(count))


def test_slices_of_an_index_permutation_look_random():
    count, block = 1_000_003, 50_000
    first, second = (IndexPermutation(count, np.random.SeedSequence(seed)) for seed in (1, 2))
    ids = first(np.arange(block))
    # means and overlaps of random blocks, within five standard deviations
    assert abs(ids.mean() - count / 2) < 5 * count / np.sqrt(12 * block)
    expected = block * block / count
    overlap = len(np.intersect1d(ids, second(np.arange(block))))
    assert abs(overlap - expected) < 5 * np.sqrt(expected)
    neighbours = np.abs(np.diff(ids)) / count  # of two uniform numbers: mean 1/3, variance 1/18
    assert abs(neighbours.mean() - 1 / 3) < 5 / np.sqrt(18 * block / 2)
    assert np.bincount(ids % 7).max() < 1.05 * block / 7


def test_random_orders_are_permutations_and_uniform():
    orders = stream().orders(6000, 3)
    assert (np.sort(orders, axis=1) == np.arange(3)).all()
    counts = np.unique(orders @ [9, 3, 1], return_counts=True)[1]
    assert len(counts) == 6
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_streams_of_other_names_epochs_blocks_and_generations_differ():
    keys = [PlanKey(0, 0), PlanKey(1, 0), PlanKey(0, 1), PlanKey(0, 0, 1), PlanKey(0, 0, 0, 1)]
    drawn = [key.stream(name).raw(1).item() for key in keys for name in ("grouping", "windows", "rounds")]
    assert len(set(drawn)) == 15


def padded_when_bucketed(lengths: np.ndarray, edges: tuple[int, ...], budget: int) -> float:
    """Expected padded tokens by definition: count * E[longest of n draws], n * that = budget, n by bisection."""
    total = 0.0
    for bucket in np.split(np.sort(lengths), np.searchsorted(np.sort(lengths), edges)):
        values, counts = np.unique(bucket, return_counts=True)
        share = np.cumsum(counts) / len(bucket)
        low, high = 1.0, float(budget)
        for _ in range(60):
            draws = (low + high) / 2
            expected = values @ np.diff(share**draws, prepend=0)
            low, high = (draws, high) if draws * expected < budget else (low, draws)
        total += len(bucket) * expected
    return total


def test_optimal_edges_are_those_of_an_exhaustive_search():
    lengths = np.random.default_rng(3).choice([5, 6, 20, 22, 50, 80, 90], 400)
    found = optimal_edges(lengths, 3, 1000)
    every = itertools.combinations(sorted(set(lengths.tolist()))[1:], 2)
    assert found == min(every, key=lambda edges: padded_when_bucketed(lengths, edges, 1000))


def test_optimal_edges_pad_less_than_quantiles():
    lengths = np.random.default_rng(3).gamma(2.0, 800, 50_000).astype(np.int32) + 1
    quantiles = tuple(np.quantile(lengths, np.arange(1, 6) / 6).astype(int).tolist())
    optimal = optimal_edges(lengths, 6, 50_000)
    assert padded_when_bucketed(lengths, optimal, 50_000) < padded_when_bucketed(lengths, quantiles, 50_000)


@pytest.mark.parametrize(("lengths", "edges"), [([5] * 9, ()), ([7], ()), ([100, 8000] * 50, (8000,))])
def test_fewer_distinct_lengths_than_buckets_make_fewer_buckets(lengths, edges):
    assert optimal_edges(np.array(lengths), 6, 49_152) == edges
