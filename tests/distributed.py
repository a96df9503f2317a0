"""Runs of launch.sh: ranks as processes of their own, without the launcher, each with a deadline."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import forks

REPOSITORY = Path(__file__).parent.parent
forked = False
"""Whether ranks are forks of a server that has imported all they need: so in tests. Else they start as users' do."""


@dataclass
class Ranks:
    """The processes of a job."""

    processes: list[subprocess.Popen]

    def wait(self, timeout: float = 240) -> list[int]:
        """Exit codes; kills and fails when a rank is not done in time."""
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        finally:
            self.kill()

    def wait_for_updates(self, run_directory: Path, updates: int, timeout: float = 180) -> None:
        """Until the run has logged so many updates; fails when a rank ends before."""
        deadline = time.monotonic() + timeout
        file = run_directory / "metrics.jsonl"
        while not file.exists() or file.read_text().count("\n") < updates:
            codes = [process.poll() for process in self.processes]
            if time.monotonic() > deadline or any(code is not None for code in codes):
                self.kill()
                raise AssertionError(f"{run_directory} has no {updates} updates; exit codes {codes}")
            time.sleep(0.05)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    ranks: int,
    config: Path,
    *arguments: str,
    ranks_per_node: int | None = None,
    program: str = "launch.sh",
    traced: bool = False,
    **variables: str,
) -> Ranks:
    """Start a program of the repository on `ranks` ranks; output goes to rank-N.log beside the config.

    `traced`: launch.sh with traces in trace-N.jsonl. `variables`: of the environment.
    """
    port, per_node = free_port(), ranks_per_node or ranks
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_SIZE": str(per_node),
            "CROSS_RANK": str(rank // per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TRACE_DIRECTORY": str(config.parent),
            "WANDB_MODE": os.environ.get("WANDB_MODE", "offline"),
            "PYTHONPATH": str(REPOSITORY),
            **variables,
        }
        log = config.parent / f"rank-{rank}.log"
        script = [str(REPOSITORY / ("tests/traced.py" if traced else program)), "--config", str(config), *arguments]
        if forked:
            processes.append(forks.fork(environment, config.parent, log, ["file", *script]))
            continue
        command = [sys.executable, "-u", *script]
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=config.parent)
            )
    return Ranks(processes)


def output(config: Path, rank: int) -> str:
    return (config.parent / f"rank-{rank}.log").read_text()


def run(ranks: int, config: Path, *arguments: str, timeout: float = 240, **options) -> None:
    """Run to the end; fails with the logs when a rank does not exit with 0."""
    codes = start(ranks, config, *arguments, **options).wait(timeout)
    assert codes == [0] * ranks, "\n".join(f"rank {rank}: {output(config, rank)}" for rank in range(ranks))


def metrics(run_directory: Path) -> list[dict]:
    """The lines of metrics.jsonl that are about training updates."""
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]
