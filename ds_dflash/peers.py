"""The processes of a job: those of the other ranks, and the launcher's above this one.

Every rank registers its process in the job's store, and the others on its machine can look whether it is still there.
"""

import json
import os
import socket
import time
from pathlib import Path

import psutil
import torch.distributed as dist

POLL_SECONDS = 0.25
SAVE_SECONDS = 25.0
TELL_SECONDS = 3.0
MEET_SECONDS = 10.0


class Peers:
    """The processes of a job's ranks. Each registers its own in the store; others of its machine look whether it lives.

    A rank sets `stop/leaving/RANK` before it leaves as it should, and one that cannot go on writes why into
    `stop/failed`, where the first reason stays.
    """

    def __init__(self, rank: int, role: str, world_size: int, store: dist.Store) -> None:
        self._rank, self._role, self._store = rank, role, store
        self._others = [other for other in range(world_size) if other != rank]
        self._unmet = list(self._others)
        self._names: dict[int, str] = {}
        self._processes: dict[int, psutil.Process] = {}

    def meet(self) -> None:
        """Register this process and find the others, which have all just started."""
        own = psutil.Process()
        facts = {"machine": machine(), "pid": own.pid, "started": own.create_time(), "role": self._role}
        self._store.set(f"stop/process/{self._rank}", json.dumps(facts))
        deadline = time.monotonic() + MEET_SECONDS
        self._look_for_unmet()
        while self._unmet and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 25)
            self._look_for_unmet()

    def lost(self) -> list[int]:
        """Ranks of this machine whose processes are gone though they have not said that they leave."""
        self._look_for_unmet()
        return [rank for rank in self.gone() if not self._store.check([f"stop/leaving/{rank}"])]

    def gone(self) -> list[int]:
        """Ranks of this machine whose processes are gone. Does not ask the store."""
        return [rank for rank, process in self._processes.items() if not is_alive(process)]

    def describe_death(self, rank: int) -> str:
        return f"{self._names[rank]} is gone: its process {self._processes[rank].pid} was killed or crashed"

    def tell(self, clause: str) -> str:
        """Tell all ranks why the job fails; returns what is told, which is what the first that told has said."""
        return self._store.compare_set("stop/failed", "", clause).decode()

    def wait_until_told(self) -> None:
        """Rank 0, which hosts the store, gives the others the time to read from it why they end."""
        deadline = time.monotonic() + TELL_SECONDS
        while self._rank == 0 and len(self.gone()) < len(self._others) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)

    def say_leaving(self) -> None:
        """This rank leaves as it should; rank 0 waits until all others have said so."""
        self._store.set(f"stop/leaving/{self._rank}", "1")
        deadline = time.monotonic() + SAVE_SECONDS
        staying = list(self._others) if self._rank == 0 else []
        while staying and time.monotonic() < deadline:
            gone = self.gone()
            staying = [rank for rank in staying if rank not in gone and not self._store.check([f"stop/leaving/{rank}"])]
            time.sleep(POLL_SECONDS / 5)

    def _look_for_unmet(self) -> None:
        for rank in [rank for rank in self._unmet if self._store.check([f"stop/process/{rank}"])]:
            self._unmet.remove(rank)
            facts = json.loads(self._store.get(f"stop/process/{rank}"))
            self._names[rank] = f"rank {rank} ({facts['role']})"
            process = find_process(facts["pid"], facts["started"]) if facts["machine"] == machine() else None
            if process is not None:  # else two machines are named alike
                self._processes[rank] = process


def own_connection(store: dist.Store) -> dist.Store:
    """A connection to the same store that is never busy: in one, a thread that waits for a key blocks all others."""
    if not isinstance(store, dist.TCPStore):
        return store
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def machine() -> str:
    """Names the machine and the name space that process ids count in (containers)."""
    parts = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts += [boot.read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def find_process(pid: int, started: float) -> psutil.Process | None:
    """The process with this id that started at this time (seconds, within what a clock is set by), if it is there."""
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - started) < 5 else None
    except psutil.NoSuchProcess:
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one whose parent has yet to take note of its end does not."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def find_launchers() -> list[psutil.Process]:
    """Processes that this one shall not outlive: DeepSpeed's launcher on this machine and the command that started it.

    A signal to the command alone reaches nobody else. Other ancestors (a shell) may end when they like.
    """
    launcher = psutil.Process().parent()
    if launcher is None or not runs_launcher(launcher):
        return []
    command = launcher.parent()
    return [launcher, command] if command is not None and runs_command(command) else [launcher]


def runs_launcher(process: psutil.Process) -> bool:
    """Whether it is DeepSpeed's launcher of a machine's ranks."""
    return "deepspeed.launcher.launch" in arguments_of(process)


def runs_command(process: psutil.Process) -> bool:
    """Whether it is the command `deepspeed`, under one of its names."""
    words = arguments_of(process)[:4]  # Python and its options come first
    return "deepspeed.launcher.runner" in words or bool({"deepspeed", "ds"} & {Path(word).name for word in words})


def arguments_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
