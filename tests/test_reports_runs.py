"""Reports of users of such trainers that are about runs, each by its scenario; those about fidelity: test_reports.py.

 8  len() of a dynamic sampler       here
 9  uneven batches, small datasets   here; every topology: test_runs.py, test_every_topology_sees_each_sample_once_...
10  resumes replay or skip data      here; after a kill: test_runs.py, test_a_killed_run_goes_on_with_the_...
11  end of the learning rate         here; the curve alone: test_schedule.py
12  max_steps ends the inner loop    here
13  loss at accumulation 1 and 4     here
14  mean of means                    here; the sums alone: test_metrics.py, test_figures_are_ratios_of_sums_...
23  rewound steps in W&B             here; kills, W&B online, away, slow: test_wandb.py

Most runs are made one after another in one process, once for all tests.
"""

import collections
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import distributed
import numpy as np
import pytest
import tiny
from wandb_server import offline_history

from ds_dflash.batching import GROUPINGS, ORDERINGS, BatchSampler, PlanSettings, Position

ROWS, SMALL = 40, 8
RATE = 3e-3

# ------------------------------------------------------------------------------------------ 8: len() of a sampler


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize(("rows", "ranks", "rounds"), [(97, 3, 2), (64, 1, 1), (5, 7, 1), (1, 2, 4), (200, 2, 3)])
def test_08_the_length_of_a_plan_is_the_number_of_updates_that_it_gives(grouping, ordering, rows, ranks, rounds):
    """len() of a dynamic sampler differed from what it yielded."""
    lengths = np.random.default_rng(rows).integers(1, 300, rows)
    settings = PlanSettings(token_budget=700, grouping=grouping, ordering=ordering)
    sampler = BatchSampler(lengths, settings, ranks=ranks, rounds=rounds)
    for epoch in range(3):
        position, given = Position(epoch, ()), 0
        plan = sampler.plan(position)
        while position.epoch == epoch:
            assert sum(len(batch) for turn in plan.update(given) for batch in turn) > 0
            position, given = plan.position_after(given), given + 1
        assert len(plan) == plan.num_updates == sampler.count_updates(epoch) == given
        with pytest.raises(IndexError):
            plan.update(given)


# ------------------------------------------------------------------------------------------ runs


def setting(**values) -> list[str]:
    """Arguments of launch.sh; "__" is the dot of a name."""
    pairs = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in values.items()]
    return [argument for pair in pairs for argument in ("--set", pair)]


SEVERAL_EPOCHS = setting(training__num_epochs=3, batching__token_budget=128, gradient_accumulation_steps=3)
ONE_UPDATE_AN_EPOCH = setting(training__num_epochs=6, batching__token_budget=4096)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    tiny.write_target(directory / "target")
    tiny.write_chats(directory / "train.jsonl", ROWS)
    tiny.write_chats(directory / "small.jsonl", SMALL, seed=1)
    return directory


def write_config(inputs: Path, directory: Path) -> Path:
    settings = tiny.settings(
        inputs / "target", inputs / "train.jsonl", directory / "runs", data={"cache_dir": str(inputs / "cache")}
    )
    (directory / "config.json").write_text(json.dumps(settings))
    return directory / "config.json"


@pytest.fixture(scope="module")
def runs(inputs) -> Path:
    """All runs of one process: their directories by name, and traces.json."""
    config, small = write_config(inputs, inputs), setting(data__train=str(inputs / "small.jsonl"))
    checkpoints = inputs / "runs" / "rewound" / "checkpoints"
    logged = [*SEVERAL_EPOCHS, *setting(run_name="rewound", wandb__enabled=True)]
    stopped = [*SEVERAL_EPOCHS, *setting(run_name="stopped")]
    estimated = [*SEVERAL_EPOCHS, *setting(run_name="estimated", batching__grouping="shuffled")]
    steps = [
        {"run": [*SEVERAL_EPOCHS, *setting(run_name="whole")]},
        {"run": [*stopped, *setting(training__max_updates=3)]},
        {"run": [*stopped, *setting(training__max_updates=11)]},
        {"run": stopped},
        {"run": [*estimated, *setting(training__num_epochs=5, gradient_accumulation_steps=1)], "cheap_samples": 0},
        {"run": [*ONE_UPDATE_AN_EPOCH, *small, *setting(run_name="once", gradient_accumulation_steps=1)]},
        {
            "run": [
                *ONE_UPDATE_AN_EPOCH,
                *small,
                *setting(run_name="four_times", gradient_accumulation_steps=4, batching__max_batch_size=2),
            ]
        },
        {"run": [*logged, *setting(training__max_updates=5)]},
        {"remove": str(checkpoints / "step-000005")},  # 3 is left: 4 and 5 are trained again
        {"run": [*logged, *setting(training__max_updates=8)]},
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(distributed.REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tests/in_one_process.py", str(config), json.dumps(steps)]
    result = subprocess.run(
        command, env=environment, cwd=distributed.REPOSITORY, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return inputs


def lines(runs: Path, name: str) -> list[dict]:
    return distributed.metrics(runs / "runs" / name)


def trace(runs: Path, name: str) -> list[list]:
    return json.loads((runs / "traces.json").read_text())[name]


@pytest.mark.slow
def test_08_the_total_that_is_shown_from_the_first_update_on_is_what_a_run_makes(runs):
    made = lines(runs, "whole")
    assert {line["updates_total"] for line in made} == {len(made)}
    assert len(made) > 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_09_a_dataset_smaller_than_the_ranks_and_uneven_micro_batches_come_to_their_end(inputs, tmp_path, rows):
    """Uneven batches over ranks deadlocked at the end of an epoch; so did datasets smaller than the number of ranks."""
    tiny.write_chats(tmp_path / "few.jsonl", rows)
    few = setting(data__train=str(tmp_path / "few.jsonl"), batching__max_batch_size=1, gradient_accumulation_steps=1)
    distributed.run(3, write_config(inputs, tmp_path), *few, *setting(training__num_epochs=3), traced=True, timeout=120)
    seen = collections.defaultdict(list)
    for line in map(json.loads, (tmp_path / "trace-2.jsonl").read_text().splitlines()):
        seen[line["epoch"]] += line["samples"]
    assert {epoch: sorted(samples) for epoch, samples in seen.items()} == {
        number: list(range(rows)) for number in range(3)
    }
    assert len(distributed.metrics(tmp_path / "runs" / "run")) == 3 * -(-rows // 2)  # of 2 targets


@pytest.mark.slow
def test_10_after_resumes_every_epoch_goes_on_where_it_stood_and_later_ones_are_whole(runs):
    """A resume replayed data, or skipped the same offset in each later epoch."""
    assert trace(runs, "stopped") == trace(runs, "whole")
    seen = collections.defaultdict(list)
    for _, epoch, samples in trace(runs, "stopped"):
        seen[epoch] += samples
    assert {epoch: sorted(samples) for epoch, samples in seen.items()} == {
        number: list(range(ROWS)) for number in range(3)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "estimated"])
def test_11_the_learning_rate_comes_to_its_end_with_the_last_update_and_not_before(runs, name):
    """The learning rate reached its end early or late under accumulation and changing step counts."""
    rates = [line["learning_rate"] for line in lines(runs, name)]
    totals = [line["updates_total"] for line in lines(runs, name)]
    assert totals[-1] == len(rates)
    assert (len(set(totals)) > 1) == (name == "estimated")
    assert max(rates) > 0.97 * RATE
    falling = rates[int(np.argmax(rates)) :]
    assert all(later < earlier for earlier, later in itertools.pairwise(falling))
    assert rates[-1] == 0.0
    if name == "whole":
        assert rates[len(rates) // 2] == pytest.approx(RATE / 2, rel=0.25)


@pytest.mark.slow
def test_11_a_run_that_is_made_longer_comes_to_the_end_of_its_learning_rate_again(runs):
    rates = [line["learning_rate"] for line in lines(runs, "stopped")]
    assert [update for update, rate in enumerate(rates, start=1) if rate == 0.0] == [3, 11, len(rates)]
    assert len(rates) == len(lines(runs, "whole"))


@pytest.mark.slow
def test_12_the_most_updates_end_the_run_and_not_only_the_epoch(runs):
    """`max_steps` ended only the inner loop."""
    epochs = {update: epoch for update, epoch, _ in trace(runs, "rewound")}
    assert max(epochs) == len(lines(runs, "rewound")) == 8
    assert epochs[8] < 2  # of three, so there was more to train
    result = json.loads((runs / "runs" / "rewound" / "result.json").read_text())
    assert result["updates"] == 8


# ------------------------------------------------------------------------------------------ 13, 14: what a loss is


def assert_same_figures(some: list[dict], others: list[dict]) -> None:
    assert len(some) == len(others) == 6
    names = [name for name in some[0] if name.split("/")[-1] in ("loss", "accuracy", "acceptance_length")]
    assert len(names) > 6  # by sample length too
    for one, other in zip(some, others, strict=True):
        for name in [*names, "grad_norm", "loss_weight"]:
            assert one[name] == pytest.approx(other[name], rel=1e-4), name


@pytest.mark.slow
def test_13_an_update_has_the_same_figures_in_1_and_in_4_micro_batches(runs):
    """Loss logged differently at accumulation 1 and 4. Here with gradients, and over updates that build on another."""
    once, four_times = lines(runs, "once"), lines(runs, "four_times")
    assert [line["samples"] for line in once] == [line["samples"] for line in four_times] == [SMALL] * 6
    assert once[0]["padding_efficiency"] < four_times[0]["padding_efficiency"]
    assert_same_figures(once, four_times)


@pytest.mark.slow
def test_14_means_are_over_all_blocks_and_not_over_micro_batches_and_ranks(runs, inputs, tmp_path):
    """Mean of means over micro-batches and ranks: of two drafter ranks, with micro-batches of other weights."""
    options = setting(gradient_accumulation_steps=2, batching__max_batch_size=2, topology__mode="colocated")
    small = setting(data__train=str(inputs / "small.jsonl"))
    distributed.run(2, write_config(inputs, tmp_path), *ONE_UPDATE_AN_EPOCH, *small, *options)
    assert_same_figures(lines(runs, "once"), distributed.metrics(tmp_path / "runs" / "run"))


# ------------------------------------------------------------------------------------------ 23: rewound steps


@pytest.mark.slow
def test_23_updates_that_are_trained_again_after_a_resume_are_in_wandb_once_and_in_the_same_run(runs):
    """After a resume, W&B dropped the rewound steps: a step axis of our own, and the same run id."""
    trained = [update for update, *_ in trace(runs, "rewound")]
    assert trained == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    points = offline_history(runs / "runs" / "rewound")  # of one id
    logged = [(point["update"], point["loss"]) for point in points]
    assert logged == [(line["update"], line["loss"]) for line in lines(runs, "rewound")]
    assert [update for update, _ in logged] == list(range(1, 9))
