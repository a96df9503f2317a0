"""How a run ends early: signals, a launcher that is gone, a peer that died, a rank that failed.

The first rank that gets SIGTERM or SIGINT (or whose launcher is gone) writes a key into the job's store; a thread on
every rank reads it within `POLL_SECONDS`. Ranks that train save and leave by themselves; a rank with nothing to save,
which may sit in a collective that will never end, is ended by its thread once the save is done.

Every rank registers its process in the store, and the thread looks at those of its own machine: one that is gone
without having said that it leaves was killed or has crashed, and all others end without saving. DeepSpeed's launcher
answers such a death by SIGTERM to the others, so a signal counts only after a look at the peers.

A rank that has waited in vain asks all ranks where they are: the thread of each answers with the stack of its main
thread, so that one which hangs is reported with the place.

Rank 0 hosts the store and leaves last, so a store that breaks means that rank 0 is gone.
"""

import io
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from ds_dflash.peers import POLL_SECONDS, SAVE_SECONDS, Peers, is_alive, own_connection

DOUBLE_SIGNAL_SECONDS = 3.0


class StopRequestedError(Exception):
    """Raised out of a wait when the run is to stop."""


class Stopper:
    """Watches for reasons to stop. One a process; `start` before anything can take long.

    store: the job's key-value store, or None for a process on its own (then only this process's signals count).
    exits_alone: whether this rank never has anything to save, so that the thread may end the process.
    max_hours: hours from now on after which the run stops as by a signal; None: no limit.
    role, world_size: this rank's role in words, and the ranks of the job. launchers: see `find_launchers`.
    """

    def __init__(
        self,
        rank: int,
        store: dist.Store | None,
        exits_alone: bool,
        max_hours: float | None = None,
        role: str = "",
        world_size: int = 1,
        launchers: Sequence[psutil.Process] = (),
    ) -> None:
        self._rank = rank
        self._max_hours = max_hours
        self._deadline = math.inf if max_hours is None else time.monotonic() + 3600 * max_hours
        self._reason = ""
        self._main_thread = threading.get_ident()
        self._has_answered = False
        self._store = None if store is None else own_connection(store)
        self._peers = None if self._store is None else Peers(rank, role, world_size, self._store)
        self._launchers = launchers
        self._exits_alone = exits_alone
        self._must_save = False
        self._requested = threading.Event()
        self._first_signal = 0.0
        self._stops_since = math.inf
        self._parent = os.getppid()
        self._closed = threading.Event()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    @property
    def reason(self) -> str:
        """What the stop was asked for by."""
        return self._reason or self._read("stop/reason") or ""

    def raise_if_requested(self) -> None:
        if self.requested:
            raise StopRequestedError

    def start(self) -> None:
        """Install the signal handlers and start the watching thread."""
        if self._peers is not None:
            self._peers.meet()
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        reader.settimeout(POLL_SECONDS)
        # The C handler writes the signal's number at once, even while the main thread sits in a C++ wait.
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._sockets = (reader, writer)
        self._thread = threading.Thread(target=self._watch, args=(reader,), name="stopper", daemon=True)
        self._thread.start()

    def must_save(self) -> None:
        """From now on this rank has something to save, so it is its main thread that ends it at a stop."""
        self._must_save = True

    def close(self) -> None:
        """No more watching, neither by this rank nor of it: it is about to leave as it should.

        Rank 0 waits for all others, since the store goes with it. The thread is joined before, so that it does not ask
        a store that is gone, and since one that is in C++ while the interpreter shuts down aborts the process.
        """
        self._closed.set()
        self._thread.join(timeout=10)
        if self._peers is not None:
            self._peers.say_leaving()

    def saved(self) -> None:
        """Tell the ranks that wait for it that nothing is left to save."""
        if self._store is not None:
            self._store.set("stop/saved", "1")

    def fail(self, reason: str) -> None:
        """Tell all ranks to end without saving, since this one cannot go on; the caller ends the process."""
        self._closed.set()
        if self._peers is None:
            return
        try:
            self._peers.tell(f"of rank {self._rank}: {reason}")
            self._peers.wait_until_told()
        except (dist.DistError, RuntimeError):  # rank 0 is gone, which the others see for themselves
            return

    def ask_where_all_are(self, world_size: int) -> str:
        """One line a rank: where its main thread is. For a rank that has waited in vain.

        The first that asks tells the others; a later one does not return, its thread ends it with the same reason.
        """
        if self._store is None:
            return ""
        if self._store.add("stop/asked", 1) > 1:
            time.sleep(SAVE_SECONDS)
            leave(1)
        self._store.set("stop/stacks", str(self._rank))
        time.sleep(4 * POLL_SECONDS)
        return "\n".join(
            f"rank {rank}: {self._read(f'stop/stack/{rank}') or 'does not answer'}" for rank in range(world_size)
        )

    def wait_for_reason(self) -> None:
        """When a connection breaks: time for the watching thread to learn why, and to end the process if it does."""
        time.sleep(8 * POLL_SECONDS)
        if self.requested:
            self.wait_for_the_end()

    def wait_for_the_end(self) -> NoReturn:
        """For a main thread with nothing left to do: the process ends once the save is done."""
        deadline = time.monotonic() + SAVE_SECONDS + 5
        while time.monotonic() < deadline:
            if self._read("stop/saved") is not None:
                self.close()
                leave(0)
            time.sleep(POLL_SECONDS)
        leave(1, f"rank {self._rank}: a stop did not come to its end")

    # ------------------------------------------------------------------------------------- the watching thread

    def _watch(self, reader: socket.socket) -> None:
        while not self._closed.is_set():
            numbers = self._read_signals(reader)
            if self._closed.is_set():
                return
            try:
                self._look(numbers)
            except (dist.DistError, RuntimeError) as error:
                if not self._closed.is_set():
                    self._end_without_store(error)

    def _look(self, numbers: set[int]) -> None:
        if self._peers is not None:  # before a signal is taken for an operator's
            self._end_if_a_rank_is_lost(self._peers)
        if numbers:
            self._take_signals(numbers)
        if os.getppid() != self._parent or not all(map(is_alive, self._launchers)):
            self._request(f"the end of the launcher of rank {self._rank}")
        if time.monotonic() > self._deadline:
            self._request(f"training.max_hours, {self._max_hours}")
        if self._store is not None:
            self._read_requests(self._store)

    def _read_signals(self, reader: socket.socket) -> set[int]:
        try:
            return set(reader.recv(64)) & {signal.SIGTERM, signal.SIGINT}
        except TimeoutError:
            return set()

    def _take_signals(self, numbers: set[int]) -> None:
        now = time.monotonic()
        if self._first_signal and now - self._first_signal > DOUBLE_SIGNAL_SECONDS:
            if self._peers is not None:
                self._peers.tell(f"of rank {self._rank}: second signal")
            leave(1, f"rank {self._rank}: second signal, leaving without saving")
        self._first_signal = self._first_signal or now
        self._request(signal.Signals(min(numbers)).name)

    def _request(self, reason: str) -> None:
        if self.requested:
            return
        self._reason = reason
        if self._store is not None:
            self._store.compare_set("stop/reason", "", reason)
        self._requested.set()

    def _end_if_a_rank_is_lost(self, peers: "Peers") -> None:
        lost = peers.lost()
        clause = self._read("stop/failed")  # after the look: who leaves for a reason writes it first
        if clause is None and lost:
            clause = peers.tell("; ".join(map(peers.describe_death, lost)))
        if clause is None or self._closed.is_set():
            return
        peers.wait_until_told()
        leave(1, f"rank {self._rank} ends because {clause}")

    def _end_without_store(self, error: RuntimeError) -> NoReturn:
        assert self._peers is not None
        for _ in range(4):  # the connections of a process that dies close before it counts as dead
            if 0 in self._peers.gone():
                break
            time.sleep(POLL_SECONDS)
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        death = self._peers.describe_death(0) if 0 in self._peers.gone() else f"rank 0 is gone ({first_line})"
        leave(1, f"rank {self._rank} ends because {death}")

    def _read_requests(self, store: dist.Store) -> None:
        if not self.requested and store.check(["stop/reason"]):
            self._requested.set()
        if not self._has_answered and store.check(["stop/stacks"]):
            store.set(f"stop/stack/{self._rank}", describe_stack(sys._current_frames()[self._main_thread]))
            self._has_answered = True
        if self.requested and not self._must_save:
            self._leave_if_saved()

    def _leave_if_saved(self) -> None:
        now = time.monotonic()
        self._stops_since = min(self._stops_since, now)
        if not self._exits_alone:  # it trains, but has not begun: no rank can have done an update without it
            self.saved()
        if now - self._stops_since > SAVE_SECONDS or self._read("stop/saved") is not None:
            if self._peers is not None:
                self._peers.say_leaving()
            leave(0)

    def _read(self, key: str) -> str | None:
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()


def describe_stack(frame: FrameType) -> str:
    """Where a thread is, the innermost of its calls first, those into this package and the one they ended in."""
    calls = traceback.extract_stack(frame)[::-1]
    shown = [call for index, call in enumerate(calls) if index == 0 or "ds_dflash" in Path(call.filename).parts]
    waits = any(call.name == wait_for.__name__ for call in calls)
    places = [f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in shown[:5]]
    return f"{'waits' if waits else 'is'} in {' < '.join(places)}"


class LastingOutput(io.FileIO):
    """A file whose reader may go away: what is written then is lost, and nothing else."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def outlive_readers() -> None:
    """Let standard output and error take what is printed also when nobody reads any more.

    Ctrl-C on `deepspeed launch.sh | tee log` ends tee too, and a print must not keep a rank from saving.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        old.flush()
        raw = LastingOutput(descriptor, "w", closefd=False)
        new = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, old.errors, line_buffering=True)
        setattr(sys, name, new)


def leave(code: int, message: str = "") -> NoReturn:
    """End the process at once: threads may sit in waits that nothing ends."""
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for(ready: Callable[[float], bool], stopper: Stopper, timeout: float, what: str) -> None:
    """Call `ready(seconds)` until it is true; StopRequestedError on a stop, TimeoutError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not ready(POLL_SECONDS):
        stopper.raise_if_requested()
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}: see topology.timeout_seconds")
