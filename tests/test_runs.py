"""Whole runs of launch.sh on tiny targets: resumes, stops, results. Every rank is a process."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import distributed
import pytest
import tiny
from safetensors.torch import load_file
from traces import samples_by_epoch

pytestmark = pytest.mark.slow
ROWS = 48


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """A directory with a target and chats."""
    directory = tmp_path_factory.mktemp("inputs")
    tiny.write_target(directory / "target")
    tiny.write_chats(directory / "train.jsonl", ROWS)
    return directory


@pytest.fixture
def config(inputs, tmp_path) -> Path:
    """A settings file of its own for every test; the prepared data are shared."""
    path = tmp_path / "config.json"
    content = tiny.settings(
        inputs / "target", inputs / "train.jsonl", tmp_path / "runs", data={"cache_dir": str(inputs / "cache")}
    )
    path.write_text(json.dumps(content))
    return path


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in distributed.metrics(directory)]


def test_a_killed_run_goes_on_with_the_same_samples_and_ends_with_the_same_weights(config, tmp_path):
    epochs = ["--set", "training.num_epochs=12", "--set", "training.save_every=4"]
    arguments = [*epochs, "--set", "gradient_accumulation_steps=3"]
    distributed.run(3, config, *arguments, "--set", "run_name=whole")
    ranks = distributed.start(3, config, *arguments, traced=True)
    ranks.wait_for_updates(tmp_path / "runs" / "run", 7)
    ranks.signal(2, signal.SIGKILL)
    assert all(code != 0 for code in ranks.wait(30))
    distributed.run(3, config, *arguments, traced=True)
    assert samples_by_epoch(tmp_path) == {epoch: list(range(ROWS)) for epoch in range(12)}
    whole, resumed = tmp_path / "runs" / "whole", tmp_path / "runs" / "run"
    assert losses(resumed) == losses(whole)
    expected, got = (load_file(run / "drafter" / "model.safetensors") for run in (whole, resumed))
    assert all((got[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize(("ranks", "signalled"), [(1, 0), (3, 0), (3, 2)])
def test_sigterm_on_one_rank_saves_the_last_update_and_all_ranks_exit_with_0(config, tmp_path, ranks, signalled):
    arguments = ["--set", "training.num_epochs=200", "--set", "training.save_every=0"]
    job = distributed.start(ranks, config, *arguments)
    run = tmp_path / "runs" / "run"
    job.wait_for_updates(run, 3)
    job.signal(signalled, signal.SIGTERM)
    assert job.wait(30) == [0] * ranks
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{distributed.metrics(run)[-1]['update']:06d}"
    assert not (run / "drafter").exists()


@pytest.mark.parametrize(
    ("rank", "place"), [(1, "capture"), (2, "learn"), (2, "save")], ids=["target", "drafter", "drafter-saving"]
)
def test_a_rank_that_hangs_is_found_on_every_other_rank_with_the_place(config, monkeypatch, rank, place):
    monkeypatch.setenv("HANGING_RANK", str(rank))
    monkeypatch.setenv("HANGING_PLACE", place)
    options = ["topology.timeout_seconds=20", "training.num_epochs=50", "target.sharding=none", "training.save_every=2"]
    arguments = [part for option in options for part in ("--set", option)]
    started = time.monotonic()
    codes = distributed.start(3, config, *arguments, program="tests/hanging.py").wait(120)
    assert all(code != 0 for code in codes)
    assert time.monotonic() - started < 110
    for other in {0, 1, 2} - {rank}:
        said = distributed.output(config, other)
        assert re.search(rf"rank {rank}: is in hanging.py:\d+ sleep_for_ever", said), said


def test_a_time_limit_stops_like_a_signal_and_the_same_command_goes_on(config, tmp_path):
    arguments = ["--set", "training.num_epochs=200", "--set", "training.save_every=0"]
    distributed.run(2, config, *arguments, "--set", "training.max_hours=0.004")
    run = tmp_path / "runs" / "run"
    (checkpoint,) = (run / "checkpoints").iterdir()
    done = distributed.metrics(run)[-1]["update"]
    assert checkpoint.name == f"step-{done:06d}"
    assert f"stopped by training.max_hours, 0.004 after update {done}" in distributed.output(config, 1)
    distributed.run(2, config, *arguments, "--set", f"training.max_updates={done + 2}")
    assert distributed.metrics(run)[-1]["update"] == done + 2


def test_a_finished_run_says_so_and_fresh_starts_over(config, tmp_path):
    short = ["--set", "training.max_updates=2"]
    distributed.run(1, config, *short)
    distributed.run(1, config, *short)
    assert "is finished: 2 updates" in distributed.output(config, 0)
    distributed.run(1, config, *short, "--fresh", "--set", "training.seed=1")
    assert (tmp_path / "runs" / "run.1" / "drafter").is_dir()
    assert losses(tmp_path / "runs" / "run") != losses(tmp_path / "runs" / "run.1")


def test_a_run_learns_and_validates_without_disturbing_the_losses(config, tmp_path):
    held_out = ["--set", "data.validation_fraction=0.2"]
    distributed.run(1, config, *held_out, "--set", "run_name=plain")
    assert "the validation data are not used" in distributed.output(config, 0)
    distributed.run(2, config, *held_out, "--set", "training.evaluate_every=2", "--set", "training.profile=true")
    run = tmp_path / "runs" / "run"
    validations = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in validations if "validation/loss" in line]
    assert validations[-1]["update"] == distributed.metrics(run)[-1]["update"]
    assert validations[-1]["validation/loss"] < validations[0]["validation/loss"]
    assert losses(run) == pytest.approx(losses(tmp_path / "runs" / "plain"), rel=1e-4)
    phases = {name: (run / "profile" / f"{name}-0.txt").read_text() for name in ("target", "drafter")}
    assert all(phase in phases["target"] for phase in ("read", "forward", "send"))
    assert all(phase in phases["drafter"] for phase in ("read", "receive", "forward", "backward", "step", "log"))


def test_the_best_drafter_by_validation_is_kept_and_is_the_result_also_after_a_stop(config, tmp_path):
    options = ["data.validation_fraction=0.2", "training.evaluate_every=2", "training.save_every=3"]
    options += ["training.keep_checkpoints=1", "training.num_epochs=6", "optimizer.params.lr=0.02"]
    arguments = [part for option in options for part in ("--set", option)]
    distributed.run(1, config, *arguments, "--set", "run_name=whole")
    job = distributed.start(1, config, *arguments)
    job.wait_for_updates(tmp_path / "runs" / "run", 4)
    job.signal(0, signal.SIGTERM)
    assert job.wait(40) == [0]
    distributed.run(1, config, *arguments)
    whole, stopped = tmp_path / "runs" / "whole", tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    passes = {line["update"]: line["validation/acceptance_length"] for line in lines if "validation/loss" in line}
    best = max(passes, key=lambda update: (passes[update], update))
    result = json.loads((whole / "result.json").read_text())
    assert (result["drafter_of_update"], result["validation_acceptance_length"]) == (best, passes[best])
    assert f"update {best}, the best" in distributed.output(config, 0)
    assert passes[best] > 1.0
    names = {path.name for path in (whole / "checkpoints").iterdir()}
    assert names == {f"step-{best:06d}", f"step-{result['updates']:06d}"}
    checkpoint = whole / "checkpoints" / f"step-{best:06d}" / "drafter"
    for run in (whole, stopped):
        assert (run / "drafter/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert json.loads((stopped / "result.json").read_text()) == result
    assert losses(stopped) == losses(whole)


def test_the_result_is_the_best_drafter_where_that_is_not_the_last(config, tmp_path):
    options = ["data.validation_fraction=0.2", "training.evaluate_every=2", "training.keep_checkpoints=1"]
    arguments = [part for option in options for part in ("--set", option)]
    distributed.run(1, config, *arguments, "--set", "training.max_updates=2")
    run = tmp_path / "runs" / "run"
    best = run / "checkpoints" / "step-000002"
    progress = json.loads((best / "progress.json").read_text())
    assert progress["best_update"] == 2
    (best / "progress.json").write_text(json.dumps(progress | {"best_acceptance_length": 3.9}))  # never reached again
    distributed.run(1, config, *arguments, "--set", "training.max_updates=4")
    result = json.loads((run / "result.json").read_text())
    assert (result["updates"], result["drafter_of_update"]) == (4, 2)
    assert "update 2, the best" in distributed.output(config, 0)
    last = run / "checkpoints" / "step-000004"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {best.name, last.name}
    written = (run / "drafter/model.safetensors").read_bytes()
    assert written == (best / "drafter/model.safetensors").read_bytes()
    assert written != (last / "drafter/model.safetensors").read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_without_a_finite_gradient_change_nothing_and_are_counted_and_too_many_end_the_run(
    config, tmp_path, monkeypatch, precision
):
    options = ["training.max_skipped_updates=3", "training.num_epochs=9", "topology.drafter_ranks=2"]
    options += ["optimizer.params.lr=0.01", "training.save_every=1", "training.keep_checkpoints=99"]
    options += [f"bf16.enabled={'true' if precision == 'bf16' else 'false'}", "gradient_accumulation_steps=3"]
    arguments = [part for option in options for part in ("--set", option)]
    monkeypatch.setenv("POISONED", "[2, 4, 6, 7, 8]")
    codes = distributed.start(4, config, *arguments, program="tests/poisoned.py").wait(120)
    assert all(code != 0 for code in codes)
    run = tmp_path / "runs" / "run"
    lines = distributed.metrics(run)
    assert [line["skipped_updates"] for line in lines] == [0, 1, 1, 2, 2, 3, 4, 5]
    drafters = [load_file(run / f"checkpoints/step-{update:06d}/drafter/model.safetensors") for update in range(1, 8)]
    same = [
        all((before[name] == after[name]).all() for name in before) for before, after in itertools.pairwise(drafters)
    ]
    assert same == [True, False, True, False, True, True]
    said = "".join(distributed.output(config, rank) for rank in (2, 3))
    assert "3 updates in a row had no finite gradient" in said
    assert "the last is 8 with the samples [[" in said


def test_bf16_and_dpace_and_an_initial_drafter_run(config, tmp_path):
    distributed.run(1, config, "--set", "run_name=first")
    first = tmp_path / "runs" / "first" / "drafter"
    options = ["bf16.enabled=true", "training.loss=dpace", "training.loss_decay_gamma=null"]
    options += [f"drafter.init_from={first}", "target.dtype=bfloat16", "run_name=second"]
    distributed.run(1, config, *(argument for option in options for argument in ("--set", option)))
    assert losses(tmp_path / "runs" / "second")[-1] < losses(tmp_path / "runs" / "second")[0]


def test_the_launcher_runs_7_plus_1_ranks_and_resumes(config, tmp_path):
    launcher = Path(sys.executable).parent / "deepspeed"
    command = [str(launcher), "--num_accelerators", "8", "--master_port", str(distributed.free_port())]
    command += [str(distributed.REPOSITORY / "launch.sh")]
    command += ["--config", str(config), "--set", "training.save_every=2", "--set", "gradient_accumulation_steps=1"]
    command += ["--set", "batching.token_budget=128"]
    environment = os.environ | {
        "PYTHONPATH": str(distributed.REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def launch(*arguments: str) -> str:
        result = subprocess.run(
            [*command, *arguments], env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=400
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout

    run = tmp_path / "runs" / "run"
    launch("--set", "training.max_updates=3")
    first = losses(run)
    assert len(first) == 3
    assert (run / "checkpoints" / "step-000003").is_dir()
    assert "drafter in" in launch()
    lines = distributed.metrics(run)
    assert lines[-1]["update"] == lines[-1]["updates_total"] > 3
    assert losses(run)[:3] == first
