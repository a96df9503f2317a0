"""What every batch plan must satisfy, and the limits of the default one on the reference lengths. Plain numpy."""

from collections.abc import Sequence

import numpy as np

from ds_dflash.batching import BatchSampler, Position

SEXTILES = np.array([0, 770, 1216, 1728, 2432, 3296, 8192])
# rounds in a window: limits on TV (token mean, token 95th percentile, sample mean, sample 95th percentile)
TV_LIMITS = {4: (0.049, 0.083, 0.080, 0.130), 8: (0.0345, 0.059, 0.0365, 0.066), 16: (0.0245, 0.042, 0.0258, 0.045)}

Update = list[list[np.ndarray]]


def walk(sampler: BatchSampler, position: Position, most: int | None = None) -> tuple[list[Update], Position]:
    """The updates from a position to the end of its epoch (or `most` of them), and where a run then stands."""
    plan = sampler.plan(position)
    updates: list[Update] = []
    last = len(plan) if most is None else min(len(plan), position.update + most)
    for number in range(position.update, last):
        updates.append(plan.update(number))
        position = plan.position_after(number)
    return updates, position


def ids_of(updates: Sequence[Update]) -> list[int]:
    """All sample ids of some updates."""
    return [int(sample) for update in updates for turn in update for batch in turn for sample in batch]


def contents(updates: Sequence[Update]) -> list[list[tuple[int, ...]]]:
    """Each update's micro-batches as sorted ids, without their round and rank."""
    return [sorted(tuple(sorted(batch.tolist())) for turn in update for batch in turn) for update in updates]


def padded_tokens(lengths: np.ndarray, indices: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Samples times longest of each micro-batch, int64."""
    sizes = np.diff(offsets)
    longest = np.zeros(len(sizes), np.int64)
    longest[sizes > 0] = np.maximum.reduceat(lengths[indices], offsets[:-1][sizes > 0])
    return sizes * longest


def check_plan(lengths: np.ndarray, indices: np.ndarray, offsets: np.ndarray, budget: int, product: int) -> None:
    """Each sample once, whole updates, none empty, the budget held."""
    assert np.array_equal(np.sort(indices), np.arange(len(lengths)))
    assert offsets[0] == 0
    assert offsets[-1] == len(indices)
    assert (len(offsets) - 1) % product == 0
    assert (np.diff(offsets) >= 0).all()
    assert (np.diff(offsets).reshape(-1, product).sum(1) > 0).all()
    assert padded_tokens(lengths, indices, offsets).max() <= budget


def window_tv(lengths: np.ndarray, indices: np.ndarray, offsets: np.ndarray, span: int) -> list[float]:
    """TV of windows of `span` micro-batches from all data: token mean and 95th percentile, the same by samples."""
    windows = (len(offsets) - 1) // span
    ends = offsets[span::span][:windows]
    figures: list[float] = []
    for weights in (lengths.astype(np.float64), np.ones(len(lengths))):
        whole = np.histogram(lengths, SEXTILES, weights=weights)[0]
        bucket = np.searchsorted(SEXTILES, lengths[indices[: ends[-1]]], "right") - 1
        window = np.searchsorted(ends, np.arange(ends[-1]), "right")
        mass = np.zeros((windows, len(SEXTILES) - 1))
        np.add.at(mass, (window, bucket), weights[indices[: ends[-1]]])
        distance = np.abs(mass / mass.sum(1, keepdims=True) - whole / whole.sum()).sum(1) / 2
        figures += [float(distance.mean()), float(np.quantile(distance, 0.95))]
    return figures


def groups_of(indices: np.ndarray, offsets: np.ndarray, span: int = 1) -> np.ndarray:
    """The number of each sample's micro-batch (or of its run of `span` of them)."""
    numbers = np.empty(len(indices), np.int64)
    numbers[indices] = np.repeat(np.arange(len(offsets) - 1) // span, np.diff(offsets))
    return numbers


def shared_pairs(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Of the pairs that share a group in `first`, the share that do in `second`; and its mean over samples."""
    keys = first * (second.max() + 1) + second
    _, both, together = np.unique(keys, return_inverse=True, return_counts=True)
    mates = np.bincount(first)[first] - 1
    again = together[both] - 1
    return again.sum() / mates.sum(), (again[mates > 0] / mates[mates > 0]).mean()
