"""The sampler: lengths and settings in, a plan for every epoch out, and positions to come back to.

A plan is a pure function of (lengths, settings, epoch, micro-batches per update): every rank computes the same one
and no state is shared. A position taken with another number of micro-batches per update is followed by a plan of
the samples that were not seen before it.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from ds_dflash.batching.edges import optimal_edges
from ds_dflash.batching.plan import EpochPlan, Planner, Stretch
from ds_dflash.batching.position import Position
from ds_dflash.batching.samples import BLOCK_ROWS, Samples
from ds_dflash.batching.settings import PlanSettings
from ds_dflash.batching.streams import PlanKey, Stream


class BatchSampler:
    """Plans epochs over samples of these lengths (integers [rows], tokens) for `ranks` target ranks and `rounds`
    rounds per update; raises UserError if there is nothing to plan or a sample cannot fit.

    accounting: rows = kept + empty + too_long, and how many of the kept are truncated.
    """

    def __init__(self, lengths: np.ndarray, settings: PlanSettings, *, ranks: int, rounds: int) -> None:
        assert min(ranks, rounds) >= 1, (ranks, rounds)
        self.ranks, self.rounds = ranks, rounds
        self._settings = settings
        self._samples = Samples(np.asarray(lengths), settings)
        self.accounting = self._samples.accounting
        self.bucket_edges = self._edges()
        self._counts: dict[int, int] = {}

    @property
    def product(self) -> int:
        """Micro-batches per update."""
        return self.ranks * self.rounds

    def _edges(self) -> tuple[int, ...]:
        settings = self._settings
        if settings.grouping != "bucketed":
            return ()
        if settings.bucket_edges is not None:
            return settings.bucket_edges
        blocks = (self._samples.block(number, epoch=0) for number in range(self._samples.num_blocks))
        ids = next(ids for ids in blocks if len(ids))  # a block is a random part of all
        if len(ids) > BLOCK_ROWS:
            ids = ids[Stream(np.random.SeedSequence(0)).raw(BLOCK_ROWS) % np.uint64(len(ids))]
        lengths = self._samples.effective(ids)
        return optimal_edges(lengths, settings.num_buckets, settings.token_budget, settings.max_batch_size)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What must not change on a resume: the lengths and the settings, but neither ranks nor rounds."""
        settings = dataclasses.asdict(self._settings)
        del settings["num_buckets"]  # the edges say it
        settings["bucket_edges"] = list(self.bucket_edges) or None
        return {"rows": self.accounting["rows"], "lengths": self._samples.digest(), **settings}

    def start(self) -> Position:
        """Before the first update of the first epoch."""
        return Position(0, ((self.product, 0),))

    def resume(self, position: Position) -> Position:
        """The same place, ready to go on with this sampler's number of micro-batches per update."""
        done = tuple(segment for segment in position.segments if segment[1] > 0)
        if done and done[-1][0] == self.product:
            return Position(position.epoch, done)
        return Position(position.epoch, (*done, (self.product, 0)))

    def plan(self, position: Position) -> EpochPlan:
        """The whole epoch that `position` is in; its next update is number `position.update`."""
        *past, _ = self.resume(position).segments
        stretches = self._whole_epoch(position.epoch)
        for generation, (product, done) in enumerate(past, 1):
            stretches = self._left_after(stretches, product, done, generation)
        return EpochPlan(self._planner(self.product), position.epoch, tuple(past), stretches)

    def count_updates(self, epoch: int) -> int:
        """Updates of an epoch that is done from its start with this topology, exact: it is grouped, not ordered
        (0.2 s a million samples, remembered)."""
        if epoch not in self._counts:
            planner = self._planner(self.product)
            self._counts[epoch] = sum(planner.count_updates(stretch) for stretch in self._whole_epoch(epoch))
        return self._counts[epoch]

    def estimate_updates(self, epoch: int) -> int:
        """The same from the first block alone: exact below ten million samples, else within about a percent."""
        if self._samples.num_blocks == 1:
            return self.count_updates(epoch)
        stretches = self._whole_epoch(epoch)
        return self._planner(self.product).count_updates(stretches[0]) * len(stretches)

    def lengths_of(self, ids: np.ndarray) -> np.ndarray:
        """The lengths in a plan of these samples, int32: at most the budget."""
        return self._samples.effective(ids)

    def kept_lengths(self) -> Iterator[np.ndarray]:
        """The same of all samples that are planned, in slices of the rows."""
        return self._samples.kept_lengths()

    def _planner(self, product: int) -> Planner:
        if product == self.product:
            return Planner(self._settings, self.bucket_edges, self.ranks, self.rounds)
        return Planner(self._settings, self.bucket_edges, product, 1)  # for the content of updates any split will do

    def _whole_epoch(self, epoch: int) -> list[Stretch]:
        return [self._block(epoch, number) for number in range(self._samples.num_blocks)]

    def _block(self, epoch: int, number: int) -> Stretch:
        def load() -> tuple[np.ndarray, np.ndarray]:
            ids = self._samples.block(number, epoch)
            return ids, self._samples.effective(ids)

        return Stretch(PlanKey(self._settings.seed, epoch, number), load)

    def _left_after(self, stretches: list[Stretch], product: int, done: int, generation: int) -> list[Stretch]:
        """What is left of `stretches` after `done` updates with another topology: the rest of one, then the others."""
        planner = self._planner(product)
        for number, stretch in enumerate(stretches):
            count = planner.count_updates(stretch)
            if done < count:
                return [self._rest(stretch, planner, done, generation), *stretches[number + 1 :]]
            done -= count
        assert done == 0, f"a position is {done} updates past the end of its epoch"
        return []

    def _rest(self, stretch: Stretch, planner: Planner, done: int, generation: int) -> Stretch:
        if done == 0:
            return stretch
        dispatch = planner.plan(stretch)
        ids = np.sort(dispatch.indices[dispatch.offsets[done * planner.product] :])

        def load() -> tuple[np.ndarray, np.ndarray]:
            return ids, self._samples.effective(ids)

        return Stretch(stretch.key._replace(generation=generation), load)
