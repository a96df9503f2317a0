"""The head's sweep against torch's cross-entropy over whole logits."""

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from ds_dflash import head
from ds_dflash.head import cross_entropy


def problem(rows, vocabulary=37, hidden_size=12, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(rows, hidden_size, generator=generator)
    weight = torch.randn(vocabulary, hidden_size, generator=generator)
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype), labels, weights


def truth(hidden, weight, labels, weights):
    """Losses, argmax and gradient of the weighted sum, in float64."""
    hidden = hidden.detach().double().requires_grad_()
    logits = hidden @ weight.double().T
    losses = torch_cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad((losses * weights).sum(), hidden)
    return losses.detach(), logits.argmax(-1), gradient


def results(hidden, weight, labels, weights):
    losses, predicted = cross_entropy(hidden, weight, labels)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), hidden)
    return losses.detach(), predicted, gradient


def assert_same(found, expected, tolerance):
    assert torch.equal(found[1], expected[1])
    for result, right in ((found[0], expected[0]), (found[2], expected[2])):
        assert (result - right).abs().max() <= tolerance * right.abs().max()


@pytest.fixture
def small_tiles(monkeypatch):
    """37 columns in tiles of 8 (the last one of 5), 23 rows in chunks of 10 (the last one of 3)."""
    monkeypatch.setattr(head, "ROWS", 10)
    monkeypatch.setattr(head, "COLUMNS", {"cpu": 8})


@pytest.mark.parametrize("seed", range(5))
def test_losses_gradients_and_predictions_equal_those_of_whole_logits(seed):
    inputs = problem(rows=23, seed=seed, dtype=torch.float32)
    assert_same(results(*inputs), truth(*inputs), 1e-6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [1, 10, 23])
def test_tiles_of_rows_and_columns_change_nothing(rows):
    inputs = problem(rows, dtype=torch.float32)
    assert_same(results(*inputs), truth(*inputs), 1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_large_logits_neither_overflow_nor_vanish():
    hidden, weight, labels, weights = problem(rows=23, dtype=torch.float32)
    inputs = (100 * hidden.detach()).requires_grad_(), weight, labels, weights
    found, expected = results(*inputs), truth(*inputs)
    assert found[0].max() > 300
    assert_same(found, expected, 1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_every_label_of_the_vocabulary_is_found_in_its_tile():
    hidden, weight, _, weights = problem(rows=37, dtype=torch.float32)
    inputs = hidden, weight, torch.arange(37), weights
    assert_same(results(*inputs), truth(*inputs), 1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_of_equal_logits_the_first_id_is_predicted():
    weight = torch.randn(37, 12)
    weight[[3, 11, 30]] = 5.0
    _, predicted = cross_entropy(torch.ones(1, 12), weight, torch.tensor([0]))
    assert predicted.tolist() == [3]


def test_no_rows_give_no_losses_and_no_gradient():
    found = results(*problem(rows=0, dtype=torch.float32))
    assert [tensor.shape for tensor in found] == [(0,), (0,), (0, 12)]
    assert found[1].dtype == torch.int64


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [0, 23])
def test_without_gradients_the_numbers_are_the_same(rows):
    inputs = problem(rows, dtype=torch.float32)
    expected = results(*inputs)
    with torch.no_grad():
        losses, predicted = cross_entropy(*inputs[:3])
    assert not losses.requires_grad
    assert torch.equal(losses, expected[0])
    assert torch.equal(predicted, expected[1])


@pytest.mark.parametrize("peak", [0.0, 0.3, 1.0], ids=["flat", "peaked", "sure"])
def test_bf16_is_near_the_truth_whether_the_label_is_likely_or_not(peak):
    hidden, weight, labels, weights = problem(rows=200, vocabulary=500, hidden_size=64)
    hidden = (hidden.detach() + peak * weight[labels]).bfloat16().requires_grad_()
    inputs = hidden, (weight / 2).bfloat16(), labels, weights
    losses, predicted, gradient = results(*inputs)
    true_losses, true_predicted, true_gradient = truth(*inputs)
    assert gradient.dtype == torch.bfloat16
    assert losses.min() >= 0
    assert (losses - true_losses).norm() <= 1e-2 * true_losses.norm()
    assert (gradient - true_gradient).norm() <= 2e-2 * true_gradient.norm()
    logits = hidden.detach().double() @ inputs[1].double().T
    chosen, best = (logits.gather(1, ids[:, None]) for ids in (predicted, true_predicted))
    assert (best - chosen <= 1e-2 * best).all()  # another id only where the two are equal once rounded
