"""Kills in the middle of everything: all others end by themselves, and the same command goes on to the same result.

A run is killed at one place after the other, started again each time, and compared at its end, bit by bit, with a run
that nothing disturbed.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import distributed
import forks
import psutil
import pytest
import tiny
from distributed import REPOSITORY

pytestmark = pytest.mark.slow
PATIENCE = 5.0  # seconds after a death in which all others have ended
SAVE_EVERY, EVALUATE_EVERY = 2, 4
OPTIONS = [
    "training.num_epochs=4",
    "training.max_updates=10",
    f"training.save_every={SAVE_EVERY}",
    f"training.evaluate_every={EVALUATE_EVERY}",
    "training.keep_checkpoints=2",
    "data.validation_fraction=0.2",
]
SETTINGS = [part for option in OPTIONS for part in ("--set", option)]
FIGURES = {"loss", "accuracy", "acceptance_length", "grad_norm", "learning_rate", "loss_weight", "epoch", "tokens"}


@dataclass(frozen=True)
class Kill:
    """A rank that is killed when it reaches a place of tests/killed.py for the `call`th time.

    apart: whether every rank takes itself for the only one on its machine, and sees no other's process.
    """

    victim: int
    place: str
    call: int = 1
    apart: bool = False

    def __str__(self) -> str:
        return f"rank {self.victim} at {self.place} {self.call}{', machines apart' if self.apart else ''}"


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """A directory with a target and chats."""
    directory = tmp_path_factory.mktemp("crash-inputs")
    tiny.write_target(directory / "target")
    tiny.write_chats(directory / "train.jsonl", rows=48)
    return directory


def write_config(directory: Path, inputs: Path, rounds: int) -> Path:
    directory.mkdir(exist_ok=True)
    content = tiny.settings(
        inputs / "target", inputs / "train.jsonl", directory / "runs", data={"cache_dir": str(inputs / "cache")}
    )
    content["gradient_accumulation_steps"] = rounds
    path = directory / "config.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="session")
def undisturbed(inputs, tmp_path_factory):
    """The run directory of 1 + 1 or 2 + 1 ranks, trained in one go."""
    found: dict[int, Path] = {}

    def train(ranks: int) -> Path:
        if ranks not in found:
            directory = tmp_path_factory.mktemp("undisturbed")
            config = write_config(directory, inputs, rounds=2 // (ranks - 1))
            distributed.run(ranks, config, *SETTINGS)
            found[ranks] = directory / "runs" / "run"
        return found[ranks]

    return train


def figures(run: Path) -> dict[tuple[int, bool], dict[str, float]]:
    """(update, whether it is of a validation) -> what does not depend on time."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        (line["update"], "validation/loss" in line): {
            name: value for name, value in line.items() if name.removeprefix("validation/") in FIGURES
        }
        for line in lines
    }


def drafters(run: Path) -> dict[str, bytes]:
    """The weights of the result and of every checkpoint."""
    return {str(file.relative_to(run)): file.read_bytes() for file in sorted(run.rglob("model.safetensors"))}


def assert_same(run: Path, expected: Path, after: object) -> None:
    """Bit by bit the same losses and weights."""
    assert figures(run) == figures(expected), f"after {after}"
    got, wanted = drafters(run), drafters(expected)
    assert got.keys() == wanted.keys(), f"after {after}"
    assert [name for name in got if got[name] != wanted[name]] == [], f"after {after}"
    assert not list(run.rglob(".*")), f"after {after}"


def saved_updates(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def role(rank: int, ranks: int) -> str:
    return "drafter" if rank == ranks - 1 else "target"


def kill(kill: Kill, config: Path, ranks: int) -> str:
    """Start the run with a deadly place; check how the others end, and what they say. Returns a line of a table."""
    variables = {"KILLED_RANK": str(kill.victim), "KILLED_PLACE": kill.place, "KILLED_CALL": str(kill.call)}
    variables |= {"MACHINES": "apart"} if kill.apart else {}
    job = distributed.start(ranks, config, *SETTINGS, **variables)
    victim = job.processes[kill.victim]
    try:
        code = victim.wait(60)
    except subprocess.TimeoutExpired:
        job.kill()
        pytest.fail(f"{kill} was never reached: {outputs(config, ranks)}")
    assert code == -signal.SIGKILL, f"{kill} was never reached: {outputs(config, ranks)}"
    died = time.monotonic()
    codes = job.wait(30 if kill.apart else PATIENCE)
    seconds = time.monotonic() - died
    for other in set(range(ranks)) - {kill.victim}:
        said = distributed.output(config, other)
        assert codes[other] > 0, f"{kill}, rank {other}: {said}"
        cause = rf"rank {kill.victim}: does not answer" if kill.apart else rf"its process {victim.pid} was killed"
        assert re.search(cause, said), f"{kill}, rank {other}: {said}"
        if not kill.apart:
            named = f"rank {other} ends because rank {kill.victim} ({role(kill.victim, ranks)}) is gone: "
            assert named in said, f"{kill}: {said}"
    left = forks.left_behind({process.pid for process in job.processes})
    assert not left, f"{kill}: {left}"
    odd = [update for update in saved_updates(config.parent / "runs" / "run") if update % SAVE_EVERY]
    assert not odd, f"{kill}: a rank saved though another had died"
    rest = [codes[other] for other in range(ranks) if other != kill.victim]
    return f"{kill} | others exit {rest} after {seconds:.1f} s | saved {saved_updates(config.parent / 'runs' / 'run')}"


def outputs(config: Path, ranks: int) -> str:
    return "\n".join(f"rank {rank}: {distributed.output(config, rank)}" for rank in range(ranks))


def stop_within_validation(config: Path, ranks: int) -> str:
    """SIGTERM on the drafter as a validation pass begins; the run saves what it has and leaves with 0."""
    variables = {"KILLED_RANK": str(ranks - 1), "KILLED_PLACE": "validation", "KILLED_WITH": "SIGTERM"}
    job = distributed.start(ranks, config, *SETTINGS, **variables)
    assert job.wait(60) == [0] * ranks, outputs(config, ranks)
    run = config.parent / "runs" / "run"
    last = distributed.metrics(run)[-1]["update"]
    assert last % EVALUATE_EVERY == 0
    assert saved_updates(run)[-1] == last
    assert (last, True) not in figures(run)
    return f"SIGTERM on the drafter in the validation pass of update {last} | all exit 0 | saved {saved_updates(run)}"


def test_a_run_of_1_and_1_ranks_that_is_killed_everywhere_ends_as_one_that_is_not(inputs, tmp_path, undisturbed):
    config, run = write_config(tmp_path, inputs, rounds=2), tmp_path / "runs" / "run"
    done = [
        kill(Kill(0, "forward", 17), config, 2),
        kill(Kill(1, "backward", 2), config, 2),
        kill(Kill(1, "step", 2), config, 2),
        kill(Kill(1, "engine files", 2), config, 2),
        kill(Kill(1, "before rename"), config, 2),
        kill(Kill(1, "after rename"), config, 2),
        stop_within_validation(config, 2),
        kill(Kill(1, "progress"), config, 2),
        kill(Kill(0, "forward"), config, 2),
        kill(Kill(1, "drafter"), config, 2),
        kill(Kill(1, "result"), config, 2),
    ]
    distributed.run(2, config, *SETTINGS)
    print(*done, sep="\n")
    assert_same(run, undisturbed(2), after=done)


def test_a_run_of_2_and_1_ranks_that_is_killed_everywhere_ends_as_one_that_is_not(inputs, tmp_path, undisturbed):
    config, run = write_config(tmp_path, inputs, rounds=1), tmp_path / "runs" / "run"
    done = [
        kill(Kill(1, "forward", 12), config, 3),
        kill(Kill(0, "forward", 8), config, 3),
        kill(Kill(2, "step", 2), config, 3),
        kill(Kill(2, "weights", apart=True), config, 3),
        kill(Kill(1, "forward", 8, apart=True), config, 3),
    ]
    distributed.run(3, config, *SETTINGS)
    print(*done, sep="\n")
    assert_same(run, undisturbed(3), after=done)


@pytest.mark.parametrize("place", ["tokenising", "prepared table", "accounting"])
def test_data_that_were_killed_in_preparation_are_prepared_whole_by_the_same_command(inputs, tmp_path, place):
    tiny.write_chats(tmp_path / "train.jsonl", rows=48)
    content = tiny.settings(inputs / "target", tmp_path / "train.jsonl", tmp_path / "runs", data={"num_proc": 2})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(content))
    prepare = ["prepare", "--config", str(config), "--set"]
    first, second = f"data.cache_dir={tmp_path}/killed", f"data.cache_dir={tmp_path}/whole"
    assert forks.run_command(tmp_path, *prepare, first, KILLED_PLACE=place) == -signal.SIGKILL
    assert not forks.left_behind(forks.sessions)
    assert [path.suffix for path in (tmp_path / "killed").iterdir() if path.is_dir()] == [".building"]
    for setting in (first, second):
        assert forks.run_command(tmp_path, *prepare, setting) == 0
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "whole")


def content_of(cache: Path) -> dict[str, bytes]:
    """Everything but locks."""
    return {
        str(file.relative_to(cache)): file.read_bytes()
        for file in cache.rglob("*")
        if file.suffix != ".lock" and file.is_file()
    }


@pytest.mark.parametrize("place", ["weights", "export"])
def test_an_export_that_was_killed_leaves_nothing_in_its_place_and_the_same_command_writes_it(
    tmp_path, undisturbed, place
):
    run, out = undisturbed(2), tmp_path / "exported"
    assert forks.run_command(tmp_path, "export", str(run), str(out), KILLED_PLACE=place) == -signal.SIGKILL
    assert not out.exists()
    assert forks.run_command(tmp_path, "export", str(run), str(out)) == 0
    assert (out / "model.safetensors").read_bytes() == (run / "drafter" / "model.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"exported", "command.log"}


class Launched:
    """1 + 1 ranks under the command `deepspeed`, in a session of their own; output goes to launched.log.

    reader: a process that the output goes through.
    """

    def __init__(self, config: Path, **variables: str) -> None:
        self.log, self.run = config.parent / "launched.log", config.parent / "runs" / "run"
        with self.log.open("w") as file:
            self.reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
        binaries = Path(sys.executable).parent
        command = [
            str(binaries / "deepspeed"),
            "--num_accelerators",
            "2",
            "--master_port",
            str(distributed.free_port()),
        ]
        environment = os.environ | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.command = subprocess.Popen(
            [*command, str(REPOSITORY / "tests" / "killed.py"), "--config", str(config), *SETTINGS],
            env=environment,
            cwd=config.parent,
            stdout=self.reader.stdin,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.reader.stdin.close()

    def wait_for_more_updates(self, number: int) -> None:
        """Until so many more have been logged."""
        file, deadline = self.run / "metrics.jsonl", time.monotonic() + 90
        start = len(distributed.metrics(self.run)) if file.exists() else 0
        while not file.exists() or not start <= len(distributed.metrics(self.run)) - number:
            assert self.command.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def launcher(self) -> psutil.Process:
        (found,) = psutil.Process(self.command.pid).children()
        return found

    def assert_nothing_is_left(self, what: str) -> None:
        left = forks.left_behind([self.command.pid])
        assert not left, f"{what}: {left}"

    def end(self) -> None:
        """Kill whatever is left, should a test have failed."""
        for process in forks.left_behind([self.command.pid], timeout=0):
            process.kill()
        self.reader.kill()
        self.reader.wait()


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes whose parent dies become children of this one, which learns their exit codes (Linux)."""
    set_child_subreaper = 36  # linux/prctl.h
    prctl = ctypes.CDLL(None).prctl
    prctl(set_child_subreaper, 1)
    try:
        yield
    finally:
        prctl(set_child_subreaper, 0)


def exit_code(pid: int, timeout: float) -> int | None:
    """Of a process that is or becomes a child of this one; None when it is not done in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):  # its parent is only about to die
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def kill_a_rank(launched: Launched) -> str:
    """The drafter kills itself; the launcher answers by SIGTERM to the other, which must not be taken for a stop."""
    code = launched.command.wait(90)
    launched.reader.wait(10)
    said = launched.log.read_text()
    assert code != 0, said
    assert re.search(r"rank 0 ends because rank 1 \(drafter\) is gone: its process \d+ was killed", said), said
    assert "stopped by" not in said
    assert not [update for update in saved_updates(launched.run) if update % SAVE_EVERY], said
    return f"launched, drafter at backward | the command exits {code}"


def kill_the_launcher(launched: Launched) -> str:
    """SIGKILL on launch.py, after the reader of all output has gone away: the ranks save and exit with 0."""
    launched.wait_for_more_updates(1)
    launcher = launched.launcher()
    ranks = [process.pid for process in launcher.children()]
    launched.reader.kill()
    launched.wait_for_more_updates(1)
    launcher.kill()
    killed = time.monotonic()
    codes = [exit_code(pid, 25) for pid in ranks]
    assert codes == [0, 0]
    return f"SIGKILL on launch.py, nobody reads | ranks exit {codes} after {time.monotonic() - killed:.1f} s"


def signal_the_command(number: signal.Signals) -> Callable[[Launched], str]:
    """The signal goes to the command `deepspeed` alone, which passes nothing on: the ranks save and exit with 0."""

    def strike(launched: Launched) -> str:
        launched.wait_for_more_updates(1)
        launcher = launched.launcher().pid
        launched.command.send_signal(number)
        struck = time.monotonic()
        assert launched.command.wait(10) == -number
        code = exit_code(launcher, 25 + 5)
        said = launched.log.read_text()
        assert code == 0, said
        assert said.count("exits successfully") == 2, said
        assert re.search(r"stopped by the end of the launcher of rank \d after update", said), said
        return f"{number.name} on the command | ranks exit [0, 0] after {time.monotonic() - struck:.1f} s"

    return strike


def test_a_launched_run_that_is_killed_with_its_launcher_ends_as_one_that_is_not(inputs, tmp_path, undisturbed):
    config, run = write_config(tmp_path, inputs, rounds=2), tmp_path / "runs" / "run"
    strikes: list[tuple[Callable[[Launched], str], dict[str, str]]] = [
        (kill_a_rank, {"KILLED_RANK": "1", "KILLED_PLACE": "backward", "KILLED_CALL": "3"}),
        (kill_the_launcher, {"SECONDS_AN_UPDATE": "0.5"}),
        (signal_the_command(signal.SIGTERM), {"SECONDS_AN_UPDATE": "0.5"}),
        (signal_the_command(signal.SIGKILL), {"SECONDS_AN_UPDATE": "0.5"}),
    ]
    done = []
    for strike, variables in strikes:
        launched = Launched(config, **variables)
        try:
            with adopting_orphans():
                done.append(strike(launched))
            launched.assert_nothing_is_left(done[-1])
        finally:
            launched.end()
        if strike is not kill_a_rank:
            assert saved_updates(run)[-1] == distributed.metrics(run)[-1]["update"], done[-1]
        done[-1] += f" | saved {saved_updates(run)}"
    distributed.run(2, config, *SETTINGS)
    print(*done, sep="\n")
    assert_same(run, undisturbed(2), after=done)
