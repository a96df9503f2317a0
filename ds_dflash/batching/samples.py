"""The samples as the planner sees them: which are kept, how long they count, and in which blocks they are planned.

Below ten million rows an epoch is one block. From there on it is cut into blocks of about 2^20 consecutive places
of a keyed permutation of all rows, each grouped and ordered for itself, so that planning needs memory for one block
only. (`sorted` cuts the rows as they stand, the same in every epoch.) Lengths are read in slices and never copied.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

from ds_dflash.batching.permutation import IndexPermutation
from ds_dflash.batching.settings import PlanSettings
from ds_dflash.errors import UserError

BLOCKS_FROM_ROWS = 10_000_000
BLOCK_ROWS = 1 << 20


class Samples:
    """lengths: integers [rows], tokens, possibly memory-mapped; raises UserError if no plan can be made of them."""

    def __init__(self, lengths: np.ndarray, settings: PlanSettings) -> None:
        if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
            raise UserError(f"lengths are {lengths.dtype} {list(lengths.shape)}; they must be integers [rows]")
        assert len(lengths) < 1 << 31, "sample ids are int32"
        self._lengths = lengths
        self._budget = settings.token_budget
        self._drops = settings.oversize == "drop"
        self._permuted = settings.grouping != "sorted"
        self._seed = settings.seed
        self.accounting = self._account(settings)
        blocked = len(lengths) >= BLOCKS_FROM_ROWS
        self.num_blocks = -(-len(lengths) // BLOCK_ROWS) if blocked else 1

    def _slices(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self._lengths), BLOCK_ROWS):
            yield self._lengths[start : start + BLOCK_ROWS]

    def _account(self, settings: PlanSettings) -> dict[str, int]:
        """Rows in = kept + empty + too_long; of the kept, `truncated` count as the budget."""
        rows, empty, long = len(self._lengths), 0, 0
        shortest, longest = np.iinfo(np.int64).max, 0
        for lengths in self._slices():
            lowest, highest = int(lengths.min()), int(lengths.max())
            if lowest < 0:
                raise UserError(f"a sample has the length {lowest}; lengths must not be negative")
            if highest > self._budget:
                long += int(np.count_nonzero(lengths > self._budget))
            if lowest == 0:
                filled = lengths[lengths > 0]
                empty += len(lengths) - len(filled)
                lowest = int(filled.min()) if len(filled) else shortest
            shortest, longest = min(shortest, lowest), max(longest, highest)
        if empty == rows:
            raise UserError(f"there is nothing to train on: {rows} samples, {empty} of them of length 0")
        if shortest > self._budget:
            raise UserError(
                f"token_budget is {self._budget} and the shortest sample has {shortest} tokens; "
                "the budget must hold at least one sample"
            )
        if long and settings.oversize == "error":
            raise UserError(
                f"{long} samples are longer than token_budget {self._budget} (the longest has {longest} tokens); "
                "raise the budget, or set oversize to truncate or drop"
            )
        dropped = long if self._drops else 0
        kept = rows - empty - dropped
        return {"rows": rows, "kept": kept, "empty": empty, "too_long": dropped, "truncated": long - dropped}

    def block(self, number: int, epoch: int) -> np.ndarray:
        """Ids of the samples of one block that are kept, int32, in no particular order (may be none)."""
        rows = len(self._lengths)
        start, stop = rows * number // self.num_blocks, rows * (number + 1) // self.num_blocks
        ids = np.arange(start, stop)
        if self.num_blocks > 1 and self._permuted:
            ids = IndexPermutation(rows, np.random.SeedSequence(self._seed, spawn_key=(epoch,)))(ids)
        if self.accounting["kept"] < rows:
            lengths = self._lengths[ids]
            keep = lengths > 0
            if self._drops:
                keep &= lengths <= self._budget
            ids = ids[keep]
        return ids.astype(np.int32)

    def effective(self, ids: np.ndarray) -> np.ndarray:
        """The lengths that samples count in a plan, int32: at most the budget."""
        return np.minimum(self._lengths[ids], self._budget).astype(np.int32, copy=False)

    def kept_lengths(self) -> Iterator[np.ndarray]:
        """The lengths in a plan of all samples that are kept, int32, in slices of the rows."""
        for lengths in self._slices():
            kept = lengths[lengths > 0]
            if self._drops:
                kept = kept[kept <= self._budget]
            yield np.minimum(kept, self._budget).astype(np.int32, copy=False)

    def digest(self) -> str:
        """A digest of all lengths, whatever integer type they are stored in."""
        digest = hashlib.blake2b(digest_size=16)
        for lengths in self._slices():
            digest.update(np.ascontiguousarray(lengths, np.dtype("<i4")).data)
        return digest.hexdigest()
