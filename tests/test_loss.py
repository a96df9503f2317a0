"""The objective against loops written from its definition, and its reduction over an update."""

import math

import numpy as np
import pytest
import torch

from ds_dflash.anchors import make_blocks
from ds_dflash.loss import Objective, block_loss, resolve_gamma

VOCABULARY, HIDDEN = 11, 6


def random_blocks(seed=0, block_size=5):
    """Blocks of 4 rows of 14, 9, 2 and 20 tokens, with holes in the supervision."""
    rng = np.random.default_rng(seed)
    rows = [(rng.integers(0, VOCABULARY, length), rng.random(length) < 0.7) for length in (14, 9, 2, 20)]
    anchors = [np.array([0, 3, 4, 12]), np.array([1, 7]), np.zeros(0, np.int64), np.array([2, 3, 18])]
    return make_blocks(rows, anchors, block_size)


def random_head(seed=0):
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(seed))


def random_hidden(blocks, head, seed=0):
    """Hidden states that predict about half of the labels."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.rand(blocks.labels.shape, generator=generator) < 0.5
    hidden = torch.randn(*blocks.labels.shape, HIDDEN, generator=generator)
    return (hidden + 2 * right[..., None] * head[torch.from_numpy(blocks.labels)]).requires_grad_()


def sweep(hidden, head, blocks, objective, chosen=slice(None)):
    labels, supervised, row_blocks = (
        torch.from_numpy(array[chosen]) for array in (blocks.labels, blocks.supervised, blocks.row_blocks)
    )
    return block_loss(hidden[chosen], head, labels, supervised, row_blocks, objective)


def log_probabilities(hidden, head, blocks):
    """Of every slot's label, [blocks, B], differentiable."""
    logits = hidden @ head.T
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(blocks.labels)[..., None])[..., 0]


def dflash_weight(supervised, slot, gamma):
    if slot == 0 or not supervised[slot]:
        return 0.0
    return math.exp(-(slot - 1) / gamma) if gamma else 1.0


def dpace_weight(supervised, confidence, slot):
    """Sum over supervised m >= slot of the product of q up to m; q is 1 where a slot is unsupervised."""
    if not supervised[slot]:
        return 0.0
    total = 0.0
    for end in range(slot, len(supervised)):
        if supervised[end]:
            total += math.prod(confidence[place] for place in range(end + 1) if supervised[place])
    return total


def weight_of(kind, gamma, supervised, log_probability, slot):
    if kind == "dflash":
        return dflash_weight(supervised, slot, gamma)
    return dpace_weight(supervised, [0.5 * math.exp(value) + 0.5 for value in log_probability], slot)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "gamma"), [("dflash", 0.0), ("dflash", 3.0), ("dpace", 0.0)])
def test_losses_weights_and_gradients_equal_a_loop_over_slots(kind, gamma, seed):
    blocks, head = random_blocks(seed), random_head()
    hidden = random_hidden(blocks, head, seed)
    log_p = log_probabilities(hidden, head, blocks)
    block_losses = []
    for supervised, values in zip(blocks.supervised, log_p, strict=True):
        weights = [weight_of(kind, gamma, supervised, values.tolist(), slot) for slot in range(5)]
        block_losses.append(-(values * torch.tensor(weights)).sum())
    expected = torch.stack(block_losses)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), hidden)
    result = sweep(hidden, head, blocks, Objective(kind, 5, gamma))
    (gradient,) = torch.autograd.grad(result.loss_sum, hidden)
    torch.testing.assert_close(result.block_loss, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.loss_sum.detach(), expected.sum().detach())
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert not gradient[torch.from_numpy(~blocks.supervised)].any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "gamma"), [("dflash", 0.0), ("dflash", 3.0), ("dpace", 0.0)])
def test_the_weight_known_before_the_forward_is_the_sum_of_the_blocks_weights(kind, gamma, seed):
    blocks, head, objective = random_blocks(seed), random_head(), Objective(kind, 5, gamma)
    weight = objective.weight(blocks.supervised, blocks.block_offsets)
    if kind == "dflash":
        slots = [(row, slot) for row in blocks.supervised for slot in range(5)]
        assert weight == pytest.approx(sum(dflash_weight(row, slot, gamma) for row, slot in slots), rel=1e-12)
    else:
        assert weight == 3  # sequences with an anchor
    result = sweep(random_hidden(blocks, head), head, blocks, objective)
    assert float(result.block_weight.double().sum()) == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_predictions_and_acceptance_equal_a_loop_over_slots(seed):
    blocks, head = random_blocks(seed), random_head()
    hidden = random_hidden(blocks, head, seed)
    result = sweep(hidden, head, blocks, Objective("dflash", 5, 4.0))
    best = (hidden @ head.T).argmax(-1)
    for block, supervised in enumerate(blocks.supervised):
        accepted, stopped = 1, False
        for slot in range(5):
            if not supervised[slot]:  # neither stops the run nor counts
                assert result.predicted[block, slot] == -1
                assert not result.correct[block, slot]
                continue
            is_right = bool(best[block, slot] == blocks.labels[block, slot])
            assert result.predicted[block, slot] == best[block, slot]
            assert result.correct[block, slot] == is_right
            stopped = stopped or not is_right
            accepted += not stopped
        assert result.accepted[block] == accepted


def test_a_hole_in_a_block_does_not_end_its_accepted_run():
    head = torch.eye(VOCABULARY, HIDDEN)
    labels = torch.tensor([[0, 1, 2, 3, 4, 5]] * 4)
    supervised = torch.tensor([[False, True, False, True, False, True]] * 4)
    predicted = torch.tensor([[0, 1, 0, 3, 0, 5], [0, 1, 0, 3, 0, 0], [0, 1, 2, 0, 4, 5], [0, 0, 2, 3, 4, 5]])
    hidden = 5.0 * head[predicted]
    result = block_loss(hidden, head, labels, supervised, torch.full((4,), 4), Objective("dflash", 6, 0.0))
    assert result.accepted.tolist() == [4, 3, 2, 1]


def test_blocks_without_supervision_weigh_and_cost_nothing():
    blocks = make_blocks([(np.arange(6), np.zeros(6, bool))], [np.array([1, 2])], 4)
    hidden = torch.randn(2, 4, HIDDEN, requires_grad=True)
    result = sweep(hidden, random_head(), blocks, Objective("dflash", 4, 3.0))
    result.loss_sum.backward()
    assert result.loss_sum == 0
    assert not hidden.grad.any()
    assert result.accepted.tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["dflash", "dpace"])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 0, 2], [1]]])
def test_sequences_with_1_1_4_4_supervised_tokens_give_the_same_gradient_however_they_are_split(kind, split):
    """The loss of an update is a ratio of sums over all of it, not a mean of means."""
    masks = [np.arange(9) <= supervised for supervised in (1, 1, 4, 4)]
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, VOCABULARY, 9), mask) for mask in masks]
    objective, head = Objective(kind, 6, 3.0 if kind == "dflash" else 0.0), random_head()
    parameter = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(4, 6, HIDDEN, generator=torch.Generator().manual_seed(2))

    def part(sequences):
        return make_blocks([rows[index] for index in sequences], [np.array([0])] * len(sequences), 6)

    def gradient(split):
        weight = sum(objective.weight(part(some).supervised, part(some).block_offsets) for some in split)
        shared = parameter.clone().requires_grad_()
        for some in split:  # a micro-batch, on whatever rank and in whatever round
            (sweep(inputs[some] @ shared, head, part(some), objective).loss_sum / weight).backward()
        return shared.grad, weight

    whole, whole_weight = gradient([[0, 1, 2, 3]])
    found, weight = gradient(split)
    assert weight == pytest.approx(whole_weight)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    if kind == "dflash":
        assert weight == pytest.approx(2 + 2 * sum(math.exp(-slot / 3) for slot in range(4)))
        loss = sweep(inputs @ parameter, head, part(range(4)), objective).loss_sum / weight
        losses = torch.cat([-log_probabilities(inputs @ parameter, head, part(range(4)))], 0)
        slots = [(0, 1), (1, 1), *[(row, slot) for row in (2, 3) for slot in range(1, 5)]]
        by_hand = sum(losses[row, slot] * math.exp(-(slot - 1) / 3) for row, slot in slots) / weight
        torch.testing.assert_close(loss, by_hand)


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4.0), (10, 5.0), (16, 7.0), (9, 4.5), (13, 6.0)])
def test_gamma_follows_the_block_size_where_it_is_not_given(block_size, gamma):
    assert resolve_gamma(None, block_size) == pytest.approx(gamma)
    assert resolve_gamma(2.5, block_size) == 2.5
    assert resolve_gamma(0.0, block_size) == 0.0


def test_gamma_rises_with_the_block_size_without_a_jump():
    gammas = np.array([resolve_gamma(None, block_size) for block_size in range(2, 64)])
    assert ((np.diff(gammas) > 0) & (np.diff(gammas) <= 0.5 + 1e-9)).all()
    assert gammas[0] > 0
