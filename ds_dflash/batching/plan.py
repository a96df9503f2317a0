"""The plan of one epoch: every update's micro-batches, as sample ids.

A plan is a row of stretches (blocks of samples, or what an earlier topology left of one), each planned when it is
first asked for; the last one used is kept. One stretch costs about 0.2 s and 35 MB a million samples, and holds an
int32 permutation and int64 offsets. Counting the updates groups every stretch without ordering it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ds_dflash.batching.grouping import fill_updates, group, longest_of
from ds_dflash.batching.ordering import balanced_rounds, shuffled_windows, stratified_windows
from ds_dflash.batching.position import Position
from ds_dflash.batching.settings import PlanSettings
from ds_dflash.batching.streams import PlanKey


@dataclass(frozen=True)
class Stretch:
    """Samples that are grouped and ordered together.

    load: gives (ids int32 [samples], their lengths in the plan int32 [samples]).
    """

    key: PlanKey
    load: Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Groups:
    """Samples by micro-batch, before these have an order."""

    ids: np.ndarray  # int32 [samples]
    lengths: np.ndarray  # int32 [samples]
    offsets: np.ndarray  # int64 [micro-batches + 1]


@dataclass(frozen=True)
class Dispatch:
    """Micro-batches in dispatch order: number t is round t // ranks, rank t % ranks."""

    indices: np.ndarray  # int32 [samples]: sample ids
    offsets: np.ndarray  # int64 [micro-batches + 1]
    longest: np.ndarray  # int32 [micro-batches]: the length that each is padded to, 0 where it is empty

    def micro_batch(self, number: int) -> np.ndarray:
        """Sample ids of one micro-batch, int32, possibly none."""
        return self.indices[self.offsets[number] : self.offsets[number + 1]]


class Planner:
    """Groups and orders stretches for one topology."""

    def __init__(self, settings: PlanSettings, edges: tuple[int, ...], ranks: int, rounds: int) -> None:
        self._settings = settings
        self._edges = edges
        self.ranks = ranks
        self.rounds = rounds
        self.product = ranks * rounds

        self._grouped: tuple[Stretch, Groups] | None = None

    def _group(self, stretch: Stretch) -> Groups:
        """Grouped samples; those of the last stretch are kept, as counting comes before planning."""
        if self._grouped is None or self._grouped[0] is not stretch:
            self._grouped = None
            ids, lengths = stretch.load()
            order, ordered, offsets = group(lengths, self._settings, self._edges, stretch.key.stream("grouping"))
            self._grouped = stretch, Groups(ids[order], ordered, offsets)
        return self._grouped[1]

    def count_updates(self, stretch: Stretch) -> int:
        """Updates of a stretch, by grouping it only."""
        return -(-(len(self._group(stretch).offsets) - 1) // self.product)

    def plan(self, stretch: Stretch) -> Dispatch:
        """All micro-batches of a stretch, a whole number of updates."""
        groups = self._group(stretch)
        self._grouped = None
        if len(groups.ids) == 0:
            return Dispatch(groups.ids, groups.offsets, np.zeros(0, np.int32))
        offsets = fill_updates(groups.offsets, self.product)
        sizes, longest = np.diff(offsets), longest_of(groups.lengths, offsets)
        turn = self._dispatch_order(sizes, longest, stretch.key)
        ends = np.cumsum(sizes[turn])
        # where each sample comes from: its micro-batch's old start, plus its place inside
        shift = offsets[turn] - np.append(0, ends[:-1])
        places = np.repeat(shift.astype(np.int32), sizes[turn])
        places += np.arange(len(places), dtype=np.int32)
        return Dispatch(groups.ids[places], np.append(0, ends), longest[turn].astype(np.int32))

    def _dispatch_order(self, sizes: np.ndarray, longest: np.ndarray, key: PlanKey) -> np.ndarray:
        if self._settings.ordering == "shuffled":
            return shuffled_windows(len(sizes), self.product, key.stream("windows")).reshape(-1)
        windows = stratified_windows(longest, self.product, key.stream("windows"))
        cost = sizes * longest * (1.0 + self._settings.quadratic_share * longest)
        return balanced_rounds(windows, cost, self.ranks, key.stream("rounds"))


class EpochPlan:
    """The epoch that a position is in, planned for one topology.

    epoch: its number. first: updates that earlier topologies did in it; this plan has the updates
    first .. num_updates - 1.
    """

    def __init__(
        self, planner: Planner, epoch: int, past: tuple[tuple[int, int], ...], stretches: Sequence[Stretch]
    ) -> None:
        self.epoch = epoch
        self.first = sum(done for _, done in past)
        self.ranks, self.rounds = planner.ranks, planner.rounds
        self._past = past
        self._planner = planner
        self._stretches = stretches
        self._counts: dict[int, int] = {}
        self._held: tuple[int, Dispatch] | None = None

    def dispatch(self, stretch: int) -> Dispatch:
        """The micro-batches of one stretch, in the order in which they are trained."""
        if self._held is None or self._held[0] != stretch:
            planned = self._planner.plan(self._stretches[stretch])
            self._held = stretch, planned
            self._counts[stretch] = (len(planned.offsets) - 1) // self._planner.product
        return self._held[1]

    def dispatches(self) -> Iterator[Dispatch]:
        """The micro-batches of all stretches that have any: together updates first .. num_updates - 1."""
        for stretch in range(len(self._stretches)):
            dispatch = self.dispatch(stretch)
            if len(dispatch.longest):
                yield dispatch

    def _count(self, stretch: int) -> int:
        if stretch not in self._counts:
            if len(self._stretches) == 1:
                self.dispatch(stretch)
            else:
                self._counts[stretch] = self._planner.count_updates(self._stretches[stretch])
        return self._counts[stretch]

    @property
    def num_updates(self) -> int:
        """Updates of the whole epoch, exact; from ten million samples on this groups every block once."""
        return self.first + sum(self._count(stretch) for stretch in range(len(self._stretches)))

    def __len__(self) -> int:
        return self.num_updates

    def find(self, update: int) -> tuple[int, int]:
        """The stretch that an update of this plan lies in, and its number there."""
        assert update >= self.first, f"update {update} was planned for an earlier topology"
        number = update - self.first
        for stretch in range(len(self._stretches)):
            if number < self._count(stretch):
                return stretch, number
            number -= self._count(stretch)
        raise IndexError(f"update {update} of an epoch of {self.num_updates}")

    def update(self, update: int) -> list[list[np.ndarray]]:
        """Sample ids of one update: [rounds][ranks] of int32 [samples], some possibly empty."""
        stretch, number = self.find(update)
        dispatch = self.dispatch(stretch)
        start = number * self._planner.product
        return [
            [dispatch.micro_batch(start + turn * self.ranks + rank) for rank in range(self.ranks)]
            for turn in range(self.rounds)
        ]

    def position_after(self, update: int) -> Position:
        """Where a run stands when it has done this update: in this epoch, or at the start of the next."""
        if self.ends_with(update):
            return Position(self.epoch + 1, ((self._planner.product, 0),))
        return Position(self.epoch, (*self._past, (self._planner.product, update + 1 - self.first)))

    def ends_with(self, update: int) -> bool:
        """Whether this update is the last of the epoch; looks one block ahead at most, unlike `num_updates`."""
        stretch, number = self.find(update)
        later = range(stretch + 1, len(self._stretches))
        return number + 1 == self._count(stretch) and not any(self._count(other) for other in later)

    def heaviest(self) -> np.ndarray:
        """Ids of the micro-batch with most padded tokens (of the first stretch that has any), int32."""
        dispatch = next(self.dispatches())
        return dispatch.micro_batch(int(np.argmax(np.diff(dispatch.offsets) * dispatch.longest)))

    @property
    def indices(self) -> np.ndarray:
        """int32 [samples left]: sample ids of all updates first .. num_updates - 1 in dispatch order."""
        if len(self._stretches) == 1:
            return self.dispatch(0).indices
        return np.concatenate([dispatch.indices for dispatch in self.dispatches()])

    @property
    def offsets(self) -> np.ndarray:
        """int64 [micro-batches + 1]: micro-batch t (round * ranks + rank) is indices[offsets[t]:offsets[t + 1]]."""
        if len(self._stretches) == 1:
            return self.dispatch(0).offsets
        sizes = [np.diff(dispatch.offsets) for dispatch in self.dispatches()]
        return np.append(0, np.cumsum(np.concatenate(sizes)))
