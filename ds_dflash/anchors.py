"""Anchor sampling and the blocks of a micro-batch.

The anchors of a sample are a pure function of (seed, epoch, sample id): every candidate position gets a hash as its
key and the smallest keys win. Neither batching, topology nor a resume can change them, and no generator state exists.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ds_dflash.attention import BlockLayout

Row = tuple[np.ndarray, np.ndarray]
"""`input_ids` int64 [length] and `loss_mask` bool [length] of one sample."""


def count_anchors(length: int, num_anchors: int | None, anchors_per_1000_tokens: float | None) -> int:
    """How many anchors a sample of `length` tokens gets at most (at least one)."""
    if num_anchors is not None:
        return num_anchors
    assert anchors_per_1000_tokens is not None
    return max(1, round(anchors_per_1000_tokens * length / 1000))


def sample_anchors(loss_mask: np.ndarray, count: int, *, seed: int, epoch: int, sample_id: int) -> np.ndarray:
    """Up to `count` positions, uniform without replacement, ascending, int64 [anchors].

    Position a is a candidate iff a and a + 1 are both supervised in `loss_mask` (bool [length]).
    """
    candidates = np.flatnonzero(loss_mask[:-1] & loss_mask[1:])
    if len(candidates) <= count:
        return candidates
    key = _mix(_mix(_mix(np.uint64(seed)) ^ np.uint64(epoch)) ^ np.uint64(sample_id))
    order = np.argsort(_mix(key ^ candidates.astype(np.uint64)), kind="stable")
    return np.sort(candidates[order[:count]])


def _mix(number: np.ndarray | np.uint64) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit numbers that spreads every bit."""
    value: np.ndarray = np.array(number, np.uint64, ndmin=1) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of some packed rows.

    context_offsets: int64 [rows + 1], first packed token of each row; lengths follow from it.
    block_offsets: int64 [rows + 1], first block of each row.
    anchors: int64 [blocks], positions in the rows, ascending within a row.
    row_blocks: int64 [blocks], how many blocks the row of each block has in all.
    labels: int64 [blocks, B], token a + k of the row (0 past its end); slot 0 is the anchor's own token.
    supervised: bool [blocks, B], slots k >= 1 whose token is in the row and in its loss mask.
    """

    context_offsets: np.ndarray
    block_offsets: np.ndarray
    anchors: np.ndarray
    row_blocks: np.ndarray
    labels: np.ndarray
    supervised: np.ndarray

    @property
    def block_size(self) -> int:
        return self.labels.shape[1]

    @property
    def block_lengths(self) -> np.ndarray:
        """int64 [blocks]: the length of each block's row."""
        return np.repeat(np.diff(self.context_offsets), np.diff(self.block_offsets))

    def layout(self, device: torch.device) -> BlockLayout:
        """Where the blocks are, for the attention."""
        return BlockLayout(
            tuple(self.context_offsets.tolist()),
            tuple(self.block_offsets.tolist()),
            torch.from_numpy(self.anchors).to(device),
            self.block_size,
        )

    def slices(self, max_block_tokens: int) -> Iterator[tuple[slice, "Blocks"]]:
        """Cut into parts of at most `max_block_tokens` block tokens (one block at least).

        Yields (packed context tokens of the part, its blocks). Parts are whole rows where a row fits; a row that
        does not fit is cut between blocks, and each of its parts reads the row's context again.
        """
        limit = max(1, max_block_tokens // self.block_size)
        row, rows = 0, len(self.block_offsets) - 1
        while row < rows:
            first = int(self.block_offsets[row])
            end = int(np.searchsorted(self.block_offsets, first + limit, side="right")) - 1
            if end > row:
                yield self._part(row, end, first, int(self.block_offsets[end]))
                row = end
                continue
            last = int(self.block_offsets[row + 1])
            for start in range(first, last, limit):
                yield self._part(row, row + 1, start, min(start + limit, last))
            row += 1

    def _part(self, row: int, row_end: int, block: int, block_end: int) -> tuple[slice, "Blocks"]:
        tokens = self.context_offsets[row : row_end + 1]
        blocks = np.clip(self.block_offsets[row : row_end + 1], block, block_end) - block
        part = Blocks(
            tokens - tokens[0],
            blocks,
            self.anchors[block:block_end],
            self.row_blocks[block:block_end],
            self.labels[block:block_end],
            self.supervised[block:block_end],
        )
        return slice(int(tokens[0]), int(tokens[-1])), part


def make_blocks(rows: Sequence[Row], anchors: Sequence[np.ndarray], block_size: int) -> Blocks:
    """The blocks of `rows` (possibly none) at `anchors` (int64 [anchors of the row], ascending)."""
    lengths = np.array([len(ids) for ids, _ in rows], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.array([len(positions) for positions in anchors], np.int64)
    position = np.concatenate([*anchors, np.zeros(0, np.int64)]).astype(np.int64)
    slots = position[:, None] + np.arange(block_size)
    inside = slots < np.repeat(lengths, counts)[:, None]
    token = np.where(inside, np.repeat(starts[:-1], counts)[:, None] + slots, 0)
    ids = np.concatenate([*(ids for ids, _ in rows), np.zeros(0, np.int64)])
    mask = np.concatenate([*(mask for _, mask in rows), np.zeros(0, bool)])
    supervised = mask[token] & inside
    supervised[:, 0] = False
    labels = np.where(inside, ids[token], 0)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Blocks(starts, offsets, position, np.repeat(counts, counts), labels, supervised)
