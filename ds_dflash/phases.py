"""Where the time goes: seconds of a rank's main thread by phase; under `training.profile` some updates are traced."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

Item = TypeVar("Item")

UNTRACED, TRACED = 3, 3
"""Updates of a process before its trace starts, and updates in it."""


class Phases:
    """Seconds by phase. Phases do not nest; what is in none of them is "other" in the table.

    synchronizes: whether a phase waits for the device at its end, so that the work it has started counts as its own.
    """

    def __init__(self, synchronizes: bool = False) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._synchronizes = synchronizes and torch.cuda.is_available()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with record_function(name):
            yield
            if self._synchronizes:
                torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - started

    def next(self, name: str, items: Iterator[Item]) -> Item | None:
        """The next of `items`, whose making is a phase; None at their end."""
        with self(name):
            return next(items, None)


class Profiler:
    """The table and the trace of one rank, in `directory`; without one, nothing at all.

    The table leaves out the first update, which warms up.
    """

    def __init__(self, directory: Path | None, name: str, phases: Phases) -> None:
        self._directory, self._name, self._phases = directory, name, phases
        self._updates = -1
        self._started = 0.0
        self._profile: profile | None = None
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=UNTRACED - 1, warmup=1, active=TRACED, repeat=1),
            on_trace_ready=lambda made: made.export_chrome_trace(str(directory / f"{name}.trace.json")),
            acc_events=True,
        )
        self._profile.start()

    def update_done(self) -> bool:
        """Whether there is a profile, whose own work (writing the trace takes seconds) is left out of the table."""
        if self._profile is None:
            return False
        started = time.perf_counter()
        self._profile.step()
        self._started += time.perf_counter() - started
        self._updates += 1
        if not self._updates:
            self._phases.seconds.clear()
            self._started = time.perf_counter()
        return True

    def close(self) -> None:
        """Write and print the table."""
        if self._profile is None or self._directory is None:
            return
        seconds = time.perf_counter() - self._started
        self._profile.stop()
        if self._updates > 0:
            text = table(self._name, self._phases.seconds, seconds, self._updates)
            (self._directory / f"{self._name}.txt").write_text(text + "\n")
            print(text, flush=True)


def table(name: str, seconds: dict[str, float], total: float, updates: int) -> str:
    """Seconds, share of the whole and milliseconds an update of each phase, the longest first."""
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    rows.append(("other", total - sum(seconds.values())))
    lines = [f"{name}: {updates} updates in {total:.2f} s", f"{'phase':12}{'s':>10}{'share':>8}{'ms/update':>12}"]
    lines += [f"{phase:12}{part:10.2f}{part / total:8.1%}{1000 * part / updates:12.1f}" for phase, part in rows]
    return "\n".join(lines)
