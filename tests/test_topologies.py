"""The same training on one rank, on several and on two nodes: same losses, same weights."""

from pathlib import Path

import pytest
import spreads
from spreads import SPREADS, Outcome, Spread

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return spreads.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def one_rank(inputs, tmp_path_factory) -> Outcome:
    return spreads.train(SPREADS[0], inputs, tmp_path_factory.mktemp("one-rank"))


def test_the_training_of_these_tests_has_uneven_and_empty_micro_batches_and_enough_updates(inputs, tmp_path):
    updates = spreads.micro_batch_sizes(inputs, tmp_path)
    assert len(updates) >= 24
    assert {size for sizes in updates for size in sizes} >= {0, 1, 2}
    assert any(len(set(sizes)) > 1 and 0 not in sizes for sizes in updates)


def test_one_rank_trains_on_each_sample_once_an_epoch_down_to_a_learning_rate_of_zero(one_rank):
    check_whole(one_rank)


@pytest.mark.parametrize("spread", SPREADS[1:], ids=lambda spread: spread.name.replace(" ", "-"))
def test_every_topology_gives_the_losses_gradients_and_weights_of_one_rank(inputs, tmp_path, one_rank, spread: Spread):
    outcome = spreads.train(spread, inputs, tmp_path)
    check_whole(outcome)
    losses, expected = outcome.figures("loss"), one_rank.figures("loss")
    norms, expected_norms = outcome.figures("grad_norm"), one_rank.figures("grad_norm")
    assert spreads.relative_difference(losses[:5], expected[:5]) < 1e-5
    assert spreads.relative_difference(losses, expected) < 1e-3
    assert spreads.relative_difference(norms[:5], expected_norms[:5]) < 1e-4
    assert spreads.weight_difference(outcome.weights, one_rank.weights) < 1e-3


def check_whole(outcome: Outcome) -> None:
    assert outcome.samples == {epoch: list(range(spreads.ROWS)) for epoch in range(spreads.EPOCHS)}
    last = outcome.lines[-1]
    assert [line["update"] for line in outcome.lines] == list(range(1, last["updates_total"] + 1))
    assert last["learning_rate"] == 0.0
