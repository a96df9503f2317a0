"""Anchors, the blocks they open, and the slices that bound memory."""

import numpy as np
import pytest
import torch
from drafters import make_drafter

from ds_dflash.anchors import count_anchors, make_blocks, sample_anchors
from ds_dflash.loss import Objective
from ds_dflash.sections import TrainingSettings
from ds_dflash.step import DrafterStep

LENGTHS = (30, 8, 2, 57, 19, 40, 1, 33)


class Dataset:
    """Random rows with holes in their masks; row 2 has no two supervised tokens in a row."""

    def __init__(self, lengths=LENGTHS, seed=0):
        rng = np.random.default_rng(seed)
        self.lengths = np.array(lengths, np.int32)
        self._rows = [(rng.integers(5, 50, length), rng.random(length) < 0.8) for length in lengths]

    def __len__(self):
        return len(self.lengths)

    def rows(self, indices):
        return [self._rows[index] for index in indices]


def draw(mask, count, seed=0, epoch=0, sample_id=0):
    return sample_anchors(mask, count, seed=seed, epoch=epoch, sample_id=sample_id)


@pytest.mark.parametrize("sample_id", range(20))
@pytest.mark.parametrize("count", [1, 5, 1000])
def test_an_anchor_and_the_token_after_it_are_supervised(sample_id, count):
    mask = np.random.default_rng(sample_id).random(80) < 0.6
    anchors = draw(mask, count, sample_id=sample_id)
    valid = [position for position in range(79) if mask[position] and mask[position + 1]]
    assert len(anchors) == min(count, len(valid))
    assert set(anchors.tolist()) <= set(valid)
    assert (np.diff(anchors) > 0).all()
    assert anchors.dtype == np.int64


@pytest.mark.parametrize("length", [0, 1, 2, 9])
@pytest.mark.parametrize("supervised", [False, True])
def test_a_row_has_as_many_anchors_as_it_has_places_for_them(length, supervised):
    mask = np.full(length, supervised)
    assert draw(mask, 100).tolist() == (list(range(length - 1)) if supervised else [])


def test_anchors_follow_from_seed_epoch_and_sample_alone():
    mask = np.ones(500, bool)
    keys = [(seed, epoch, sample) for seed in (0, 1, 2) for epoch in (0, 1, 2) for sample in (0, 1, 2)]
    drawn = {key: tuple(draw(mask, 10, *key)) for key in keys}
    assert len(set(drawn.values())) == len(keys)  # also with the three numbers swapped
    for key in reversed(keys):
        assert tuple(draw(mask, 10, *key)) == drawn[key]


def test_every_place_and_every_pair_of_places_is_drawn_equally_often():
    mask, draws = np.ones(13, bool), 12_000  # 12 places
    singles, pairs = np.zeros(12), np.zeros((12, 12))
    for sample in range(draws):
        anchors = draw(mask, 2, sample_id=sample, epoch=sample % 7)
        singles[anchors] += 1
        pairs[anchors[0], anchors[1]] += 1
    expected, expected_pairs = draws / 6, draws / 66
    assert abs(singles - expected).max() < 4.5 * np.sqrt(expected * (1 - 1 / 6))
    found = pairs[np.triu_indices(12, 1)]
    assert found.sum() == draws
    assert ((found - expected_pairs) ** 2 / expected_pairs).sum() < 65 + 5 * np.sqrt(2 * 65)  # chi square


def test_large_seeds_and_sample_ids_are_numbers_like_others():
    anchors = draw(np.ones(100, bool), 10, seed=2**63, epoch=10**6, sample_id=2**40)
    assert len(set(anchors.tolist())) == 10


@pytest.mark.parametrize(
    ("length", "per_1000", "expected"), [(1000, 64, 64), (3000, 64, 192), (500, 64, 32), (10, 64, 1), (2, 0.1, 1)]
)
def test_the_number_of_anchors_follows_the_length_when_asked_to(length, per_1000, expected):
    assert count_anchors(length, None, per_1000) == expected
    assert count_anchors(length, 512, None) == 512


def step(slice_tokens=8192, kind="dflash", **training):
    generator = torch.Generator().manual_seed(0)
    embedding, head = torch.randn(50, 16, generator=generator), torch.randn(50, 16, generator=generator)
    settings = TrainingSettings(slice_tokens=slice_tokens, **(training or {"num_anchors": 12}))
    return DrafterStep(embedding, head, 3, Objective(kind, 4, 4.0), settings)


def test_the_anchors_of_a_sample_are_the_same_in_every_batch():
    dataset = Dataset()
    whole = step().blocks(dataset, np.arange(8), epoch=3)
    for samples in ([3], [5, 3, 0], [7, 6, 3, 1]):
        blocks = step().blocks(dataset, np.array(samples), epoch=3)
        for place, sample in enumerate(samples):
            mine = slice(*blocks.block_offsets[place : place + 2])
            theirs = slice(*whole.block_offsets[sample : sample + 2])
            assert np.array_equal(blocks.anchors[mine], whole.anchors[theirs])
            assert np.array_equal(blocks.labels[mine], whole.labels[theirs])


def test_anchors_per_1000_tokens_gives_long_rows_more():
    dataset = Dataset((1000, 100, 500))
    blocks = step(anchors_per_1000_tokens=40.0).blocks(dataset, np.arange(3), epoch=0)
    assert np.diff(blocks.block_offsets).tolist() == [40, 4, 20]


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_labels_and_supervision_follow_the_row_up_to_its_end(block_size):
    dataset = Dataset()
    rows = dataset.rows(range(8))
    anchors = [draw(mask, 9, sample_id=index) for index, (_, mask) in enumerate(rows)]
    anchors[0] = np.arange(30)  # up to the row's last token
    blocks = make_blocks(rows, anchors, block_size)
    number = 0
    for (ids, mask), positions in zip(rows, anchors, strict=True):
        for anchor in positions:
            slots = range(anchor, anchor + block_size)
            labels = [ids[place] if place < len(ids) else 0 for place in slots]
            supervised = [place > anchor and place < len(ids) and bool(mask[place]) for place in slots]
            assert blocks.labels[number].tolist() == labels
            assert blocks.supervised[number].tolist() == supervised
            assert blocks.row_blocks[number] == len(positions)
            assert blocks.block_lengths[number] == len(ids)
            number += 1
    assert number == len(blocks.anchors)
    assert blocks.context_offsets.tolist() == np.cumsum([0, *LENGTHS]).tolist()


def test_no_rows_have_no_blocks():
    blocks = step().blocks(Dataset(), np.zeros(0, np.int64), epoch=0)
    assert blocks.labels.shape == (0, 4)
    assert list(blocks.slices(100)) == []
    assert list(step().results(make_drafter(), torch.zeros(0, 32), blocks)) == []


@pytest.mark.parametrize("slice_tokens", [1, 4, 11, 40, 100, 10_000])
def test_slices_hold_every_block_once_and_are_bounded(slice_tokens):
    blocks = step().blocks(Dataset(), np.arange(8), epoch=0)
    tokens = np.arange(sum(LENGTHS))
    numbers = np.arange(len(blocks.anchors))
    seen = []
    for context, part in blocks.slices(slice_tokens):
        assert len(part.anchors) <= max(1, slice_tokens // 4)
        mine = numbers[len(seen) : len(seen) + len(part.anchors)]
        seen.extend(mine)
        for name in ("anchors", "row_blocks", "labels", "supervised", "block_lengths"):
            assert np.array_equal(getattr(part, name), getattr(blocks, name)[mine])
        layout, whole = part.layout(torch.device("cpu")), blocks.layout(torch.device("cpu"))
        first_tokens = tokens[context][np.array(layout.context_offsets[:-1])]
        starts = np.array(whole.context_offsets)[whole.block_rows[mine].numpy()]
        assert np.array_equal(first_tokens[layout.block_rows.numpy()], starts)  # every block has its own row's context
        assert len(tokens[context]) == layout.context_offsets[-1]
    assert seen == numbers.tolist()


@pytest.mark.parametrize("kind", ["dflash", "dpace"])
@pytest.mark.parametrize("slice_tokens", [4, 20, 60])
def test_slices_give_the_losses_and_gradients_of_one_slice(kind, slice_tokens):
    dataset, samples = Dataset(), np.arange(5)
    features = torch.randn(sum(LENGTHS[:5]), 32, generator=torch.Generator().manual_seed(5))

    def learn(slice_tokens):
        drafter, work = make_drafter(), step(slice_tokens, kind)
        parts, losses, weights = 0, [], []
        for _, result in work.results(drafter, features, work.blocks(dataset, samples, epoch=1)):
            result.loss_sum.backward()
            losses.append(result.block_loss)
            weights.append(result.block_weight)
            parts += 1
        gradients = {name: parameter.grad for name, parameter in drafter.named_parameters()}
        return parts, torch.cat(losses), torch.cat(weights), gradients

    _, losses, weights, gradients = learn(100_000)
    parts, *sliced, sliced_gradients = learn(slice_tokens)
    assert parts > 1
    torch.testing.assert_close(sliced, [losses, weights])
    for name, gradient in gradients.items():
        torch.testing.assert_close(sliced_gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
