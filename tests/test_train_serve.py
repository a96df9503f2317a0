"""What is trained is what is served: for every kind of target and of layers, at every anchor.

Training: a target's layers up to the last tap, loaded from shards, capture a padded batch; blocks at all positions, so
that they overlap. Serving: the whole target's features join the drafter's context piece by piece.
"""

from dataclasses import dataclass
from functools import cache

import learning
import numpy as np
import pytest
import small_targets
import torch
from learning import CPU, random_rows
from torch import Tensor
from transformers import PreTrainedModel

from ds_dflash.anchors import make_blocks
from ds_dflash.decode import DraftContext, Drafter, SpeculativeDecoder
from ds_dflash.drafter import DFlashDraftModel
from ds_dflash.step import DrafterStep
from ds_dflash.target import TapRecorder, Target, decoder_layers, load_whole, open_target

TAPS, BLOCK_SIZE, WINDOW = [1, 4], 4, 6
LAYERS = {
    "full": ["full_attention"] * 2,
    "sliding": ["sliding_attention"] * 2,
    "mixed": ["sliding_attention", "full_attention"],
}
EVERY_KIND = pytest.mark.parametrize("kind", small_targets.KINDS)
ALL_LAYERS = pytest.mark.parametrize("layers", LAYERS)


@dataclass
class Pair:
    """A target as training and as decoding load it, and a drafter that has learnt a little."""

    capturing: Target
    whole: PreTrainedModel
    drafter: DFlashDraftModel
    step: DrafterStep

    def training_logits(self, rows: list[np.ndarray], features: Tensor) -> list[Tensor]:
        """[length, B, V] of each row: the training blocks of all of its positions, in one pass."""
        hidden = []

        def recording(*inputs):
            hidden.append(self.drafter(*inputs))
            return hidden[-1]

        blocks = make_blocks(
            [(ids, np.ones(len(ids), bool)) for ids in rows], [np.arange(len(ids)) for ids in rows], BLOCK_SIZE
        )
        list(self.step.results(recording, features, blocks))
        return list((torch.cat(hidden) @ self.step.head.T).split([len(ids) for ids in rows]))


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")

    @cache
    def load(kind):
        model = small_targets.build(small_targets.KINDS[kind])
        settings = learning.target_settings(small_targets.write(model, root / kind, max_shard_size="20KB"))
        checkpoint = open_target(settings)
        return (
            checkpoint,
            Target.load(checkpoint, settings, TAPS, CPU, zero=None),
            load_whole(checkpoint, settings, CPU),
        )

    @cache
    def train(kind, layers):
        checkpoint, capturing, whole = load(kind)
        fields = {"layer_types": LAYERS[layers], "sliding_window": WINDOW if layers != "full" else None}
        config = learning.config_for(checkpoint, TAPS, **fields)
        step, drafter = learning.step_for(checkpoint, config), learning.new_drafter(config)
        first = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
        data = learning.Samples(random_rows(11, 20, 6))
        learning.learn(drafter, step, data, capturing.capture(data.ids), updates=6, rate=2e-2)
        assert all((tensor - first[name]).abs().mean() > 0.01 for name, tensor in drafter.state_dict().items())
        return Pair(capturing, whole, drafter.requires_grad_(False), step)

    return train


def assert_near(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= tolerance, f"relative error {error:.1e}"


def whole_features(whole: PreTrainedModel, ids: np.ndarray) -> Tensor:
    with TapRecorder(decoder_layers(whole), TAPS) as recorded:
        whole(input_ids=torch.from_numpy(ids)[None])
        return torch.cat([tap[0] for tap in recorded.hidden()], dim=-1)


@torch.no_grad()
@EVERY_KIND
@ALL_LAYERS
def test_every_training_blocks_logits_are_those_of_the_decoding_forward(pair_of, kind, layers):
    pair, rows = pair_of(kind, layers), random_rows(10, 16, 4, seed=1)
    trained = pair.training_logits(rows, pair.capturing.capture(rows))
    drafter = Drafter(pair.drafter, pair.whole)
    for ids, blocks in zip(rows, trained, strict=True):
        features, context = whole_features(pair.whole, ids), DraftContext()
        for anchor in range(len(ids)):
            drafter.extend([context], [features[max(0, anchor - 1) : anchor]])
            served = drafter.logits(torch.tensor([ids[anchor]]), [context])[0]
            assert_near(served, blocks[anchor, 1:])


class Recording(Drafter):
    """Keeps what it drafts for every row; proposes that, and every other time what it finds least likely."""

    def __init__(self, model, target):
        super().__init__(model, target)
        self.sign, self.by_context = 1, {}

    def logits(self, anchor_tokens, contexts):
        logits = super().logits(anchor_tokens, contexts)
        for context, row_logits in zip(contexts, logits, strict=True):
            self.by_context.setdefault(id(context), []).append((context.length, row_logits))
        self.sign = -self.sign
        return self.sign * logits


@torch.no_grad()
@EVERY_KIND
@ALL_LAYERS
def test_what_decoding_drafts_on_the_way_is_what_training_blocks_predict(pair_of, kind, layers):
    """Prompts of two lengths side by side; caches go back after every block, whatever was accepted of it."""
    pair, prompts = pair_of(kind, layers), [torch.from_numpy(ids) for ids in random_rows(1, 7, seed=2)]
    drafter = Recording(pair.drafter, pair.whole)
    outputs = SpeculativeDecoder(pair.whole, drafter).generate_batch(prompts, max_new_tokens=12, stop_ids=())
    rows = [output.output_ids.numpy() for output in outputs]
    trained = pair.training_logits(rows, pair.capturing.capture(rows))
    drafted = sorted(drafter.by_context.values(), key=lambda steps: steps[0][0])  # the prompt of one token first
    for steps, output, blocks in zip(drafted, outputs, trained, strict=True):
        assert len(steps) == len(output.acceptance_lengths) > 3
        for anchor, served in steps:
            assert_near(served, blocks[anchor, 1:], tolerance=5e-5)


@torch.no_grad()
@EVERY_KIND
@ALL_LAYERS
def test_changing_a_feature_changes_the_blocks_that_may_see_it_and_no_other(pair_of, kind, layers):
    """Bitwise, with a block at every position: never one whose anchor is at or before the feature, or of another row;
    never one behind every window; always the rest.
    """
    pair, rows = pair_of(kind, layers), random_rows(3, 11, 2, seed=3)
    features = pair.capturing.capture(rows)
    before = pair.training_logits(rows, features)
    reach = WINDOW - 1 if layers == "sliding" else 100
    for position in range(11):
        changed = features.clone()
        changed[3 + position] += 1.0
        first, blocks, last = pair.training_logits(rows, changed)
        assert torch.equal(first, before[0])
        assert torch.equal(last, before[2])
        is_changed = [not torch.equal(blocks[anchor], before[1][anchor]) for anchor in range(11)]
        assert is_changed == [position < anchor <= position + reach for anchor in range(11)]


@torch.no_grad()
@EVERY_KIND
@ALL_LAYERS
def test_nothing_at_or_after_an_anchor_reaches_its_block_through_overlapping_ones(pair_of, kind, layers):
    pair, rows = pair_of(kind, layers), random_rows(13, seed=4)
    features = pair.capturing.capture(rows)
    (before,) = pair.training_logits(rows, features)
    for anchor in range(0, 13, 3):
        changed = features.clone()
        changed[anchor:] = 50.0
        (blocks,) = pair.training_logits(rows, changed)
        assert torch.equal(blocks[: anchor + 1], before[: anchor + 1])
