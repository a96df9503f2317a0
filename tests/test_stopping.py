"""How processes of a job learn that they are to end: deaths of peers, signals, launchers, lost readers.

The processes are small ones that have a store and a watching thread, and no process groups.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import distributed
import forks
import psutil
import pytest

from ds_dflash import peers, stopping

pytestmark = pytest.mark.slow
RANK = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from ds_dflash import stopping

rank, world_size, port = map(int, sys.argv[1:4])
store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
stopper = stopping.Stopper(rank, store, exits_alone=rank == 0, role="target" if rank == 0 else "drafter",
                           world_size=world_size)
stopper.start()
store.add("started", 1)
while store.add("started", 0) < world_size:
    time.sleep(0.01)
print("started", flush=True)
"""
WAIT = "store.get('a key that never comes')"  # in C++, on the job's own connection to the store
TRAIN = """
stopper.must_save()
while not stopper.requested:
    time.sleep(0.01)
print("saved after", stopper.reason, flush=True)
stopper.saved()
stopper.close()
stopping.leave(0)
"""


class Job:
    """Processes whose bodies are given; all are ended with the test."""

    def __init__(self, directory: Path, *bodies: str) -> None:
        port, self.logs = distributed.free_port(), []
        self.processes = []
        for rank, body in enumerate(bodies):
            self.logs.append(directory / f"rank-{rank}.log")
            command = ["python", RANK + body, str(rank), str(len(bodies)), str(port)]
            self.processes.append(forks.fork(dict(os.environ), directory, self.logs[-1], command))
        self._wait_for("started")

    def _wait_for(self, word: str) -> None:
        deadline = time.monotonic() + 90
        while not all(log.exists() and word in log.read_text() for log in self.logs):
            assert time.monotonic() < deadline, self.everything()
            time.sleep(0.02)

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def everything(self) -> str:
        return "\n".join(self.said(rank) for rank in range(len(self.logs)))

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def codes(self, timeout: float = 5) -> list[int]:
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            pytest.fail(self.everything())

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start_job(*bodies: str) -> Job:
        jobs.append(Job(tmp_path, *bodies))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


@pytest.mark.parametrize(("victim", "body"), [(0, "time.sleep(60)"), (1, WAIT)])
def test_a_death_ends_all_others_also_those_that_wait_in_the_store(start, victim, body):
    job = start(body, body, body)
    job.signal(victim, signal.SIGKILL)
    codes = job.codes()
    for other in {0, 1, 2} - {victim}:
        assert codes[other] == 1
        role, pid = "target" if victim == 0 else "drafter", job.processes[victim].pid
        assert (
            f"rank {other} ends because rank {victim} ({role}) is gone: its process {pid} was killed or crashed"
            in job.said(other)
        )


def test_a_sigterm_that_follows_a_death_at_once_is_no_request_to_save(start):
    job = start(WAIT, TRAIN, WAIT)
    job.signal(2, signal.SIGKILL)
    job.processes[2].wait(10)
    job.signal(1, signal.SIGTERM)
    job.signal(0, signal.SIGTERM)
    assert job.codes()[:2] == [1, 1]
    assert "saved" not in job.said(1)
    assert "ends because rank 2 (drafter) is gone" in job.said(1)


def test_a_rank_that_leaves_as_it_should_is_not_mourned(start):
    job = start("stopper.close()", "stopper.close()\nstopping.leave(0)", "time.sleep(2)\nstopper.close()")
    assert job.codes(15) == [0, 0, 0]


def test_the_first_reason_of_several_is_told_to_all(start):
    failing = "time.sleep(0.5)\nstopper.fail('no more {}')\nstopping.leave(3)"
    job = start(WAIT, failing.format("disk"), failing.format("luck"), WAIT)
    codes = job.codes()
    assert (codes[0], codes[3]) == (1, 1)
    told = [re.search(r"ends because of (rank \d: no more \w+)", job.said(rank)) for rank in (0, 3)]
    assert told[0][1] == told[1][1] in ("rank 1: no more disk", "rank 2: no more luck")


def test_a_signal_to_one_rank_lets_the_one_that_trains_save_and_all_leave_with_0(start):
    job = start(WAIT, TRAIN)
    job.signal(0, signal.SIGINT)
    assert job.codes() == [0, 0]
    assert "saved after SIGINT" in job.said(1)


def test_a_rank_that_has_not_begun_to_train_leaves_with_0_at_a_signal_though_its_main_thread_hangs(start):
    job = start(WAIT, WAIT)
    job.signal(0, signal.SIGTERM)
    assert job.codes() == [0, 0]


def test_two_signals_within_3_seconds_are_one_and_a_later_one_ends_at_once(start):
    hanging = "stopper.must_save()\ntime.sleep(60)"
    job = start(WAIT, hanging)
    job.signal(1, signal.SIGINT)
    time.sleep(1)
    job.signal(1, signal.SIGTERM)
    time.sleep(stopping.DOUBLE_SIGNAL_SECONDS - 0.5)
    assert job.processes[1].poll() is None
    job.signal(1, signal.SIGTERM)
    assert job.codes() == [1, 1]
    assert "second signal" in job.said(1)


def test_only_deepspeeds_launcher_and_the_command_that_started_it_are_watched(tmp_path):
    """A tree shell - deepspeed - launcher - rank, and one where the shell itself started the launcher."""
    rank = "from ds_dflash import peers; print([process.pid for process in peers.find_launchers()])"
    launcher = f"import os, subprocess, sys; print(os.getpid()); subprocess.run([sys.executable, '-c', {rank!r}])"
    launch = tmp_path / "deepspeed.launcher.launch"
    launch.write_text(launcher)
    command = tmp_path / "deepspeed"
    command.write_text(
        "import os, subprocess, sys\nprint(os.getpid())\n"
        f"subprocess.run([sys.executable, '-u', {str(launch)!r}, 'deepspeed.launcher.launch'])"
    )

    def printed(*arguments: str) -> list[int]:
        shell = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-u", *arguments]  # not replaced by the command
        environment = os.environ | {"PYTHONPATH": str(distributed.REPOSITORY)}
        said = subprocess.run(shell, env=environment, text=True, capture_output=True, timeout=90)
        return [int(number) for number in re.findall(r"\d+", said.stdout)]

    command_pid, launcher_pid, *watched = printed(str(command))
    assert watched == [launcher_pid, command_pid]
    launcher_pid, *watched = printed(str(launch), "deepspeed.launcher.launch")
    assert watched == [launcher_pid]


def test_what_is_printed_when_nobody_reads_any_more_is_lost_without_an_error():
    program = """
    import sys
    from ds_dflash import stopping
    stopping.outlive_readers()
    print("read", flush=True)
    sys.stdin.readline()
    print("lost", flush=True)
    print("lost too", file=sys.stderr, flush=True)
    stopping.leave(7)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": str(distributed.REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout.readline() == b"read\n"
        process.stdout.close()
        process.stdin.write(b"go on\n")
        process.stdin.close()
        assert process.wait(30) == 7


def test_a_process_that_has_ended_or_whose_id_another_has_taken_is_not_alive():
    process = subprocess.Popen(["sleep", "60"])
    found = peers.find_process(process.pid, psutil.Process(process.pid).create_time())
    assert found is not None
    assert peers.is_alive(found)
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not peers.is_alive(found)
    process.wait()
    assert not peers.is_alive(found)
    own = psutil.Process()
    assert peers.find_process(own.pid, own.create_time() - 60) is None
