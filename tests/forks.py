"""Processes of launch.sh and ds-dflash that need not import anything: forked from a server that has.

Imports take ten times as long as a tiny run. The processes are as real as others: of their own memory, session and
exit code, killed as others are.
"""

import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import killed
import psutil

REPOSITORY = Path(__file__).parent.parent
sessions: set[int] = set()  # of all processes that were forked


class Fork:
    """A forked process, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, environment: dict[str, str], directory: Path, log: Path, arguments: list[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["killed"])
        before = os.environ.copy()
        os.environ.update(PYTHONPATH=f"{REPOSITORY}:{Path(__file__).parent}", OMP_NUM_THREADS="1")
        try:  # the server starts with the first process, and reads the environment then
            self._process = context.Process(
                target=killed.fork, args=(environment, directory, log, arguments), daemon=True
            )
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.pid = self._process.pid
        sessions.add(self.pid)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def fork(environment: dict[str, str], directory: Path, log: Path, arguments: list[str]) -> Fork:
    return Fork(environment, directory, log, arguments)


def run_command(directory: Path, *arguments: str, timeout: float = 60, **variables: str) -> int:
    """The exit code of `ds-dflash` with these arguments; its output goes to command.log in the directory."""
    environment = os.environ | variables
    process = fork(environment, directory, directory / "command.log", ["ds-dflash", *arguments])
    try:
        return process.wait(timeout)
    finally:
        process.kill()


def left_behind(sessions: Iterable[int], timeout: float = 5) -> list[psutil.Process]:
    """Processes of these sessions that are still there after a while."""
    deadline = time.monotonic() + timeout
    while (left := [process for process in psutil.process_iter() if session_of(process) in sessions]) != []:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


def session_of(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
