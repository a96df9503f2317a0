"""Bucket edges that minimise the expected padded tokens of the data, by dynamic programming.

The padded tokens of a bucket are count * M_n, where M_n = E[longest of n draws from the bucket] and n solves
n * M_n = token_budget. Edges are sought on a grid of at most 256 lengths (half of them quantiles, half evenly
spaced), with at most 2^20 samples; about a second, once for a sampler.
"""

import numpy as np

GRID = 128
ITERATIONS = 5


def optimal_edges(
    lengths: np.ndarray, num_buckets: int, token_budget: int, max_batch_size: int | None = None
) -> tuple[int, ...]:
    """The inner edges of `num_buckets` buckets (fewer if the data has fewer distinct lengths).

    lengths: int [samples], all of 1 .. token_budget. A sample as long as an edge belongs above it.
    """
    lowest, tops, counts = _cells(np.sort(lengths))
    cap = max_batch_size or len(lengths)
    cost = _costs(tops.astype(np.float64), counts.astype(np.float64), float(token_budget), float(cap))
    return tuple(int(lowest[cell]) for cell in _cheapest_starts(cost, min(num_buckets, len(tops))))


def _cells(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Non-empty cells of the grid: each one's lower edge, longest sample and number of samples."""
    quantiles = ordered[np.linspace(0, len(ordered) - 1, GRID).astype(np.int64)]
    even = np.linspace(ordered[0], ordered[-1], GRID).astype(ordered.dtype)
    grid = np.unique(np.concatenate([quantiles, even]))
    first = np.searchsorted(ordered, grid, "left")
    keep = np.diff(first, append=len(ordered)) > 0
    first = first[keep]
    last = np.append(first[1:], len(ordered)) - 1
    return grid[keep], ordered[last], last - first + 1


def _costs(tops: np.ndarray, counts: np.ndarray, budget: float, cap: float) -> np.ndarray:
    """Expected padded tokens of the bucket of cells first .. last, [cells, cells]; infinite where first > last."""
    cells = len(tops)
    cost = np.full((cells, cells), np.inf)
    gaps = np.diff(tops)
    for first in range(cells):
        cumulative = np.cumsum(counts[first:])
        # log F of the bucket ending at `last` (rows) at the top of each of its cells but the last (columns)
        with np.errstate(invalid="ignore"):
            log_share = np.log(cumulative[None, :-1] / cumulative[:, None])
        below = np.tri(len(cumulative), len(cumulative) - 1, -1, dtype=bool)
        log_share[~below] = -np.inf
        longest = tops[first:]
        for _ in range(ITERATIONS):
            draws = np.clip(budget / longest, 1.0, cap)
            longest = tops[first:] - np.exp(draws[:, None] * log_share) @ gaps[first:]
        cost[first, first:] = cumulative * longest
    return cost


def _cheapest_starts(cost: np.ndarray, num_buckets: int) -> list[int]:
    """First cells of all buckets but the lowest, for the cheapest partition into `num_buckets` buckets."""
    best = cost[0]
    choices = []
    for _ in range(num_buckets - 1):
        # best[j]: cells 0 .. j so far; one more bucket begins at cell i + 1 after the others ended at cell i
        total = best[:-1, None] + cost[1:]
        choices.append(total.argmin(0))
        best = total.min(0)
    starts: list[int] = []
    last = len(cost) - 1
    for choice in reversed(choices):
        end = int(choice[last])
        starts.append(end + 1)
        last = end
    return starts[::-1]
