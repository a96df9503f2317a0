#!/usr/bin/env python3
"""Plan an epoch of very many samples and check it: time, memory above the lengths, efficiency, each sample once.

The whole epoch is planned twice: for the clock, and again under tracemalloc for the memory. Exits 1 if a limit does
not hold (limits are for 100 million samples and one thread).

usage: batching_scale.py [--samples N] [--grouping G]
"""

import argparse
import sys
import time
import tracemalloc

import numpy as np
from reference_lengths import draw

from ds_dflash.batching import GROUPINGS, BatchSampler, PlanSettings
from ds_dflash.batching.statistics import EpochSurvey, LengthMix

RANKS, ROUNDS = 7, 4
FIRST_UPDATE_SECONDS, EPOCH_SECONDS, PEAK_BYTES, EFFICIENCY = 2.0, 90.0, 160e6, 0.985


class Checks:
    """Prints each figure beside its limit and remembers whether all held."""

    failed = False

    def add(self, name: str, value: str, holds: bool) -> None:
        """One line."""
        print(f"{'ok  ' if holds else 'FAIL'} {name}: {value}", flush=True)
        self.failed |= not holds


def new_sampler(lengths: np.ndarray, grouping: str) -> BatchSampler:
    """With the settings of the reference recipe."""
    return BatchSampler(lengths, PlanSettings(grouping=grouping), ranks=RANKS, rounds=ROUNDS)


def check_time(lengths: np.ndarray, grouping: str, checks: Checks) -> None:
    """First update and whole epoch by the clock."""
    begin = time.perf_counter()
    sampler = new_sampler(lengths, grouping)
    plan = sampler.plan(sampler.start())
    plan.update(0)
    first = time.perf_counter() - begin
    checks.add(f"first update within {FIRST_UPDATE_SECONDS:g} s", f"{first:.2f} s", first <= FIRST_UPDATE_SECONDS)
    begin = time.perf_counter()
    updates = sum((len(dispatch.offsets) - 1) // sampler.product for dispatch in plan.dispatches())
    whole = time.perf_counter() - begin
    checks.add(f"whole epoch within {EPOCH_SECONDS:g} s", f"{whole:.1f} s", whole <= EPOCH_SECONDS)
    begin = time.perf_counter()
    counted = sampler.count_updates(0)
    seconds = time.perf_counter() - begin
    checks.add("count of updates exact", f"{counted} = {updates}, counted in {seconds:.1f} s", counted == updates)


def check_memory(lengths: np.ndarray, grouping: str, checks: Checks) -> None:
    """Peaks of what is allocated, which leaves the lengths out."""
    tracemalloc.start()
    sampler = new_sampler(lengths, grouping)
    plan = sampler.plan(sampler.start())
    plan.update(0)
    for name, consume in (("first update", lambda: None), ("whole epoch", lambda: sum(1 for _ in plan.dispatches()))):
        consume()
        _, peak = tracemalloc.get_traced_memory()
        checks.add(f"{name}: at most {PEAK_BYTES / 1e6:g} MB", f"{peak / 1e6:.0f} MB", peak <= PEAK_BYTES)
    tracemalloc.stop()


def check_content(lengths: np.ndarray, grouping: str, checks: Checks) -> None:
    """Each sample once, within the budget, little padding."""
    sampler = new_sampler(lengths, grouping)
    survey = EpochSurvey(sampler, LengthMix.of(sampler))
    seen = np.zeros(len(lengths), bool)
    heaviest = 0
    for dispatch in survey.follow(sampler.plan(sampler.start()).dispatches()):
        assert not seen[dispatch.indices].any()
        seen[dispatch.indices] = True
        heaviest = max(heaviest, int((np.diff(dispatch.offsets) * dispatch.longest).max()))
    figures = survey.figures()
    once = bool(seen.all()) and figures.samples == len(lengths)
    checks.add("each sample once", f"{figures.samples:,}", once)
    checks.add("budget held", f"{heaviest:,}", heaviest <= PlanSettings().token_budget)
    enough = figures.padding_efficiency >= EFFICIENCY
    checks.add(f"padding efficiency at least {EFFICIENCY}", f"{figures.padding_efficiency:.4f}", enough)
    print(f"     lockstep efficiency {figures.lockstep_efficiency:.4f}, window TV {figures.window_tv:.4f}")


def main() -> int:
    """All checks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--grouping", choices=GROUPINGS, default="pooled")
    arguments = parser.parse_args()
    lengths = draw(arguments.samples)
    print(f"{len(lengths):,} samples, {lengths.nbytes / 1e6:.0f} MB of lengths, grouping {arguments.grouping}")
    checks = Checks()
    for check in (check_time, check_memory, check_content):
        check(lengths, arguments.grouping, checks)
    return int(checks.failed)


if __name__ == "__main__":
    sys.exit(main())
