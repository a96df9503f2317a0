#!/usr/bin/env python3
"""Sequence lengths with the quantiles of a real chat corpus: minimum 65, P50 1727, P90 4200, P99 4917, maximum 8191.

Up to P90 a monotone cubic (Fritsch and Carlson 1980) through the knots, above it two exponential tails.

usage: reference_lengths.py OUT.npy [COUNT] [SEED]
"""

import sys
from pathlib import Path

import numpy as np

COUNT, SEED = 902_087, 20_260
SHORTEST, LONGEST = 65, 8191
KNOTS = np.array([(0, 65), (1 / 6, 770), (1 / 3, 1216), (1 / 2, 1727), (2 / 3, 2432), (5 / 6, 3296), (0.9, 4200)])
P90, P99 = 4200, 4917
CHUNK = 1 << 22


def knot_slopes(steps: np.ndarray, rises: np.ndarray) -> np.ndarray:
    """Slopes at the knots that keep the cubic monotone: weighted harmonic means of the secants beside each."""
    secants = rises / steps
    left, right = 2 * steps[1:] + steps[:-1], steps[1:] + 2 * steps[:-1]
    inner = (left + right) / (left / secants[:-1] + right / secants[1:])
    return np.concatenate([[end_slope(*steps[:2], *secants[:2])], inner, [end_slope(*steps[:-3:-1], *secants[:-3:-1])]])


def end_slope(step: float, next_step: float, secant: float, next_secant: float) -> float:
    """One-sided three-point slope, 0 where it would turn back."""
    slope = ((2 * step + next_step) * secant - step * next_secant) / (step + next_step)
    return slope if slope * secant > 0 else 0.0


def quantile(share: np.ndarray, last: float) -> np.ndarray:
    """Lengths (float) below which these shares of all samples lie; `last` is the share of the longest sample."""
    at, value = KNOTS.T
    steps, rises = np.diff(at), np.diff(value)
    slopes = knot_slopes(steps, rises)
    body = np.minimum(share, at[-1])
    knot = np.clip(np.searchsorted(at, body, "right") - 1, 0, len(steps) - 1)
    step, t = steps[knot], (body - at[knot]) / steps[knot]
    cubic = (1 + 2 * t) * (1 - t) ** 2 * value[knot] + t * (1 - t) ** 2 * step * slopes[knot]
    cubic += t * t * (3 - 2 * t) * value[knot + 1] + t * t * (t - 1) * step * slopes[knot + 1]
    above = 1 - share
    tail = P90 + (P99 - P90) / np.log(10) * np.log(0.1 / above)
    far = P99 + (LONGEST - P99) / np.log(0.01 / (1 - last)) * np.log(0.01 / above)
    return np.where(share > 0.99, far, np.where(share > at[-1], tail, cubic))


def make(count: int = COUNT, seed: int = SEED) -> np.ndarray:
    """int32 [count], evenly spaced quantiles in random order; count above 100."""
    share = (np.arange(count) + 0.5) / count
    lengths = np.clip(np.rint(quantile(share, share[-1])), SHORTEST, LONGEST).astype(np.int32)
    lengths[0], lengths[-1] = SHORTEST, LONGEST
    return np.random.default_rng(seed).permutation(lengths)


def draw(count: int, seed: int = SEED) -> np.ndarray:
    """int32 [count], independent draws, in bounded memory."""
    random = np.random.default_rng(seed)
    lengths = np.empty(count, np.int32)
    for start in range(0, count, CHUNK):
        share = random.random(min(CHUNK, count - start))
        lengths[start : start + CHUNK] = np.clip(np.rint(quantile(share, 1 - 0.5 / count)), SHORTEST, LONGEST)
    return lengths


if __name__ == "__main__":
    np.save(Path(sys.argv[1]), make(*map(int, sys.argv[2:])))
