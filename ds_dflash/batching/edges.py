"""Bucket edges that minimise the expected padded tokens of the data, by dynamic programming.

The padded tokens of a bucket are count * M_n, where M_n = E[longest of n draws from the bucket] and n solves
n * M_n = token_budget. Edges are sought on a grid of at most 2 * GRID lengths (half of them quantiles, half evenly
spaced; samples count as spread evenly over their cell); half a second, once for a sampler.
"""

from dataclasses import dataclass

import numpy as np

GRID = 128
FIRST_ITERATIONS, ITERATIONS = 8, 2


@dataclass(frozen=True)
class Cells:
    """What lies between two neighbours of the grid; every cell holds samples. All float64 [cells]."""

    shortest: np.ndarray
    longest: np.ndarray
    counts: np.ndarray


def optimal_edges(
    lengths: np.ndarray, num_buckets: int, token_budget: int, max_batch_size: int | None = None
) -> tuple[int, ...]:
    """The inner edges of `num_buckets` buckets (fewer if the data has fewer distinct lengths).

    lengths: int [samples], all of 1 .. token_budget. A sample as long as an edge belongs above it.
    """
    cells = _cells(np.sort(lengths))
    cap = max_batch_size or len(lengths)
    starts = _cheapest_starts(_costs(cells, token_budget, cap), min(num_buckets, len(cells.counts)))
    return tuple(int(cells.shortest[start]) for start in starts)


def _cells(ordered: np.ndarray) -> Cells:
    quantiles = ordered[np.linspace(0, len(ordered) - 1, GRID).astype(np.int64)]
    even = np.linspace(ordered[0], ordered[-1], GRID).astype(ordered.dtype)
    first = np.unique(np.searchsorted(ordered, np.union1d(quantiles, even), "left"))
    counts = np.diff(first, append=len(ordered))
    shortest, longest = ordered[first], ordered[first + counts - 1]
    return Cells(shortest.astype(np.float64), longest.astype(np.float64), counts.astype(np.float64))


def _costs(cells: Cells, token_budget: float, cap: float) -> np.ndarray:
    """Expected padded tokens of the bucket of cells first .. last, [cells, cells]; infinite where first > last."""
    cost = np.full((len(cells.counts), len(cells.counts)), np.inf)
    expected = cells.longest
    for first in range(len(cost)):
        rest = Cells(cells.shortest[first:], cells.longest[first:], cells.counts[first:])
        expected = _expected_longest(rest, expected, ITERATIONS if first else FIRST_ITERATIONS, token_budget, cap)
        cost[first, first:] = np.cumsum(rest.counts) * expected
        expected = expected[1:]
    return cost


def _expected_longest(cells: Cells, guess: np.ndarray, iterations: int, token_budget: float, cap: float) -> np.ndarray:
    """E[longest of n draws] from the cells 0 .. last, for each last, with n = token_budget / that: [cells].

    E = top - integral of F^n, where F, the share of the bucket below a length, is linear inside a cell and constant
    between two. Iterates n from `guess` (of this E).
    """
    total = np.cumsum(cells.counts)
    share = np.minimum(total / total[:, None], 1.0)  # [last, cell]: F at the top of the cell
    within = np.tri(len(total), dtype=bool)
    with np.errstate(divide="ignore"):
        log_share = np.where(within, np.log(share), -np.inf)
    between = np.append(cells.shortest[1:] - cells.longest[:-1], 0.0)
    slope = (cells.longest - cells.shortest) / cells.counts
    weight = slope - np.append(slope[1:], 0.0)
    expected = guess
    for _ in range(iterations):
        draws = np.clip(token_budget / expected, 1.0, cap)
        power = np.exp(draws[:, None] * log_share)  # F^n
        # power is 1 in the bucket's last cell, where what follows in the sums is not the bucket's own
        inside = (power * share) @ weight + np.append(slope[1:], 0.0)
        gaps = power @ between - between
        expected = cells.longest - inside * total / (draws + 1.0) - gaps
    return expected


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
