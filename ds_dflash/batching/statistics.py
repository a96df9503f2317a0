"""The figures of a plan: how much is padding, how well lockstep rounds are filled, how well lengths and samples mix.

One pass over an epoch, stretch by stretch, so that memory stays bounded; of very large data, the pairs that meet
again are estimated from every k-th micro-batch.

- padding efficiency = tokens / padded tokens, where a micro-batch of n samples has n * longest padded tokens.
- lockstep efficiency = tokens / (ranks * sum over rounds of the largest padded count in the round): real tokens
  over what all ranks could have computed while the slowest of each round ran.
- window TV = half the L1 distance between the token-weighted distributions of an update and of all data over the
  data's six sextiles of length, averaged over updates.
- pairs that meet again: of all pairs that share a micro-batch in one epoch, the share that do in the next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ds_dflash.batching.plan import Dispatch
from ds_dflash.batching.sampler import BatchSampler

BUCKETS = 6
TRACKED_SAMPLES = 1 << 21


@dataclass(frozen=True)
class EpochFigures:
    """See the module's docstring; `pairs_that_meet_again` is None where there is no epoch before."""

    micro_batches: int
    updates: int
    samples: int
    tokens: int
    padded_tokens: int
    padding_efficiency: float
    lockstep_efficiency: float
    window_tv: float
    pairs_that_meet_again: float | None


@dataclass(frozen=True)
class LengthMix:
    """How the tokens of all data spread over its six sextiles of length.

    histogram: int64 [longest + 1], samples of each length. edges: int64 [5], a sample as long as an edge belongs
    above it. token_share: float [6].
    """

    histogram: np.ndarray
    edges: np.ndarray
    token_share: np.ndarray

    @classmethod
    def of(cls, sampler: BatchSampler) -> "LengthMix":
        """Of the samples that the sampler keeps, as long as they count in its plans."""
        histogram = np.zeros(1, np.int64)
        for lengths in sampler.kept_lengths():
            counts = np.bincount(lengths, minlength=len(histogram))
            counts[: len(histogram)] += histogram
            histogram = counts
        below = np.cumsum(histogram)
        edges = np.searchsorted(below, below[-1] * np.arange(1, BUCKETS) / BUCKETS, "right")
        lengths = np.arange(len(histogram))
        tokens = np.bincount(np.searchsorted(edges, lengths, "right"), lengths * histogram, BUCKETS)
        return cls(histogram, edges, tokens / tokens.sum())

    def shares(self, lengths: np.ndarray, window_sizes: np.ndarray) -> np.ndarray:
        """Token shares of consecutive windows of so many samples, float [windows, 6]."""
        window = np.repeat(np.arange(len(window_sizes)), window_sizes)
        cell = window * BUCKETS + np.searchsorted(self.edges, lengths, "right")
        tokens = np.bincount(cell, lengths, len(window_sizes) * BUCKETS).reshape(-1, BUCKETS)
        return tokens / tokens.sum(1, keepdims=True)


@dataclass(frozen=True)
class Tracked:
    """Samples whose micro-batch is known: ids int32 [tracked], ascending; micro_batches int64 [tracked]."""

    ids: np.ndarray
    micro_batches: np.ndarray


class EpochSurvey:
    """Collects the figures of one epoch from its dispatches, in order.

    before: samples tracked in the epoch before this one, if there was one. After the last dispatch, `tracked` is
    for the survey of the next epoch.
    """

    def __init__(self, sampler: BatchSampler, mix: LengthMix, before: Tracked | None = None) -> None:
        self._sampler, self._mix, self._before = sampler, mix, before
        self._every = -(-sampler.accounting["kept"] // TRACKED_SAMPLES)
        self._micro_batches = self._samples = self._tokens = self._padded = self._lockstep = 0
        self._distances: list[np.ndarray] = []
        self._tracked: list[tuple[np.ndarray, np.ndarray]] = []
        self._now = None if before is None else np.full(len(before.ids), -1, np.int64)

    def follow(self, dispatches: Iterable[Dispatch]) -> Iterator[Dispatch]:
        """The same dispatches, each surveyed on its way."""
        for dispatch in dispatches:
            self._add(dispatch)
            yield dispatch

    def _add(self, dispatch: Dispatch) -> None:
        ranks, product = self._sampler.ranks, self._sampler.product
        lengths = self._sampler.lengths_of(dispatch.indices)
        sizes = np.diff(dispatch.offsets)
        padded = sizes * dispatch.longest
        self._samples += len(lengths)
        self._tokens += int(lengths.sum(dtype=np.int64))
        self._padded += int(padded.sum())
        self._lockstep += ranks * int(padded.reshape(-1, ranks).max(1).sum())
        shares = self._mix.shares(lengths, sizes.reshape(-1, product).sum(1))
        self._distances.append(0.5 * np.abs(shares - self._mix.token_share).sum(1))
        self._track(dispatch.indices, sizes)
        self._micro_batches += len(sizes)

    def _track(self, ids: np.ndarray, sizes: np.ndarray) -> None:
        numbers = np.repeat(np.arange(self._micro_batches, self._micro_batches + len(sizes)), sizes)
        chosen = numbers % self._every == 0
        self._tracked.append((ids[chosen], numbers[chosen]))
        if self._before is not None and self._now is not None:
            place = np.searchsorted(self._before.ids, ids)
            place[place == len(self._before.ids)] = 0
            known = self._before.ids[place] == ids
            self._now[place[known]] = numbers[known]

    @property
    def tracked(self) -> Tracked:
        """Samples and their micro-batches for the survey of the next epoch."""
        ids = np.concatenate([ids for ids, _ in self._tracked])
        micro_batches = np.concatenate([numbers for _, numbers in self._tracked])
        order = np.argsort(ids)
        return Tracked(ids[order], micro_batches[order])

    def figures(self) -> EpochFigures:
        """Of all dispatches so far."""
        return EpochFigures(
            micro_batches=self._micro_batches,
            updates=self._micro_batches // self._sampler.product,
            samples=self._samples,
            tokens=self._tokens,
            padded_tokens=self._padded,
            padding_efficiency=self._tokens / self._padded,
            lockstep_efficiency=self._tokens / self._lockstep,
            window_tv=float(np.concatenate(self._distances).mean()),
            pairs_that_meet_again=self._meet_again(),
        )

    def _meet_again(self) -> float | None:
        if self._before is None or self._now is None:
            return None
        return pairs_that_meet_again(self._before.micro_batches, self._now)


def pairs_that_meet_again(before: np.ndarray, now: np.ndarray) -> float:
    """Of the pairs with equal numbers in `before`, the share with equal numbers in `now`; both int64 [samples].

    0 where no two samples share a number in `before`.
    """
    sizes = np.bincount(before)
    pairs = int((sizes * (sizes - 1)).sum())
    both = np.sort(before * (int(now.max()) + 1) + now)
    runs = np.diff(np.flatnonzero(np.diff(both, prepend=-1, append=-1)))
    return int((runs * (runs - 1)).sum()) / pairs if pairs else 0.0
