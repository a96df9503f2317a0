"""Block attention in all its forms against a loop over slots that is written from the rules alone."""

from dataclasses import dataclass

import pytest
import torch
from drafters import drafter_config, make_drafter, sliding

from ds_dflash import attention
from ds_dflash.attention import BlockLayout, block_attention


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    anchors: tuple[tuple[int, ...], ...]
    block_size: int
    heads: tuple[int, int]  # query heads, key and value heads
    head_dim: int = 8

    def layout(self):
        context = [sum(self.lengths[:row]) for row in range(len(self.lengths) + 1)]
        counts = [len(row) for row in self.anchors]
        blocks = [sum(counts[:row]) for row in range(len(counts) + 1)]
        flat = torch.tensor([anchor for row in self.anchors for anchor in row])
        return BlockLayout(tuple(context), tuple(blocks), flat, self.block_size)

    def inputs(self, seed=0, dtype=torch.float32):
        """query, context_key, context_value, block_key, block_value."""
        generator = torch.Generator().manual_seed(seed)
        blocks, tokens = sum(len(row) for row in self.anchors), sum(self.lengths)
        heads, kv_heads = self.heads
        shapes = [
            (blocks, self.block_size, heads),
            *[(tokens, kv_heads)] * 2,
            *[(blocks, self.block_size, kv_heads)] * 2,
        ]
        tensors = [torch.randn(*shape, self.head_dim, generator=generator) for shape in shapes]
        return [tensor.to(dtype).requires_grad_() for tensor in tensors]


CASES = {
    "one_row": Case((9,), ((2, 5, 7),), 3, (2, 1)),
    "rows_without_blocks": Case((4, 7, 3, 12, 5), ((), (0, 1, 2, 6), (), (3, 4, 10, 11), ()), 4, (4, 2)),
    "only_the_anchor_at_0": Case((5, 6), ((0,), (0, 5)), 3, (2, 2)),
    "anchors_close_together": Case((16,), (tuple(range(3, 13)),), 4, (6, 2)),
    "one_slot": Case((8, 8), ((1, 2, 7), (4,)), 1, (4, 1)),
    "large_blocks": Case((20, 3), ((0, 9, 15), (1,)), 16, (2, 1)),
}
ALL_CASES = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
# None: a full layer. A window of the block's own size, one that cuts, one that is larger than any context.
WINDOWS = pytest.mark.parametrize("window", [None, "block", "block+2", 100])


def window_of(window, case):
    return {"block": case.block_size, "block+2": case.block_size + 2}.get(window, window)


NAMES = ("output", "query", "context_key", "context_value", "block_key", "block_value")


def visible_context(anchor, slot, window):
    """Context positions that a slot sees."""
    first = 0 if window is None else max(0, anchor + slot - (window - 1))
    return range(first, anchor)


def visible_slots(slot, block_size, window):
    return range(block_size) if window is None else range(slot + 1)


def reference(query, context_key, context_value, block_key, block_value, case, window):
    heads, kv_heads = case.heads
    starts = [sum(case.lengths[:row]) for row in range(len(case.lengths))]
    places = [(start, anchor) for start, row in zip(starts, case.anchors, strict=True) for anchor in row]
    output = []
    for block, (start, anchor) in enumerate(places):
        for slot in range(case.block_size):
            tokens = [start + position for position in visible_context(anchor, slot, window)]
            slots = list(visible_slots(slot, case.block_size, window))
            keys = torch.cat([context_key[tokens], block_key[block, slots]])
            values = torch.cat([context_value[tokens], block_value[block, slots]])
            keys, values = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (keys, values))
            scores = torch.einsum("hd,nhd->hn", query[block, slot], keys) / case.head_dim**0.5
            output.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
    return torch.stack(output).view(len(places), case.block_size, heads, case.head_dim)


def with_gradients(form, inputs):
    output = form(inputs)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, direction)]


def assert_all_close(results, expected, tolerance):
    """The largest error of every tensor, as a share of its largest number."""
    for name, result, truth in zip(NAMES[: len(results)], results, expected, strict=True):
        error = (result.double() - truth.double()).abs().max() / truth.abs().max().clamp(min=1e-30)
        assert result.shape == truth.shape, name
        assert error <= tolerance, f"{name}: {error:.1e}"


@ALL_CASES
@WINDOWS
def test_outputs_and_gradients_equal_a_loop_over_slots(case, window):
    window = window_of(window, case)
    expected = with_gradients(lambda inputs: reference(*inputs, case, window), case.inputs(dtype=torch.float64))
    for implementation in ("split", "dense"):
        results = with_gradients(
            lambda inputs, form=implementation: block_attention(*inputs, case.layout(), window, form), case.inputs()
        )
        assert_all_close(results, expected, tolerance=2e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 6])
def test_the_flex_form_gives_what_the_split_form_gives(window):
    case = CASES["rows_without_blocks"]
    with torch.no_grad():  # flex attention has no backward on the CPU
        inputs = [tensor.detach() for tensor in case.inputs()]
        split, flex = (block_attention(*inputs, case.layout(), window, form) for form in ("split", "flex"))
    assert_all_close([flex], [split], tolerance=2e-6)


@ALL_CASES
@WINDOWS
def test_the_mask_of_flex_attention_shows_what_the_rules_show(case, window):
    window, layout = window_of(window, case), case.layout()
    tokens, blocks = sum(case.lengths), len(layout.anchors)
    queries, keys = torch.arange(blocks * case.block_size), torch.arange(tokens + blocks * case.block_size)
    mask = attention._visibility(layout, window)(queries[:, None], keys)
    for query in queries.tolist():
        block, slot = divmod(query, case.block_size)
        start = layout.context_offsets[layout.block_rows[block]]
        own = tokens + block * case.block_size
        seen = [start + position for position in visible_context(layout.anchor_list[block], slot, window)]
        seen += [own + other for other in visible_slots(slot, case.block_size, window)]
        assert mask[query].nonzero()[:, 0].tolist() == seen


@pytest.mark.parametrize("window", [None, 6])
def test_the_mask_of_flex_attention_is_made_of_tensors_alone(window):
    """Numbers of a layout in it would make torch compile flex attention for every micro-batch, and soon give up."""
    visible = attention._visibility(CASES["one_row"].layout(), window)
    assert all(isinstance(cell.cell_contents, torch.Tensor) for cell in visible.__closure__)


@pytest.mark.parametrize("scores", [1, 300, 1000])
@WINDOWS
def test_the_size_of_groups_changes_nothing(monkeypatch, window, scores):
    case = CASES["anchors_close_together"]
    window = window_of(window, case)

    def split(inputs):
        return block_attention(*inputs, case.layout(), window, "split")

    whole = with_gradients(split, case.inputs())
    monkeypatch.setattr(attention, "SCORES_PER_GROUP", scores)
    assert_all_close(with_gradients(split, case.inputs()), whole, tolerance=1e-6)


@ALL_CASES
@WINDOWS
@pytest.mark.parametrize("limit", [1, 300, 1 << 20])
def test_groups_hold_every_block_once_and_bound_the_scores(monkeypatch, case, window, limit):
    monkeypatch.setattr(attention, "SCORES_PER_GROUP", limit)
    heads, layout = case.heads[0], case.layout()
    groups = list(attention._groups(layout, window_of(window, case), heads))
    assert [block for group in groups for block in range(*group.blocks.indices(10**6))] == list(
        range(len(layout.anchors))
    )
    for group in groups:
        blocks = group.blocks.stop - group.blocks.start
        assert blocks == 1 or blocks * heads * case.block_size * (group.keys.stop - group.keys.start) <= limit


@pytest.mark.parametrize("window", [None, 24])
def test_bf16_is_as_near_to_the_truth_as_its_rounding_allows(window):
    case = Case((64, 48), (tuple(range(5, 60, 4)), (0, 7, 30)), 8, (4, 2), head_dim=32)
    rounded = [tensor.detach().bfloat16() for tensor in case.inputs()]
    for implementation in ("split", "dense"):
        results, truth = (
            with_gradients(
                lambda inputs, form=implementation: block_attention(*inputs, case.layout(), window, form),
                [tensor.to(dtype).requires_grad_() for tensor in rounded],
            )
            for dtype in (torch.bfloat16, torch.float32)
        )
        assert {tensor.dtype for tensor in results} == {torch.bfloat16}
        assert_all_close(results, truth, tolerance=2e-2)


@ALL_CASES
@WINDOWS
def test_context_at_or_after_an_anchor_and_of_other_rows_is_never_seen(case, window):
    window, layout = window_of(window, case), case.layout()
    query, context_key, context_value, *own = [tensor.detach() for tensor in case.inputs()]
    before = block_attention(query, context_key, context_value, *own, layout, window, "split")
    for block, anchor in enumerate(layout.anchor_list):
        unseen = (layout.context_rows != layout.block_rows[block]) | (layout.context_positions >= anchor)
        changed = [
            torch.where(unseen[:, None, None], 1e3 * torch.randn_like(tensor), tensor)
            for tensor in (context_key, context_value)
        ]
        after = block_attention(query, *changed, *own, layout, window, "split")
        assert torch.equal(before[block], after[block])


def model_case():
    """A drafter's inputs: rows of 9, 6 and 12 tokens, overlapping blocks of 4."""
    case = Case((9, 6, 12), ((1, 2, 4), (), (0, 5, 6, 11)), 4, (4, 2))
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(27, 32, generator=generator)
    return case.layout(), features, torch.randn(7, 4, 16, generator=generator)


@pytest.mark.parametrize("implementation", ["split", "dense"])
@pytest.mark.parametrize("fields", [{}, sliding(5, layers=3)], ids=["full", "sliding"])
def test_no_layer_of_a_drafter_sees_features_at_or_after_an_anchor_or_of_other_rows(fields, implementation):
    drafter = make_drafter(drafter_config(**fields), implementation)
    layout, features, embeddings = model_case()
    before = drafter(features, embeddings, layout)
    for block, anchor in enumerate(layout.anchor_list):
        unseen = (layout.context_rows != layout.block_rows[block]) | (layout.context_positions >= anchor)
        after = drafter(torch.where(unseen[:, None], 100.0, features), embeddings, layout)
        assert torch.equal(before[block], after[block])
        if anchor:  # the feature just before the anchor is seen
            seen = (layout.context_rows == layout.block_rows[block]) & (layout.context_positions == anchor - 1)
            after = drafter(torch.where(seen[:, None], 100.0, features), embeddings, layout)
            assert not torch.allclose(before[block], after[block])


@pytest.mark.parametrize("fields", [{}, sliding(5, layers=3)], ids=["full", "sliding"])
def test_blocks_give_the_same_alone_as_packed_with_others(fields):
    drafter = make_drafter(drafter_config(**fields))
    layout, features, embeddings = model_case()
    packed = drafter(features, embeddings, layout)
    for block, anchor in enumerate(layout.anchor_list):
        row = features[layout.context_rows == layout.block_rows[block]]
        alone = BlockLayout((0, len(row)), (0, 1), torch.tensor([anchor]), 4)
        torch.testing.assert_close(drafter(row, embeddings[block : block + 1], alone)[0], packed[block])


def test_the_gradient_of_a_feature_is_zero_where_no_block_may_see_it():
    layout, features, embeddings = model_case()
    features.requires_grad_()
    make_drafter()(features, embeddings, layout).square().sum().backward()
    is_seen = [position < last for length, last in ((9, 4), (6, 0), (12, 11)) for position in range(length)]
    assert features.grad.any(dim=1).tolist() == is_seen
