"""Sums of the training metrics, and the file that keeps them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from world import world_of_one

from ds_dflash.loss import BlockResult
from ds_dflash.metrics import JsonLines, MetricSums

LENGTHS = np.array([5, 7, 8, 511, 512, 1023, 1024, 6])


def random_result(seed=0):
    generator = torch.Generator().manual_seed(seed)
    supervised = torch.rand(8, 4, generator=generator) < 0.7
    supervised[:, 0] = False
    correct = supervised & (torch.rand(8, 4, generator=generator) < 0.5)
    loss, weight = torch.rand(8, generator=generator), 0.5 + torch.rand(8, generator=generator)
    accepted = torch.randint(1, 5, (8,), generator=generator)
    return BlockResult(loss.sum(), loss, weight, torch.zeros(8, 4, dtype=torch.int64), correct, supervised, accepted)


@pytest.fixture
def _world():
    with world_of_one():
        yield


def assert_figures(figures, prefix, results, chosen):
    losses, weights, accepted = (
        sum(float(getattr(result, name)[chosen].double().sum()) for result in results)
        for name in ("block_loss", "block_weight", "accepted")
    )
    right, slots = (
        sum(int(getattr(result, name)[chosen].sum()) for result in results) for name in ("correct", "supervised")
    )
    assert figures[f"{prefix}loss"] == pytest.approx(losses / weights)
    assert figures[f"{prefix}accuracy"] == pytest.approx(right / slots)
    assert figures[f"{prefix}acceptance_length"] == pytest.approx(accepted / (chosen.sum() * len(results)))


@pytest.mark.usefixtures("_world")
def test_figures_are_ratios_of_sums_over_all_blocks_and_over_each_length_stratum():
    results, sums = [random_result(0), random_result(1)], MetricSums(4, torch.device("cpu"))
    for result in results:
        sums.add(LENGTHS, result)
    figures = sums.figures()
    assert_figures(figures, "", results, np.ones(8, bool))
    strata = {4: [5, 7, 6], 8: [8], 256: [511], 512: [512, 1023], 1024: [1024]}
    for stratum, lengths in strata.items():
        assert_figures(figures, f"length_{stratum}/", results, np.isin(LENGTHS, lengths))
    assert {name.split("/")[0] for name in figures if name.startswith("length_")} == {f"length_{at}" for at in strata}
    weight = sum(float(result.block_weight.double().sum()) for result in results)
    assert figures["loss_weight"] == pytest.approx(weight)


@pytest.mark.usefixtures("_world")
def test_accuracy_is_given_for_every_slot_that_is_ever_supervised():
    result, sums = random_result(), MetricSums(4, torch.device("cpu"))
    result.supervised[:, 3] = False
    result.correct[:, 3] = False
    sums.add(LENGTHS, result)
    figures = sums.figures()
    for slot in (1, 2):
        expected = float(result.correct[:, slot].sum() / result.supervised[:, slot].sum())
        assert figures[f"accuracy_slot/{slot}"] == pytest.approx(expected)
    assert "accuracy_slot/0" not in figures
    assert "accuracy_slot/3" not in figures


@pytest.mark.usefixtures("_world")
def test_without_blocks_the_figures_are_not_numbers():
    figures = MetricSums(4, torch.device("cpu")).figures()
    assert figures.pop("loss_weight") == 0
    assert all(math.isnan(value) for value in figures.values())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resume_cuts_the_file_back_to_the_updates_that_were_done(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, done=0, validated=0)
    for update in range(1, 6):
        sink.log({"update": update, "loss": 1.0 / update})
    sink.close()
    with path.open("a") as file:
        file.write('{"update": 6, "lo')  # the process ended while it wrote
    resumed = JsonLines(path, done=3, validated=0)
    resumed.log({"update": 4, "loss": 0.5})
    resumed.close()
    assert [line["update"] for line in lines(path)] == [1, 2, 3, 4]
    assert lines(path)[-1]["loss"] == 0.5


def test_a_validation_that_is_made_again_is_in_the_file_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, done=0, validated=0)
    for update in (2, 4):
        sink.log({"update": update, "loss": 1.0})
        sink.log({"update": update, "validation/loss": 2.0})
    sink.close()
    JsonLines(path, done=4, validated=2).close()  # killed after the pass, before the checkpoint knew of it
    assert lines(path) == [
        {"update": 2, "loss": 1.0},
        {"update": 2, "validation/loss": 2.0},
        {"update": 4, "loss": 1.0},
    ]


def test_a_full_disk_is_said_with_the_file(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl", done=0, validated=0)
    sink._file = Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        sink.log({"update": 1})


def test_figures_that_are_not_numbers_are_null_in_the_file(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl", done=0, validated=0)
    sink.log({"update": 1, "loss": math.nan, "grad_norm": math.inf, "name": "x"})
    sink.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"update": 1, "loss": None, "grad_norm": None, "name": "x"}]
