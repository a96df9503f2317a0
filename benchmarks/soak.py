"""Does a run survive anything? The same training undisturbed and with ranks killed at random: equal to the last bit.

    python benchmarks/soak.py [--minutes 10] [--updates 500] [--seed 0] [--directory DIR]

Tiny models on the CPU, 2 + 1 ranks, each a process, W&B offline. First the undisturbed run, whose memory is watched.
Then the same settings again, where 2 to 8 s after the first update that follows a start a random rank gets SIGKILL
(one time in five SIGTERM) and the same command starts the job again, until the minutes are over; the last start runs
to the end. Exits with 1 when a guarantee of the table does not hold.
"""

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

import distributed  # noqa: E402
import psutil  # noqa: E402
import tiny  # noqa: E402
from spreads import last_weights  # noqa: E402
from traces import samples_by_epoch, trace  # noqa: E402

from ds_dflash.checkpoint import is_whole  # noqa: E402
from ds_dflash.config import load_settings  # noqa: E402
from ds_dflash.job import Job  # noqa: E402
from ds_dflash.topology import Roles  # noqa: E402

ROLES = ("target 0", "target 1", "drafter")
ROWS = 48
SAVE_EVERY = 3
DELAY = 0.1  # seconds that a drafter rank waits at most before each of the 4 micro-batches of an update
TERM_SHARE = 0.2
SECONDS_TO_KILL = (2.0, 8.0)
SECONDS_TO_START = 240.0
SECONDS_TO_END = 60.0
FLAT = 0.03
WARM_UP = 0.1  # share of the updates before memory counts
MARK = "DS_DFLASH_SOAK"  # in the environment of every process of this benchmark


@dataclass(frozen=True)
class Kill:
    """Who got which signal how long after the start's first update, and how long all ranks took to end."""

    rank: int
    number: signal.Signals
    after: float
    seconds_to_end: float


@dataclass
class Report:
    """What happened; `broken` are sentences about guarantees that did not hold."""

    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)

    def expect(self, holds: bool, sentence: str) -> bool:
        if not holds:
            self.broken.append(sentence)
            print(f"BROKEN: {sentence}", flush=True)
        return holds


@dataclass(frozen=True)
class Run:
    """A run in a directory of its own, which also holds its traces and logs."""

    config: Path
    delay: float

    @property
    def directory(self) -> Path:
        return self.config.parent / "runs" / "run"

    @property
    def trace_file(self) -> Path:
        """Grows by a line with each update."""
        return self.config.parent / f"trace-{len(ROLES) - 1}.jsonl"

    def start(self) -> distributed.Ranks:
        os.environ["DELAY"] = str(self.delay)
        return distributed.start(len(ROLES), self.config, program="benchmarks/delayed.py")

    def logs(self) -> str:
        return "\n".join(
            f"--- rank {rank}\n{distributed.output(self.config, rank)[-2000:]}" for rank in range(len(ROLES))
        )

    def updates(self) -> list[int]:
        return [line["update"] for line in distributed.metrics(self.directory)]

    def losses(self) -> list[float]:
        return [line["loss"] for line in distributed.metrics(self.directory)]

    def weights(self) -> dict[str, list]:
        """The fp32 numbers of every tensor after the last update."""
        return {name: tensor.tolist() for name, tensor in last_weights(self.directory).items()}

    def checkpoints(self) -> list[Path]:
        return sorted((self.directory / "checkpoints").glob("step-*"))


def write_run(directory: Path, name: str, delay: float, epochs: int) -> Run:
    content = tiny.settings(
        directory / "target",
        directory / "train.jsonl",
        directory / name / "runs",
        data={"cache_dir": str(directory / "cache")},
        batching={"token_budget": 256},
        training={"num_epochs": epochs, "save_every": SAVE_EVERY},
    )
    content["wandb"] = {"enabled": True}
    config = directory / name / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(content))
    return Run(config, delay)


def epochs_for(directory: Path, updates: int) -> int:
    """The fewest whole epochs with so many updates."""
    settings = load_settings(write_run(directory, "plan", 0.0, 1).config)
    job = Job.open(settings, Roles.assign(settings.topology, len(ROLES), len(ROLES)))
    epochs = planned = 0
    while planned < updates:
        planned += job.sampler.count_updates(epochs)
        epochs += 1
    return epochs


# ------------------------------------------------------------------------------------------------- undisturbed


Memory = list[tuple[int, list[int]]]
"""(updates done, resident bytes of every rank), in the order of time."""


def watch(run: Run, report: Report) -> Memory:
    """The undisturbed run."""
    memory: Memory = []
    ranks = run.start()
    processes = [psutil.Process(process.pid) for process in ranks.processes]
    while all(process.poll() is None for process in ranks.processes):
        done = run.trace_file.read_bytes().count(b"\n") if run.trace_file.exists() else 0
        try:
            memory.append((done, [process.memory_info().rss for process in processes]))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.25)
    codes = ranks.wait(SECONDS_TO_END)
    if not report.expect(codes == [0] * len(ROLES), f"the undisturbed run ended with {codes}"):
        print(run.logs())
    return memory


def quarters(memory: Memory, updates: int) -> list[tuple[float, float]]:
    """Mean resident bytes of every rank in the first and in the last quarter of the updates after the warm-up."""
    warm, quarter = WARM_UP * updates, (1 - WARM_UP) * updates / 4
    spans = ((warm, warm + quarter), (updates - quarter, updates))
    first, last = ([sample for done, sample in memory if low <= done < high] for low, high in spans)
    return [
        (sum(sample[rank] for sample in first) / len(first), sum(sample[rank] for sample in last) / len(last))
        for rank in range(len(ROLES))
    ]


# --------------------------------------------------------------------------------------------------- disturbed


def disturb(run: Run, minutes: float, rng: random.Random, updates: int, report: Report) -> None:
    """Kill and start again until the minutes are over or the run is nearly done, then let it end."""
    until = time.monotonic() + 60 * minutes
    while True:
        rank = rng.randrange(len(ROLES))
        number = signal.SIGTERM if rng.random() < TERM_SHARE else signal.SIGKILL
        after = rng.uniform(*SECONDS_TO_KILL)
        size = run.trace_file.stat().st_size if run.trace_file.exists() else 0
        ranks = run.start()
        report.starts += 1
        started = wait_for_first_update(run, ranks, size)
        if not report.expect(started, f"start {report.starts} made no update"):
            ranks.kill()
            print(run.logs())
            return
        if time.monotonic() < until:
            time.sleep(after)
        if time.monotonic() >= until or run.updates()[-1] > updates - 2 * SAVE_EVERY:
            codes = ranks.wait(600)
            report.expect(codes == [0] * len(ROLES), f"the last start ended with {codes}")
            return
        kill(run, ranks, rank, number, after, report)


def wait_for_first_update(run: Run, ranks: distributed.Ranks, size: int) -> bool:
    """Whether an update was made before a rank ended; `size`: of the trace before the start."""
    deadline = time.monotonic() + SECONDS_TO_START
    while not run.trace_file.exists() or run.trace_file.stat().st_size == size:
        if time.monotonic() > deadline or any(process.poll() is not None for process in ranks.processes):
            return False
        time.sleep(0.05)
    return True


def kill(run: Run, ranks: distributed.Ranks, rank: int, number: signal.Signals, after: float, report: Report) -> None:
    """One kill and what must hold after it."""
    ranks.signal(rank, number)
    at = time.monotonic()
    try:
        codes = ranks.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        report.expect(False, f"{number.name} of {ROLES[rank]}: not all ranks had ended after {SECONDS_TO_END:.0f} s")
        print(run.logs())
        return
    report.kills.append(Kill(rank, number, after, time.monotonic() - at))
    what = f"kill {len(report.kills)}, {number.name} of {ROLES[rank]}"
    done, checkpoints = run.updates()[-1], run.checkpoints()
    saved = checkpoints[-1].name if checkpoints else "no checkpoint"
    print(
        f"{what} after {after:.1f} s: ended in {report.kills[-1].seconds_to_end:.1f} s at {done}, {saved}", flush=True
    )
    saves = number == signal.SIGTERM
    ended_well = (codes == [0] * len(ROLES) and saved == f"step-{done:06d}") if saves else all(codes)
    if not report.expect(ended_well, f"{what}: exit codes {codes}, {saved} after update {done}"):
        print(run.logs())
    damaged = [path.name for path in checkpoints if not is_whole(path)]
    report.expect(not damaged, f"{what}: {', '.join(damaged)} not whole")
    left = processes_left()
    report.expect(not left, f"{what}: processes left {left}")


def marked() -> Iterator[psutil.Process]:
    """All other processes that were started by this benchmark, directly or not."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]:
                yield process
        except psutil.Error:
            continue


def processes_left(seconds: float = 10.0) -> list[str]:
    """What still runs after some seconds, which is ended then."""
    deadline = time.monotonic() + seconds
    while (left := list(marked())) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = [" ".join(process.cmdline()[:4]) for process in left]
    for process in left:
        process.kill()
    return names


# --------------------------------------------------------------------------------------------------- the table


def compare(whole: Run, killed: Run, epochs: int, report: Report) -> None:
    """The guarantees about the results of both runs."""
    everything = {epoch: list(range(ROWS)) for epoch in range(epochs)}
    for name, run in (("undisturbed", whole), ("killed", killed)):
        report.expect(samples_by_epoch(run.config.parent) == everything, f"{name}: not each sample once an epoch")
        report.expect(run.updates() == list(range(1, len(whole.updates()) + 1)), f"{name}: updates miss or repeat")
        report.expect(all(is_whole(path) for path in run.checkpoints()), f"{name}: a checkpoint is not whole")
    report.expect(trace(killed.config.parent) == trace(whole.config.parent), "not the same samples in every update")
    report.expect(killed.losses() == whole.losses(), "the losses differ from the undisturbed run's")
    report.expect(killed.weights() == whole.weights(), "the weights differ from the undisturbed run's")
    names = [[path.name for path in run.checkpoints()] for run in (whole, killed)]
    report.expect(names[0] == names[1], f"other checkpoints than the undisturbed run's: {names}")
    left = processes_left()
    report.expect(not left, f"processes left at the end: {left}")


def print_table(report: Report, killed: Run, memory: list[tuple[float, float]], updates: int) -> None:
    counts = Counter((kill.number.name, ROLES[kill.rank]) for kill in report.kills)
    lines = killed.trace_file.read_text().count("\n")
    for name in ("SIGKILL", "SIGTERM"):
        by_role = ", ".join(f"{role}: {counts[name, role]}" for role in ROLES)
        took = [kill.seconds_to_end for kill in report.kills if kill.number.name == name]
        print(f"{name:12}{len(took)} ({by_role}); all ranks ended in at most {max(took, default=0.0):.1f} s")
    print(f"{'starts':12}{report.starts}")
    print(f"{'updates':12}{updates}, and {lines - updates} done again after a kill")
    print(f"{'seconds':12}{report.seconds:.0f}")
    for role, (first, last) in zip(ROLES, memory, strict=True):
        change = f"{first / 1e6:.1f} MB in the first quarter, {last / 1e6:.1f} MB in the last ({last / first - 1:+.2%})"
        print(f"{'memory':12}{role}: {change}")
    kept = "samples once an epoch, same samples, losses and weights, whole checkpoints, no process left, flat memory"
    print(
        f"{'guarantees':12}"
        + (f"{len(report.broken)} BROKEN: {report.broken}" if report.broken else f"all hold: {kept}")
    )


def soak(directory: Path, options: argparse.Namespace) -> Report:
    report = Report()
    directory.mkdir(parents=True, exist_ok=True)
    tiny.write_target(directory / "target")
    tiny.write_chats(directory / "train.jsonl", ROWS)
    epochs = epochs_for(directory, options.updates)
    whole, killed = (write_run(directory, name, delay, epochs) for name, delay in (("whole", 0.0), ("killed", DELAY)))
    samples = watch(whole, report)
    updates = len(whole.updates())
    print(f"undisturbed: {updates} updates in {epochs} epochs", flush=True)
    memory = quarters(samples, updates)
    for role, (first, last) in zip(ROLES, memory, strict=True):
        report.expect(abs(last / first - 1) < FLAT, f"memory of {role}: from {first / 1e6:.1f} to {last / 1e6:.1f} MB")
    started = time.monotonic()
    disturb(killed, options.minutes, random.Random(options.seed), updates, report)
    report.seconds = time.monotonic() - started
    compare(whole, killed, epochs, report)
    print_table(report, killed, memory, updates)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long ranks are killed (10)")
    parser.add_argument("--updates", type=int, default=500, help="updates of the run at least (500)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of ranks, signals and times (0)")
    parser.add_argument("--directory", type=Path, help="where the runs are left, an empty one (a temporary one)")
    options = parser.parse_args()
    os.environ[MARK] = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as temporary:
        return 1 if soak(options.directory or Path(temporary), options).broken else 0


if __name__ == "__main__":
    sys.exit(main())
