"""The processes that tokenise: how many, and that none outlives the one that started them.

`datasets` forks a pool and a manager. If the process that builds is killed, these would live on: writing into a
directory that the next build clears, and holding the build's lock, which a forked process inherits. So while a build
runs, the system is told to end forked processes together with this one (Linux).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ROWS_PER_PROCESS = 2000  # fewer are done before another process has started
MAX_PROCESSES = 16
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_building = False


def count_processes(rows: int) -> int:
    """Processes for that many rows: as many as cores, fewer for a dataset that is done before they have started."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MAX_PROCESSES, rows // ROWS_PER_PROCESS))


@contextmanager
def pool_of(processes: int) -> Iterator[None]:
    """While this is open, forked processes end with this one, and the tokenizers library starts no threads in them."""
    global _building
    name = "TOKENIZERS_PARALLELISM"  # the library's only switch
    before = os.environ.get(name)
    _building = True
    if processes > 1:
        os.environ[name] = "false"
    try:
        yield
    finally:
        _building = False
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


if sys.platform == "linux":
    _prctl = ctypes.CDLL(None).prctl  # found here and not in the fork, which may do little

    def _end_with_parent() -> None:
        if _building:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(after_in_child=_end_with_parent)
