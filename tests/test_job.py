"""The walk that both roles follow, without any process group."""

import json

import numpy as np
import pytest
import tiny

from ds_dflash import job as jobs
from ds_dflash.checkpoint import Progress
from ds_dflash.config import load_settings
from ds_dflash.job import Job
from ds_dflash.topology import Roles

ROWS = 40


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    tiny.write_target(directory / "target")
    tiny.write_chats(directory / "train.jsonl", ROWS)
    return directory


@pytest.fixture
def open_job(inputs, tmp_path):
    def build(targets: int = 2, rounds: int = 2, **sections) -> Job:
        content = tiny.settings(
            inputs / "target",
            inputs / "train.jsonl",
            tmp_path / "runs",
            **{"batching": {"token_budget": 160}, "data": {"cache_dir": str(inputs / "cache")}} | sections,
        )
        content["gradient_accumulation_steps"] = rounds
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return Job.open(load_settings(path), Roles(1, targets + 1, True, targets, 1))

    return build


def samples(update) -> list[int]:
    return [int(sample) for _, batch in update.micro_batches() for sample in batch]


def after(update, progress: Progress | None = None) -> Progress:
    """The progress of a run that has done this update."""
    return Progress(update=update.number, position=update.plan.position_after(update.index).to_dict())


def test_every_epoch_has_every_sample_once_and_updates_are_numbered_on(open_job):
    updates = list(open_job().walk(Progress()))
    assert [update.number for update in updates] == list(range(1, len(updates) + 1))
    for epoch in (0, 1):
        seen = [sample for update in updates if update.epoch == epoch for sample in samples(update)]
        assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize("done", [1, 3, 5])
def test_a_walk_from_any_update_goes_on_like_the_whole_one(open_job, done):
    whole = list(open_job().walk(Progress()))
    rest = list(open_job().walk(after(whole[done - 1])))
    assert [samples(update) for update in rest] == [samples(update) for update in whole[done:]]
    assert [update.number for update in rest] == [update.number for update in whole[done:]]


def test_updates_hold_the_same_samples_on_any_split_of_their_micro_batches(open_job):
    walks = [
        [sorted(samples(update)) for update in open_job(targets, rounds).walk(Progress())]
        for targets, rounds in [(1, 6), (2, 3), (3, 2)]
    ]
    assert walks[0] == walks[1] == walks[2]


def test_a_resume_with_other_micro_batches_per_update_still_sees_each_sample_once(open_job):
    first = list(open_job(2, 2).walk(Progress()))[:2]
    second = list(open_job(3, 1).walk(after(first[-1])))
    epoch_0 = [sample for update in [*first, *second] if update.epoch == 0 for sample in samples(update)]
    assert sorted(epoch_0) == list(range(ROWS))


def test_the_number_of_updates_is_exact_and_ends_at_max_updates(open_job):
    job = open_job()
    whole = list(job.walk(Progress()))
    for update in whole:
        left = job.updates_after(update.number, update.plan.position_after(update.index))
        assert update.number + left == len(whole)
    short = open_job(training={"max_updates": 3})
    assert len(list(short.walk(Progress()))) == 3
    assert short.updates_after(0, short.sampler.start()) == 3


def test_the_current_epoch_stands_in_where_counting_all_is_dear(open_job, monkeypatch):
    monkeypatch.setattr(jobs, "CHEAP_SAMPLES", 0)
    job = open_job(training={"num_epochs": 3})
    in_first = job.sampler.count_updates(0)
    assert job.updates_after(0, job.sampler.start()) == 3 * in_first


def test_validation_follows_every_due_update_with_the_same_batches(open_job):
    job = open_job(data={"validation_fraction": 0.25}, training={"evaluate_every": 2})
    assert len(job.dataset) + len(job.validation) == ROWS
    passes: dict[int, list[int]] = {}
    trained = 0
    for update in job.walk(Progress()):
        trained = trained if update.validates else update.number
        if update.validates:
            assert update.number == trained
            passes.setdefault(trained, []).extend(samples(update))
    assert sorted(passes) == [number for number in range(1, trained + 1) if number % 2 == 0 or number == trained]
    assert all(sorted(seen) == list(range(len(job.validation))) for seen in passes.values())


def test_a_validation_pass_that_was_cut_short_is_made_up_for_at_the_start(open_job):
    job = open_job(data={"validation_fraction": 0.25}, training={"evaluate_every": 2})
    whole = list(job.walk(Progress()))
    second = next(update for update in whole if update.number == 2)
    progress = after(second)
    rest = list(job.walk(progress))
    assert [(update.number, update.validates) for update in rest] == [
        (update.number, update.validates) for update in whole if update.number > 2 or update.validates
    ]
    progress.note_validation(1.2)
    assert [update.number for update in job.walk(progress)] == [update.number for update in whole if update.number > 2]


def test_a_plan_is_made_once_an_epoch_for_both_walks_of_a_rank(open_job, monkeypatch):
    job = open_job()
    made = []
    plan = type(job.sampler).plan
    monkeypatch.setattr(type(job.sampler), "plan", lambda self, position: made.append(position) or plan(self, position))
    for one, other in zip(job.walk(Progress()), job.walk(Progress()), strict=True):
        assert one.plan is other.plan
        job.updates_after(one.number, one.plan.position_after(one.index))
    assert len(made) == 2


def test_the_heaviest_micro_batch_has_the_most_padded_tokens(open_job):
    job = open_job()
    lengths = job.dataset.lengths
    padded = [
        len(batch) * lengths[batch].max()
        for update in job.walk(Progress())
        if update.epoch == 0
        for _, batch in update.micro_batches()
        if len(batch)
    ]
    heaviest = job.heaviest()
    assert len(heaviest) * lengths[heaviest].max() == np.max(padded)
