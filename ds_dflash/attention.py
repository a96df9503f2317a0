"""Attention of drafter blocks over their own slots and the context before their anchor.

Tensors are packed: the context of all rows lies end to end, and so do their blocks, so nothing is padded. For a
block with anchor a, slot k sees (arXiv 2602.06036, and what serving engines do):

    full layer      context positions p < a of its own row; every slot of its own block
    sliding layer   a + k - (window - 1) <= p < a; slots j <= k of its own block

Three forms give the same numbers:

    split   scores over the context and over the block's own slots are two products joined by one softmax, so the
            [blocks*B, blocks*B] part never exists. Anchors are sorted within a row: a group of neighbouring anchors
            reads only the keys up to its largest one, and group sizes bound the score buffer to about
            `SCORES_PER_GROUP` numbers. The backward rebuilds the probabilities from the saved log-sum-exp.
    flex    torch's flex attention with a block mask; the choice on CUDA (backward not available on CPU).
    dense   one masked softmax over everything, for tests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ds_dflash.pieces import multiplies_in_fp32

SCORES_PER_GROUP = 1 << 20


def attention_form(device: torch.device) -> str:
    """The form that a device is best served by."""
    return "flex" if device.type == "cuda" else "split"


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Which blocks belong to which row, and where their anchors are.

    context_offsets: first packed context token of each row, and the end ([rows + 1]).
    block_offsets: first block of each row, and the end ([rows + 1]).
    anchors: int64 [blocks], the anchors' positions in their rows, ascending within a row.
    block_size: slots of a block, the anchor included.
    """

    context_offsets: tuple[int, ...]
    block_offsets: tuple[int, ...]
    anchors: Tensor
    block_size: int

    @cached_property
    def anchor_list(self) -> list[int]:
        """The anchors as numbers on the host: group boundaries follow from them."""
        return self.anchors.tolist()

    @cached_property
    def context_rows(self) -> Tensor:
        """int64 [tokens]: the row of each packed context token."""
        return _rows(self.context_offsets, self.anchors.device)

    @cached_property
    def block_rows(self) -> Tensor:
        """int64 [blocks]: the row of each block."""
        return _rows(self.block_offsets, self.anchors.device)

    @cached_property
    def context_positions(self) -> Tensor:
        """int64 [tokens]: the position of each packed context token in its row."""
        starts = torch.tensor(self.context_offsets[:-1], device=self.anchors.device)
        tokens = torch.arange(self.context_offsets[-1], device=self.anchors.device)
        return tokens - starts[self.context_rows]

    @cached_property
    def slot_positions(self) -> Tensor:
        """int64 [blocks, block_size]: slot k of a block is at position anchor + k of its row."""
        return self.anchors[:, None] + torch.arange(self.block_size, device=self.anchors.device)


def _rows(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    counts = torch.tensor(offsets).diff()
    return torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)


def block_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: BlockLayout,
    window: int | None,
    implementation: str,
) -> Tensor:
    """Grouped-query attention of every block, scale head_dim ** -0.5.

    query: [blocks, B, heads, head_dim]; context_key and context_value: [tokens, kv_heads, head_dim]; block_key and
    block_value: [blocks, B, kv_heads, head_dim]; all of one dtype, keys and queries already rotated.
    window: None for a full layer, else the sliding window in tokens (at least B).
    implementation: "split", "flex" or "dense". Returns [blocks, B, heads, head_dim].
    """
    if implementation == "split":
        tensors = [query, context_key, context_value, block_key, block_value]
        if multiplies_in_fp32(query.device.type, query.dtype):
            tensors = [tensor.float() for tensor in tensors]
        return _SplitAttention.apply(*tensors, layout, window).to(query.dtype)
    form = {"flex": _flex_attention, "dense": _dense_attention}[implementation]
    key = torch.cat([context_key, block_key.flatten(0, 1)])
    value = torch.cat([context_value, block_value.flatten(0, 1)])
    return form(query.flatten(0, 1), key, value, layout, window).view_as(query)


@dataclass(frozen=True)
class _Group:
    """Neighbouring blocks of one row that are computed together, and the packed context tokens they read."""

    blocks: slice
    keys: slice
    first_position: int


def _groups(layout: BlockLayout, window: int | None, heads: int) -> Iterator[_Group]:
    for row, row_start in enumerate(layout.context_offsets[:-1]):
        start, row_end = layout.block_offsets[row : row + 2]
        while start < row_end:
            first = 0 if window is None else max(0, layout.anchor_list[start] - window + 1)
            end = start + 1
            while end < row_end:
                scores = (end + 1 - start) * heads * layout.block_size * (layout.anchor_list[end] - first)
                if scores > SCORES_PER_GROUP:
                    break
                end += 1
            last = layout.anchor_list[end - 1]
            yield _Group(slice(start, end), slice(row_start + first, row_start + last), first)
            start = end


def _by_kv_head(tensor: Tensor, kv_heads: int) -> Tensor:
    """[blocks, B, heads, d] -> [kv_heads, blocks, repeats * B, d], so that grouped heads need no copied keys."""
    blocks, block_size, heads, head_dim = tensor.shape
    grouped = tensor.view(blocks, block_size, kv_heads, heads // kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    return grouped.reshape(kv_heads, blocks, -1, head_dim)


def _from_kv_head(tensor: Tensor, block_size: int) -> Tensor:
    """The inverse of `_by_kv_head`."""
    kv_heads, blocks, _, head_dim = tensor.shape
    grouped = tensor.view(kv_heads, blocks, -1, block_size, head_dim).permute(1, 3, 0, 2, 4)
    return grouped.reshape(blocks, block_size, -1, head_dim)


def _hide(context: Tensor, own: Tensor, layout: BlockLayout, group: _Group, window: int | None) -> None:
    """Set the scores that a slot may not see to -inf, in place.

    context: [kv_heads, blocks, repeats, B, keys]; own: [kv_heads, blocks, repeats, B, B].
    """
    anchors = layout.anchors[group.blocks]
    keys = context.shape[-1]
    sure = layout.anchor_list[group.blocks.start] - group.first_position if window is None else 0
    if sure < keys:
        positions = torch.arange(group.first_position + sure, group.first_position + keys, device=anchors.device)
        hidden = positions >= anchors[:, None, None]
        if window is not None:
            oldest = layout.slot_positions[group.blocks] - (window - 1)
            hidden = hidden | (positions < oldest[:, :, None])
        context[..., sure:].masked_fill_(hidden[:, None], -torch.inf)
    if window is not None:
        slots = torch.arange(layout.block_size, device=anchors.device)
        own.masked_fill_(slots > slots[:, None], -torch.inf)


def _products(query: Tensor, context: Tensor, own: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scaled fp32 products [kv_heads, blocks, queries, keys] and [.., B] of what stands in for queries and keys.

    query: [kv_heads, blocks, queries, d], context: [kv_heads, keys, d], own: [kv_heads, blocks, B, d].
    """
    nothing = query.new_empty(1)
    with_context = torch.baddbmm(nothing, _flat(query), context.mT, beta=0, alpha=scale)
    with_own = torch.baddbmm(nothing, query.flatten(0, 1), own.flatten(0, 1).mT, beta=0, alpha=scale)
    shape = query.shape[:3]
    return with_context.float().view(*shape, context.shape[1]), with_own.float().view(*shape, own.shape[2])


def _scores(
    query: Tensor, context_key: Tensor, own_key: Tensor, layout: BlockLayout, group: _Group, window: int | None
) -> tuple[Tensor, Tensor]:
    """`_products` of queries and keys of one group with -inf where a slot may not see."""
    context, own = _products(query, context_key, own_key, query.shape[-1] ** -0.5)
    by_slot = (-1, layout.block_size)
    _hide(context.unflatten(2, by_slot), own.unflatten(2, by_slot), layout, group, window)
    return context, own


class _SplitAttention(torch.autograd.Function):
    """Context and own block stay two tensors throughout: joined they would be copied again and again."""

    @staticmethod
    def forward(ctx, query, context_key, context_value, block_key, block_value, layout, window):
        kv_heads, heads = context_key.shape[1], query.shape[2]
        grouped_query = _by_kv_head(query, kv_heads)
        keys, values = context_key.transpose(0, 1), context_value.transpose(0, 1)  # [kv_heads, tokens, d]
        own_keys, own_values = block_key.permute(2, 0, 1, 3), block_value.permute(2, 0, 1, 3)
        output = torch.empty_like(grouped_query)
        log_sum_exp = torch.empty(grouped_query.shape[:3], device=query.device)
        for group in _groups(layout, window, heads):
            blocks = group.blocks
            context, own = _scores(
                grouped_query[:, blocks], keys[:, group.keys], own_keys[:, blocks], layout, group, window
            )
            highest = own.amax(-1, keepdim=True)
            if context.shape[-1]:
                highest = torch.maximum(highest, context.amax(-1, keepdim=True))
            context.sub_(highest).exp_()
            own.sub_(highest).exp_()
            total = context.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
            log_sum_exp[:, blocks] = (highest + total.log())[..., 0]
            weighted = _weighted(
                context.to(query.dtype), own.to(query.dtype), values[:, group.keys], own_values[:, blocks]
            )
            output[:, blocks] = weighted / total
        ctx.save_for_backward(grouped_query, context_key, context_value, block_key, block_value, log_sum_exp)
        ctx.layout, ctx.window, ctx.heads = layout, window, heads
        return _from_kv_head(output, layout.block_size)

    @staticmethod
    def backward(ctx, grad_output):
        query, context_key, context_value, block_key, block_value, log_sum_exp = ctx.saved_tensors
        layout, window, dtype = ctx.layout, ctx.window, query.dtype
        keys, values = context_key.transpose(0, 1), context_value.transpose(0, 1)
        own_keys, own_values = block_key.permute(2, 0, 1, 3), block_value.permute(2, 0, 1, 3)
        grad_output = _by_kv_head(grad_output.contiguous(), keys.shape[0])
        grad_query = torch.empty_like(query)
        grad_keys = torch.zeros(keys.shape, device=keys.device)  # fp32: many groups add to one key
        grad_values = torch.zeros(values.shape, device=values.device)
        grad_own_keys = torch.empty(own_keys.shape, dtype=dtype, device=query.device)
        grad_own_values = torch.empty_like(grad_own_keys)
        for group in _groups(layout, window, ctx.heads):
            blocks, seen = group.blocks, group.keys
            group_query, group_grad = query[:, blocks], grad_output[:, blocks]
            context, own = _scores(group_query, keys[:, seen], own_keys[:, blocks], layout, group, window)
            for scores in (context, own):
                scores.sub_(log_sum_exp[:, blocks, :, None]).exp_()
            grad_context, grad_own = _products(group_grad, values[:, seen], own_values[:, blocks])
            # of the gradient and the output, which was not kept
            inner = torch.linalg.vecdot(grad_context, context) + torch.linalg.vecdot(grad_own, own)
            grad_context.sub_(inner[..., None]).mul_(context)
            grad_own.sub_(inner[..., None]).mul_(own)
            context, own, grad_context, grad_own = (t.to(dtype) for t in (context, own, grad_context, grad_own))
            grad_query[:, blocks] = _weighted(grad_context, grad_own, keys[:, seen], own_keys[:, blocks])
            grad_keys[:, seen] += _flat(grad_context).mT @ _flat(group_query)
            grad_values[:, seen] += _flat(context).mT @ _flat(group_grad)
            grad_own_keys[:, blocks] = grad_own.mT @ group_query
            grad_own_values[:, blocks] = own.mT @ group_grad
        scale = query.shape[-1] ** -0.5
        return (
            _from_kv_head(grad_query, layout.block_size).mul_(scale),
            grad_keys.transpose(0, 1).mul_(scale).to(dtype),
            grad_values.transpose(0, 1).to(dtype),
            grad_own_keys.permute(1, 2, 0, 3) * scale,
            grad_own_values.permute(1, 2, 0, 3),
            None,
            None,
        )


def _flat(tensor: Tensor) -> Tensor:
    """[kv_heads, blocks, queries, n] -> [kv_heads, blocks * queries, n]."""
    return tensor.flatten(1, 2)


def _weighted(context_weights: Tensor, own_weights: Tensor, context: Tensor, own: Tensor) -> Tensor:
    """Sum of context [kv_heads, keys, d] and own [kv_heads, blocks, B, d] under weights [.., queries, keys or B]."""
    from_context = (_flat(context_weights) @ context).view(*context_weights.shape[:3], -1)
    return from_context + own_weights @ own


def _visibility(layout: BlockLayout, window: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Whether packed query slots see packed keys (context tokens, then block slots); the two indices broadcast.

    What it returns holds tensors only: a layout's own numbers in it would make flex attention compile anew for each.
    """
    tokens, blocks, device = layout.context_offsets[-1], layout.block_offsets[-1], layout.anchors.device
    slot = torch.arange(layout.block_size, device=device).repeat(blocks)
    block = torch.arange(blocks, device=device).repeat_interleave(layout.block_size)
    anchor, row = layout.anchors[block], layout.block_rows[block]
    key_row = torch.cat([layout.context_rows, torch.full_like(row, -1)])
    key_block = torch.cat([torch.full((tokens,), -1, device=device), block])
    key_position = torch.cat([layout.context_positions, slot])  # in its row, or in its block

    def sees_in_full(query: Tensor, key: Tensor) -> Tensor:
        context = (key_row[key] == row[query]) & (key_position[key] < anchor[query])
        return context | (key_block[key] == block[query])

    if window is None:
        return sees_in_full
    oldest = anchor + slot - (window - 1)

    def sees_in_window(query: Tensor, key: Tensor) -> Tensor:
        position = key_position[key]
        context = (key_row[key] == row[query]) & (position < anchor[query]) & (position >= oldest[query])
        return context | ((key_block[key] == block[query]) & (position <= slot[query]))

    return sees_in_window


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout, window: int | None) -> Tensor:
    queries = torch.arange(query.shape[0], device=query.device)
    keys = torch.arange(key.shape[0], device=query.device)
    mask = _visibility(layout, window)(queries[:, None], keys)
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return output.transpose(0, 1)


@lru_cache(maxsize=2)
def _block_mask(layout: BlockLayout, window: int | None) -> BlockMask:
    """The mask of one kind of layer; kept, because all layers of a forward have one of two kinds."""
    visible = _visibility(layout, window)
    queries = layout.block_offsets[-1] * layout.block_size
    keys = layout.context_offsets[-1] + queries
    return create_block_mask(
        lambda _, __, query, key: visible(query, key), None, None, queries, keys, layout.anchors.device
    )


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout, window: int | None) -> Tensor:
    mask = _block_mask(layout, window)
    heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    attend: Any = _compiled_flex_attention() if query.is_cuda else flex_attention
    return attend(*heads_first, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # Two kinds of layers, with and without gradients, one or more mask blocks a side: above torch's limit of 8 forms,
    # behind which flex attention would hold all scores at once.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=True)
