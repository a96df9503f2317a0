"""A prepared dataset cut in two: rows to train on and rows held out."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from ds_dflash.errors import UserError


class Rows(Protocol):
    """What training asks of a dataset: `lengths` int32 [rows], and rows as (ids int64 [length], mask bool [length])."""

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def rows(self, indices: Iterable[int]) -> list[tuple[np.ndarray, np.ndarray]]: ...


class Subset:
    """Some rows of a dataset, numbered anew."""

    def __init__(self, dataset: Rows, indices: np.ndarray) -> None:
        self._dataset = dataset
        self._indices = indices
        self.lengths = dataset.lengths[indices]

    def __len__(self) -> int:
        return len(self._indices)

    def rows(self, indices: Iterable[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        return self._dataset.rows(self._indices[np.asarray(list(indices), np.int64)])


def hold_out(dataset: Rows, fraction: float, seed: int) -> tuple[Subset, Subset]:
    """(rows to train on, rows held out), at random by `seed`, both in the dataset's order; raises UserError."""
    held_out = round(len(dataset) * fraction)
    if not 0 < held_out < len(dataset):
        raise UserError(
            f"data.validation_fraction {fraction} of {len(dataset)} rows is {held_out} rows, which leaves nothing to"
            f" {'train on' if held_out else 'validate on'}: choose another fraction."
        )
    order = np.random.default_rng([seed, len(dataset)]).permutation(len(dataset))
    return Subset(dataset, np.sort(order[held_out:])), Subset(dataset, np.sort(order[:held_out]))
