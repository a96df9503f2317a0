"""The target's cache of several prompts of different lengths, exact for every kind of layer.

Rows are right-aligned: the last token of every row is in the last column, and what a shorter row lacks in front is
masked. So columns next to each other are tokens next to each other, and windows that count columns are right. Recurrent
state has no columns, and padding would leak into it: a forward only takes as many tokens of every row, none of them
padding. Prompts are therefore prefilled apart where their lengths differ, and joined; rows that keep different numbers
of tokens of a block are parted by that number and joined again. A part whose layers are all key-value caches is
cropped; recurrent state cannot be: the kept tokens are computed again from the state before the block, one forward for
each number of tokens.

Layers with a sliding window keep all their keys here (the mask hides what is outside of the window), for a cropped
window would lack its oldest tokens. A step copies the cache about twice; a batch of one that is cropped copies nothing
but what transformers copies.

What is touched of transformers beside the public methods of its caches is all here: `keys`, `values`,
`conv_states`, `recurrent_states` of cache layers, and that these are `DynamicLayer` and `LinearAttentionLayer`.
"""

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ds_dflash.errors import UserError

JOINED = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer)
"""The kinds of layers whose rows can be joined to a batch."""


class TargetRows:
    """What the target has seen of some rows. lengths: tokens of each row; the longest one fills all columns."""

    def __init__(self, target: PreTrainedModel, cache: DynamicCache, lengths: Sequence[int]) -> None:
        self.target = target
        self.cache = cache
        self.lengths = list(lengths)

    @classmethod
    def empty(cls, target: PreTrainedModel, rows: int = 1) -> "TargetRows":
        """Rows without a token."""
        cache = DynamicCache(config=target.config.get_text_config())
        cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
        return cls(target, cache, [0] * rows)

    @property
    def croppable(self) -> bool:
        """Whether a crop is all it takes to forget tokens."""
        return all(type(layer) in (DynamicLayer, DummyLayer) for layer in self.cache.layers)

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """The target's logits [rows, tokens, V] for the next tokens `ids` (int64 [rows, tokens]) of every row.

        Raises UserError where they are not finite.
        """
        inputs = self._padding(ids) if min(self.lengths) < max(self.lengths) else {}
        logits = self.target(input_ids=ids, cache=self.cache, use_cache=True, **inputs, **options).logits
        check_finite(logits, "target")
        self.lengths = [length + ids.shape[1] for length in self.lengths]
        return logits

    def _padding(self, ids: Tensor) -> dict[str, Tensor]:
        """Which columns are tokens, and where in its row each new token is."""
        tokens, width = ids.shape[1], max(self.lengths)
        lengths = torch.tensor(self.lengths, device=ids.device)[:, None]
        columns = torch.arange(width + tokens, device=ids.device)
        return {
            "attention_mask": (columns >= width - lengths).long(),
            "position_ids": lengths + columns[:tokens],
        }

    def select(self, rows: Sequence[int]) -> "TargetRows":
        """A copy of these rows; the original can go on without changing it."""
        lengths = [self.lengths[row] for row in rows]
        indices = torch.tensor(rows, device=self.target.device)
        cache = copy.copy(self.cache)
        cache.layers = [_select(layer, indices, max(lengths)) for layer in self.cache.layers]
        return TargetRows(self.target, cache, lengths)

    def crop(self, tokens: int) -> None:
        """Forget the last tokens of every row; only where `croppable`."""
        if tokens:
            self.cache.crop(-tokens)
        self.lengths = [length - tokens for length in self.lengths]

    def snapshot(self) -> "TargetRows | None":
        """What `keep` needs from before a block: nothing where a crop will do."""
        return None if self.croppable else self.select(range(len(self.lengths)))

    def keep(self, before: "TargetRows | None", block: Tensor, kept: Sequence[tuple[int, int]]) -> "TargetRows":
        """What is left after the forward of `block` (int64 [rows, B]).

        before: the `snapshot` before it; kept: (tokens of the block to keep, row) of the rows that go on, sorted, in
        the order that the rows then have.
        """
        parts = []
        for tokens, pairs in groupby(kept, key=lambda pair: pair[0]):
            rows = [row for _, row in pairs]
            parts.append(self._part(before, block, tokens, rows))
        return join(parts)

    def _part(self, before: "TargetRows | None", block: Tensor, tokens: int, rows: list[int]) -> "TargetRows":
        forgotten = block.shape[1] - tokens
        if before is not None and forgotten:
            part = before.select(rows)
            part.forward(block[rows, :tokens], logits_to_keep=1)
            return part
        part = self if rows == list(range(len(self.lengths))) else self.select(rows)
        part.crop(forgotten)
        return part


def join(parts: Sequence[TargetRows]) -> TargetRows:
    """The rows of all parts, in their order; the parts are used up.

    Raises UserError where there are several and the target has a layer of another kind than `JOINED`.
    """
    if len(parts) == 1:
        return parts[0]
    lengths = [length for part in parts for length in part.lengths]
    cache = parts[0].cache
    cache.layers = [_join(layers, max(lengths)) for layers in zip(*(part.cache.layers for part in parts), strict=True)]
    return TargetRows(parts[0].target, cache, lengths)


def _select(layer: Any, rows: Tensor, width: int) -> Any:
    """A copy with some rows, without the columns in front that none of them fills."""
    selected = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(selected, name, dict(value))
    selected.reorder_cache(rows)
    if isinstance(layer, DynamicLayer) and layer.get_seq_length() > width:
        selected.keys, selected.values = selected.keys[..., -width:, :], selected.values[..., -width:, :]
    return selected


def _join(layers: Sequence[Any], width: int) -> Any:
    """One layer with the rows of all, `width` columns wide."""
    joined = layers[0]
    if type(joined) not in JOINED:
        raise UserError(
            f"The target's cache has a layer of kind {type(joined).__name__}, which cannot hold prompts of different"
            " lengths: decode them one by one (--batch-size 1)."
        )
    if isinstance(joined, DynamicLayer):
        joined.keys = torch.cat([_align(layer.keys, width) for layer in layers])
        joined.values = torch.cat([_align(layer.values, width) for layer in layers])
    if isinstance(joined, LinearAttentionLayer):
        for name in ("conv_states", "recurrent_states"):
            states = [getattr(layer, name) for layer in layers]
            for index, first in states[0].items():
                if first is not None:  # some kinds have only one of the two
                    states[0][index] = torch.cat([state[index] for state in states])
    return joined


def _align(columns: Tensor, width: int) -> Tensor:
    """[rows, heads, columns, d] with empty columns in front, `width` in all."""
    return pad(columns, (0, 0, width - columns.shape[-2], 0))


def check_finite(logits: Tensor, whose: str) -> None:
    """Raise UserError if logits [..., V] have no finite largest one: nan, an overflow, or nothing but -inf."""
    if not bool(logits.amax(-1).isfinite().all()):
        raise UserError(
            f"The logits of the {whose} are not finite in {str(logits.dtype).removeprefix('torch.')}: choose another"
            " --dtype, or look for nan in its weights."
        )
