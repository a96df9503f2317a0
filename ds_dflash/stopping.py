"""How a run ends early: signals, a vanished launcher, a rank that failed.

The first rank that gets SIGTERM or SIGINT (or whose launcher is gone) writes a key into the job's store; a thread on
every rank reads it within `POLL_SECONDS`. Ranks that train save and leave by themselves; a target rank, which may sit
in a collective that will never end, is ended by its thread once the save is done.

A rank that has waited in vain asks all ranks where they are: the thread of each answers with the stack of its main
thread, so that one which hangs is reported with the place.
"""

import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

POLL_SECONDS = 0.25
SAVE_SECONDS = 25.0
DOUBLE_SIGNAL_SECONDS = 3.0


class StopRequestedError(Exception):
    """Raised out of a wait when the run is to stop."""


class Stopper:
    """Watches for reasons to stop. One a process; `start` before anything can take long.

    store: the job's key-value store, or None for a process on its own (then only this process's signals count).
    exits_alone: whether this rank has nothing to save, so that the thread may end the process.
    max_hours: hours from now on after which the run stops as by a signal; None: no limit.
    """

    def __init__(self, rank: int, store: dist.Store | None, exits_alone: bool, max_hours: float | None = None) -> None:
        self._rank = rank
        self._max_hours = max_hours
        self._deadline = math.inf if max_hours is None else time.monotonic() + 3600 * max_hours
        self._reason = ""
        self._main_thread = threading.get_ident()
        self._has_answered = False
        self._store = store
        self._exits_alone = exits_alone
        self._requested = threading.Event()
        self._first_signal = 0.0
        self._parent = os.getppid()
        self._closed = threading.Event()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    @property
    def reason(self) -> str:
        """What the stop was asked for by."""
        if not self._reason and self._store is not None and self._store.check(["stop/reason"]):
            self._reason = self._store.get("stop/reason").decode()
        return self._reason

    def raise_if_requested(self) -> None:
        if self.requested:
            raise StopRequestedError

    def start(self) -> None:
        """Install the signal handlers and start the watching thread."""
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

    def close(self) -> None:
        """No more watching: the run has ended and the store may go away.

        The thread is joined, since one that is in C++ while the interpreter shuts down aborts the process.
        """
        self._closed.set()
        self._thread.join(timeout=10)

    def saved(self) -> None:
        """Tell the ranks that wait for it that nothing is left to save."""
        if self._store is not None:
            self._store.set("stop/saved", "1")

    def fail(self, reason: str) -> None:
        """Tell all ranks to end without saving, since this one cannot go on."""
        if self._store is not None:
            self._store.set("stop/failed", f"rank {self._rank}: {reason}")
            self._let_others_read()

    def _let_others_read(self) -> None:
        if self._rank == 0:  # hosts the store
            time.sleep(4 * POLL_SECONDS)

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
        lines = []
        for rank in range(world_size):
            key = f"stop/stack/{rank}"
            is_there = self._store.check([key])
            lines.append(f"rank {rank}: {self._store.get(key).decode() if is_there else 'does not answer'}")
        return "\n".join(lines)

    def wait_for_reason(self) -> None:
        """When a connection breaks: time for the watching thread to learn why, and to end the process if it does."""
        time.sleep(8 * POLL_SECONDS)
        if self.requested:
            self.wait_for_the_end()

    def wait_for_the_end(self) -> NoReturn:
        """For a main thread with nothing left to do: the watching thread ends the process once the save is done."""
        time.sleep(SAVE_SECONDS + 5)
        leave(1, f"rank {self._rank}: a stop did not come to its end")

    def _watch(self, reader: socket.socket) -> None:
        while not self._closed.is_set():
            self._read_signals(reader)
            if os.getppid() != self._parent:
                self._request(f"the launcher of rank {self._rank} is gone")
            if time.monotonic() > self._deadline:
                self._request(f"training.max_hours, {self._max_hours}")
            if self._store is not None:
                self._read_store()

    def _read_signals(self, reader: socket.socket) -> None:
        try:
            numbers = reader.recv(64)
        except TimeoutError:
            return
        if not set(numbers) & {signal.SIGTERM, signal.SIGINT}:
            return
        now = time.monotonic()
        if self._first_signal and now - self._first_signal > DOUBLE_SIGNAL_SECONDS:
            leave(1, f"rank {self._rank}: second signal, leaving without saving")
        self._first_signal = self._first_signal or now
        self._request(signal.Signals(numbers[0]).name)

    def _request(self, reason: str) -> None:
        if not self.requested:
            self._reason = reason
            if self._store is not None:
                self._store.set("stop/reason", reason)
        self._requested.set()

    def _read_store(self) -> None:
        assert self._store is not None
        try:
            if self._store.check(["stop/failed"]):
                reason = self._store.get("stop/failed").decode()
                self._let_others_read()
                leave(1, f"rank {self._rank} ends because of {reason}")
            if not self.requested and self._store.check(["stop/reason"]):
                self._requested.set()
            if not self._has_answered and self._store.check(["stop/stacks"]):
                self._store.set(f"stop/stack/{self._rank}", describe_stack(sys._current_frames()[self._main_thread]))
                self._has_answered = True
        except (dist.DistError, RuntimeError) as error:
            if self._closed.is_set():
                return
            leave(0 if self.requested else 1, f"rank {self._rank}: rank 0 is gone ({error})")
        if self.requested and self._exits_alone:
            self._leave_when_saved()

    def _leave_when_saved(self) -> None:
        assert self._store is not None
        deadline = time.monotonic() + SAVE_SECONDS
        while time.monotonic() < deadline and not self._store.check(["stop/saved"]):
            time.sleep(POLL_SECONDS)
        self._let_others_read()
        leave(0)


def describe_stack(frame: FrameType) -> str:
    """Where a thread is, the innermost of its calls first, those into this package and the one they ended in."""
    calls = traceback.extract_stack(frame)[::-1]
    shown = [call for index, call in enumerate(calls) if index == 0 or "ds_dflash" in Path(call.filename).parts]
    waits = any(call.name == wait_for.__name__ for call in calls)
    places = [f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in shown[:5]]
    return f"{'waits' if waits else 'is'} in {' < '.join(places)}"


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
