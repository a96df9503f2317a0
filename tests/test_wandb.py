"""W&B: every point once, whatever ended a run and however it went on, and no W&B that holds up training."""

import json
import math
import signal
import time
from pathlib import Path

import distributed
import pytest
import tiny
import wandb
import wandb_server
from wandb_server import history, offline_history

from ds_dflash import metrics
from ds_dflash.errors import UserError
from ds_dflash.metrics import JsonLines, WandbRun


@pytest.fixture
def _online(monkeypatch):
    """For URLs of this machine, and with little patience; what a test has started ends with it."""
    for name, value in {"MODE": "online", "API_KEY": "a" * 40, "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setattr(metrics, "INIT_SECONDS", 3)
    monkeypatch.setattr(metrics, "FINISH_SECONDS", 3)
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def server(monkeypatch, _online):
    with wandb_server.serving() as started:
        monkeypatch.setenv("WANDB_BASE_URL", started.url)
        yield started


class Start:
    """A run's sinks as the trainer has them, from `done` updates on; validates after each third update."""

    def __init__(self, directory: Path, done: int, run_id: str | None = None) -> None:
        wandb.teardown()  # each start is a process of its own
        self.journal = JsonLines(directory / "metrics.jsonl", done, validated=done)
        self.wandb = WandbRun({}, directory, "run", {"a": 1}, run_id)

    def log(self, updates) -> "Start":
        for update in updates:
            lines = [{"update": update, "loss": 1 / update, "grad_norm": math.nan if update == 2 else 1.0}]
            lines += [{"update": update, "validation/loss": 2 / update}] if update % 3 == 0 else []
            for figures in lines:
                self.journal.log(figures)
                self.wandb.log(figures)
        return self

    def close(self) -> str:
        self.wandb.close()
        self.journal.close()
        return self.wandb.run_id


def assert_has_each_point_once(points, updates):
    trained = {point["update"]: point["loss"] for point in points if "loss" in point}
    validated = {point["update"]: point["validation/loss"] for point in points if "validation/loss" in point}
    assert trained == {update: 1 / update for update in range(1, updates + 1)}
    assert validated == {update: 2 / update for update in range(3, updates + 1, 3)}
    assert len(points) == len(trained) + len(validated)
    steps = [point["_step"] for point in points]
    assert steps == sorted(set(steps))


def test_offline_every_point_is_in_the_run_directories_once_after_a_resume(tmp_path):
    first = Start(tmp_path, 0).log(range(1, 8)).close()
    assert_has_each_point_once(offline_history(tmp_path), 7)
    for done, last in ((4, 9), (9, 10)):
        resumed = Start(tmp_path, done, first).log(range(done + 1, last + 1))
        assert resumed.close() == first
        assert_has_each_point_once(offline_history(tmp_path), last)
    assert all(math.isfinite(value) for point in offline_history(tmp_path) for value in point.values())


def test_a_run_that_ended_before_its_first_checkpoint_keeps_its_id(tmp_path):
    first = Start(tmp_path, 0).log(range(1, 3)).close()
    assert Start(tmp_path, 0).log(range(1, 5)).close() == first
    assert_has_each_point_once(offline_history(tmp_path), 4)


def test_offline_runs_stay_where_the_journal_does_not_contain_them(tmp_path):
    first = Start(tmp_path, 0).log(range(1, 4)).close()
    (tmp_path / "metrics.jsonl").unlink()
    Start(tmp_path, 3, first).log(range(4, 7)).close()
    assert_has_each_point_once(offline_history(tmp_path), 6)


def test_the_step_axis_of_all_figures_is_update(tmp_path):
    Start(tmp_path, 0).log([1]).close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    defined = [record.metric for record in wandb_server.records(file) if record.HasField("metric")]
    assert {(metric.name or metric.glob_name, metric.step_metric) for metric in defined} >= {("*", "update")}


def test_online_what_wandb_has_is_not_logged_again_and_what_it_lacks_is(tmp_path, server):
    first = Start(tmp_path, 0).log(range(1, 8)).close()
    assert_has_each_point_once(server.points(), 7)
    Start(tmp_path, 4, first).log(range(5, 10)).close()
    assert_has_each_point_once(server.points(), 9)
    del server.history[-4:]  # as if the process had been killed before they were sent
    Start(tmp_path, 9, first).log([10]).close()
    assert_has_each_point_once(server.points(), 10)


def test_a_run_whose_wandb_was_away_for_a_start_is_complete_online_in_the_next(tmp_path, server, monkeypatch, capsys):
    with wandb_server.dead_url() as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        first = Start(tmp_path, 0).log(range(1, 8)).close()
    said = capsys.readouterr().err
    assert said.count("W&B does not answer") == 1
    assert f"wandb sync {tmp_path / 'wandb'}" in said
    assert_has_each_point_once(offline_history(tmp_path), 7)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    Start(tmp_path, 4, first).log(range(5, 10)).close()
    assert_has_each_point_once(server.points(), 9)
    assert not list(tmp_path.glob("wandb/offline-run-*"))


def test_a_wandb_that_falls_silent_delays_the_end_for_a_bounded_time_and_all_is_on_disk(tmp_path, server, capsys):
    start = Start(tmp_path, 0).log(range(1, 4))
    assert server.has_run.wait(30)
    server.hangs.set()
    deadline = time.monotonic() + 30
    start.log(range(4, 8)).close()
    assert "W&B has not taken all figures" in capsys.readouterr().err
    assert time.monotonic() < deadline
    (file,) = tmp_path.glob("wandb/run-*/*.wandb")
    assert_has_each_point_once(history(file), 7)


def test_a_directory_that_cannot_hold_the_files_is_one_sentence(tmp_path):
    (tmp_path / "wandb").write_text("")
    with pytest.raises(UserError, match=r"wandb cannot hold W&B's files \(File exists\).* set wandb.enabled to false"):
        Start(tmp_path, 0)
    (tmp_path / "wandb").unlink()
    (tmp_path / "wandb").symlink_to("/proc")
    with pytest.raises(UserError, match="cannot hold W&B's files"):
        Start(tmp_path, 0)


# ------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    tiny.write_target(directory / "target")
    tiny.write_chats(directory / "train.jsonl", 32)
    return directory


@pytest.fixture(scope="module")
def plain(inputs) -> list[float]:
    """The losses of the run without W&B."""
    distributed.run(1, write_config(inputs, inputs / "plain", enabled=False))
    return losses(inputs / "plain")


def write_config(inputs, directory, enabled=True) -> Path:
    directory.mkdir(exist_ok=True)
    sections = {"data": {"cache_dir": str(inputs / "cache"), "validation_fraction": 0.2}}
    sections["training"] = {"num_epochs": 4, "save_every": 4, "evaluate_every": 3}
    settings = tiny.settings(inputs / "target", inputs / "train.jsonl", directory / "runs", **sections)
    (directory / "config.json").write_text(json.dumps(settings | {"wandb": {"enabled": enabled}}))
    return directory / "config.json"


def losses(directory) -> list[float]:
    return [line["loss"] for line in distributed.metrics(directory / "runs" / "run")]


def points_of(lines) -> list[tuple]:
    return [(line["update"], line.get("loss"), line.get("validation/loss")) for line in lines]


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_same_wandb_run_with_every_point_once(inputs, tmp_path, plain):
    config, run = write_config(inputs, tmp_path), tmp_path / "runs" / "run"
    ranks = distributed.start(1, config)
    ranks.wait_for_updates(run, 9)  # with the validation passes after 3 and 6: update 7, of which 4 are saved
    ranks.signal(0, signal.SIGKILL)
    ranks.wait(10)
    (before,) = run.glob("wandb/offline-run-*/*.wandb")
    distributed.run(1, config)
    assert losses(tmp_path) == plain
    (after,) = run.glob("wandb/offline-run-*/*.wandb")
    assert after.name == before.name
    assert after.parent != before.parent
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert points_of(offline_history(run)) == points_of(lines)
    assert [line["update"] for line in lines if "loss" in line] == list(range(1, len(plain) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dead", "slow"])
@pytest.mark.usefixtures("_online")
def test_a_wandb_that_is_dead_or_slow_changes_nothing_of_a_run(inputs, tmp_path, plain, monkeypatch, kind):
    config = write_config(inputs, tmp_path)
    with wandb_server.serving() as silent, wandb_server.dead_url() as url:
        silent.hangs.set()
        monkeypatch.setenv("WANDB_BASE_URL", url if kind == "dead" else silent.url)
        distributed.run(1, config, timeout=100)
    assert losses(tmp_path) == plain
    assert distributed.output(config, 0).count("W&B does not answer") == 1
    points = points_of(offline_history(tmp_path / "runs" / "run"))
    assert [(update, loss) for update, loss, validation in points if validation is None] == list(
        enumerate(plain, start=1)
    )
