"""Random settings and samples for properties of batch plans, and how to plan small data in blocks."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from ds_dflash.batching import GROUPINGS, ORDERINGS, PlanSettings, samples

BUDGET = 100
EVERY_RECIPE = [(grouping, ordering) for grouping in GROUPINGS for ordering in ORDERINGS]


@contextlib.contextmanager
def block_size(rows: int | None) -> Iterator[None]:
    """Plan in blocks of so many rows, as from ten million samples on; None: in one block."""
    if rows is None:
        yield
        return
    with mock.patch.multiple(samples, BLOCKS_FROM_ROWS=rows, BLOCK_ROWS=rows):
        yield


@st.composite
def recipes(draw: st.DrawFn) -> PlanSettings:
    grouping, ordering = draw(st.sampled_from(EVERY_RECIPE))
    edges = draw(st.none() | st.sets(st.integers(0, 120), min_size=1, max_size=4))
    return PlanSettings(
        token_budget=draw(st.integers(BUDGET, 400)),
        max_batch_size=draw(st.none() | st.integers(1, 9)),
        grouping=grouping,
        ordering=ordering,
        num_buckets=draw(st.integers(1, 5)),
        bucket_edges=None if edges is None else tuple(sorted(edges)),
        seed=draw(st.integers(0, 2**40)),
    )


def draw_lengths(count: int, longest: int, seed: int) -> np.ndarray:
    """int32 [count] of 1 .. longest; lists drawn by hypothesis itself would mostly be short."""
    return np.random.default_rng(seed).integers(1, longest, count, np.int32, endpoint=True)


some_lengths = st.builds(draw_lengths, st.integers(1, 90), st.integers(1, BUDGET), st.integers(0, 2**32))
some_blocks = st.none() | st.integers(2, 25)
few = st.integers(1, 5)
epochs = st.integers(0, 3)
