"""Ordering: which update, round and rank each micro-batch goes to.

First windows (the micro-batches of one update, a function of their number alone), then rounds and ranks inside each
window, from a random stream of their own: how an update splits into rounds and ranks never changes its content.
The cost is a few sorts of the micro-batches, negligible beside the grouping.
"""

import numpy as np

from ds_dflash.batching.streams import Stream

LARGEST_DEPTH = 4


def shuffled_windows(count: int, product: int, stream: Stream) -> np.ndarray:
    """All micro-batches in random order, cut into windows: int [windows, product]."""
    return stream.orders(count).reshape(-1, product)


def stratified_windows(longest: np.ndarray, product: int, stream: Stream) -> np.ndarray:
    """Windows in which every stratum of length appears in proportion: int [windows, product].

    longest: int [micro-batches], a multiple of `product`. The micro-batches are ranked by their longest sample and
    cut into product * 2^depth strata; a super-window takes one of each, and is halved `depth` times, of each
    adjacent pair one member at random to each half. What does not fill super-windows is taken evenly from all
    ranks and forms windows of its own, inserted between two super-windows.
    """
    count = len(longest)
    order = stream.orders(count)  # random ties
    ranking = order[np.argsort(longest[order], kind="stable")]
    depth = min(LARGEST_DEPTH, (count // product).bit_length() - 1)
    leftover = count % (product << depth)
    aside = np.zeros(count, bool)
    if leftover:
        first = stream.below(count)
        aside[(first + np.arange(leftover) * count // leftover) % count] = True
    windows = _deal(ranking[~aside], product, depth, stream)
    if not leftover:
        return windows
    boundary = stream.below((len(windows) >> depth) + 1) << depth
    return np.insert(windows, boundary, _deal(ranking[aside], product, 0, stream), axis=0)


def _deal(ranking: np.ndarray, product: int, depth: int, stream: Stream) -> np.ndarray:
    strata = product << depth
    decks = ranking.reshape(strata, -1)
    dealt = np.take_along_axis(decks, stream.orders(*decks.shape), axis=1).T
    for _ in range(depth):
        pairs = dealt.reshape(len(dealt), -1, 2)
        swapped = stream.coins(*pairs.shape[:2])
        halves = np.where(swapped[..., None], pairs[..., ::-1], pairs)
        dealt = halves.transpose(0, 2, 1).reshape(2 * len(dealt), -1)
    return dealt


def balanced_rounds(windows: np.ndarray, cost: np.ndarray, ranks: int, stream: Stream) -> np.ndarray:
    """Sort each window by cost, cut it into rounds, shuffle the rounds, assign the ranks of each at random.

    windows: int [windows, rounds * ranks]; cost: float [micro-batches]. Returns the micro-batches in dispatch order.
    """
    shape = (len(windows), windows.shape[1] // ranks, ranks)
    by_cost = np.take_along_axis(windows, np.argsort(cost[windows], axis=1, kind="stable"), axis=1).reshape(shape)
    rounds = np.take_along_axis(by_cost, stream.orders(*shape[:2])[..., None], axis=1)
    return np.take_along_axis(rounds, stream.orders(*shape), axis=2).reshape(-1)
