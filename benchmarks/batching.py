#!/usr/bin/env python3
"""Batches of this project beside what else one would take, on the same lengths, budget and ranks: one table.

The others are written out here for comparison only:
- length-grouped sampling: a fixed batch size, the largest that the longest sample allows; random megabatches of 50
  batches, each sorted by length (the recipe of transformers' LengthGroupedSampler);
- dynamic bucketing: a shuffled stream falls into 30 buckets of equal total length, each of which gives a batch as
  soon as one more sample would break the budget (the recipe of lhotse and tf.data);
- sort and pack: sorted once, packed greedily, the order of batches shuffled every epoch;
- token packing: a shuffled stream laid end to end into rows of the budget's length. It has no padding but the rows'
  ends and needs a target whose every layer, attention or recurrent, keeps packed samples apart.

The figures are those of `ds_dflash.batching.statistics`; seconds are for planning the second epoch.

usage: batching.py [--lengths FILE.npy] [--token-budget N] [--ranks R] [--rounds A]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from reference_lengths import make

from ds_dflash.batching import GROUPINGS, BatchSampler, PlanSettings, Position
from ds_dflash.batching.statistics import LengthMix, pairs_that_meet_again

MEGABATCH, DYNAMIC_BUCKETS = 50, 30


@dataclass(frozen=True)
class Batches:
    """One epoch: indices int [samples]; sizes and computed (tokens with padding), both int [micro-batches]."""

    indices: np.ndarray
    sizes: np.ndarray
    computed: np.ndarray


Planner = Callable[[np.ndarray, int, int], Batches]  # (lengths, budget, epoch)


def padded(lengths: np.ndarray, batches: list[np.ndarray]) -> Batches:
    """Batches that are padded to their longest."""
    sizes = np.array([len(batch) for batch in batches])
    indices = np.concatenate(batches)
    longest = np.maximum.reduceat(lengths[indices], np.cumsum(sizes) - sizes).astype(np.int64)
    return Batches(indices, sizes, sizes * longest)


def length_grouped(lengths: np.ndarray, budget: int, epoch: int) -> Batches:
    """Fixed batch size, sorted megabatches."""
    size = budget // int(lengths.max())
    order = np.random.default_rng(epoch).permutation(len(lengths))
    batches: list[np.ndarray] = []
    for start in range(0, len(order), MEGABATCH * size):
        mega = order[start : start + MEGABATCH * size]
        mega = mega[np.argsort(-lengths[mega], kind="stable")]
        batches += np.split(mega, range(size, len(mega), size))
    return padded(lengths, batches)


def dynamic_buckets(lengths: np.ndarray, budget: int, epoch: int) -> Batches:
    """A stream into buckets of equal total length."""
    ordered = np.sort(lengths)
    total = np.cumsum(ordered, dtype=np.int64)
    shares = total[-1] * np.arange(1, DYNAMIC_BUCKETS) / DYNAMIC_BUCKETS
    edges = ordered[np.searchsorted(total, shares)]
    order = np.random.default_rng(epoch).permutation(len(lengths))
    buckets = np.searchsorted(edges, lengths[order], "right").tolist()
    pending: list[list[int]] = [[] for _ in range(DYNAMIC_BUCKETS)]
    longest = [0] * DYNAMIC_BUCKETS
    batches = []
    for sample, bucket, length in zip(order.tolist(), buckets, lengths[order].tolist(), strict=True):
        if (len(pending[bucket]) + 1) * max(longest[bucket], length) > budget:
            batches.append(np.array(pending[bucket]))
            pending[bucket], longest[bucket] = [], 0
        pending[bucket].append(sample)
        longest[bucket] = max(longest[bucket], length)
    return padded(lengths, batches + [np.array(batch) for batch in pending if batch])


def sort_and_pack(lengths: np.ndarray, budget: int, epoch: int) -> Batches:
    """The same batches every epoch, in another order."""
    order = np.argsort(lengths, kind="stable")
    cuts, first = [], 0
    for place, length in enumerate(lengths[order].tolist()):
        if (place + 1 - first) * length > budget:
            cuts.append(place)
            first = place
    batches = np.split(order, cuts)
    return padded(lengths, [batches[number] for number in np.random.default_rng(epoch).permutation(len(batches))])


def pack_tokens(lengths: np.ndarray, budget: int, epoch: int) -> Batches:
    """Rows of whole samples, each row computed in full."""
    order = np.random.default_rng(epoch).permutation(len(lengths))
    sizes, size, filled = [], 0, 0
    for length in lengths[order].tolist():
        if filled + length > budget:
            sizes.append(size)
            size, filled = 0, 0
        size += 1
        filled += length
    sizes.append(size)
    return Batches(order, np.array(sizes), np.full(len(sizes), budget))


class Ours:
    """The planner of this project with one grouping and the default ordering."""

    def __init__(self, grouping: str, ranks: int, rounds: int) -> None:
        self._grouping, self._ranks, self._rounds = grouping, ranks, rounds

    def __call__(self, lengths: np.ndarray, budget: int, epoch: int) -> Batches:
        """Plan an epoch."""
        settings = PlanSettings(token_budget=budget, grouping=self._grouping)
        sampler = BatchSampler(lengths, settings, ranks=self._ranks, rounds=self._rounds)
        plan = sampler.plan(Position(epoch, ()))
        dispatch = next(plan.dispatches())
        sizes = np.diff(dispatch.offsets)
        return Batches(dispatch.indices, sizes, sizes * dispatch.longest.astype(np.int64))


def micro_batch_of(batches: Batches) -> np.ndarray:
    """The number of each sample's micro-batch, int64 [samples]."""
    numbers = np.empty(len(batches.indices), np.int64)
    numbers[batches.indices] = np.repeat(np.arange(len(batches.sizes)), batches.sizes)
    return numbers


def measure(planner: Planner, lengths: np.ndarray, mix: LengthMix, options: argparse.Namespace) -> list[str]:
    """The cells of one line of the table."""
    first = planner(lengths, options.token_budget, 0)
    begin = time.perf_counter()
    second = planner(lengths, options.token_budget, 1)
    seconds = time.perf_counter() - begin
    product = options.ranks * options.rounds
    whole = len(second.sizes) // product * product
    tokens = lengths.sum(dtype=np.int64)
    computed = np.append(second.computed, np.zeros(-len(second.computed) % options.ranks, np.int64))
    lockstep = options.ranks * computed.reshape(-1, options.ranks).max(1).sum()
    windows = second.sizes[:whole].reshape(-1, product).sum(1)
    shares = mix.shares(lengths[second.indices[: windows.sum()]], windows)
    distance = 0.5 * np.abs(shares - mix.token_share).sum(1).mean()
    again = pairs_that_meet_again(micro_batch_of(first), micro_batch_of(second))
    efficiencies = [f"{tokens / second.computed.sum():.3f}", f"{tokens / lockstep:.3f}"]
    return [f"{len(second.sizes):,}", *efficiencies, f"{distance:.3f}", f"{again:.2g}", f"{seconds:.2f}"]


def main() -> None:
    """Measure all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--token-budget", type=int, default=49_152)
    parser.add_argument("--ranks", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    lengths = np.load(options.lengths) if options.lengths else make()
    sampler = BatchSampler(
        lengths, PlanSettings(token_budget=options.token_budget), ranks=options.ranks, rounds=options.rounds
    )
    planners: dict[str, Planner] = {
        "length-grouped, fixed batch size": length_grouped,
        f"dynamic bucketing, {DYNAMIC_BUCKETS} buckets": dynamic_buckets,
        "sort and pack, frozen": sort_and_pack,
        "token packing (no padding)": pack_tokens,
    }
    for grouping in reversed(GROUPINGS):
        planners[f"ds_dflash {grouping}, stratified"] = Ours(grouping, options.ranks, options.rounds)
    heads = ["", "micro-batches", "padding eff.", "lockstep eff.", "window TV", "pairs again", "seconds"]
    print("{:34}{:>15}{:>14}{:>15}{:>11}{:>13}{:>9}".format(*heads))
    mix = LengthMix.of(sampler)
    for name, planner in planners.items():
        cells = measure(planner, lengths, mix, options)
        print("{:34}{:>15}{:>14}{:>15}{:>11}{:>13}{:>9}".format(name, *cells), flush=True)


if __name__ == "__main__":
    main()
