"""Sums of the training metrics on the device, and where the figures of an update go: W&B, metrics.jsonl, the terminal.

Sums are kept per length stratum (powers of two), so that a jumpy curve can be read: `length_512/loss` is the loss of
samples of 512 to 1023 tokens.
"""

import json
import math
import netrc
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
import torch.distributed as dist
import wandb
from torch import Tensor
from tqdm import tqdm

from ds_dflash.errors import UserError, naming

STRATA = 24
LOSS, WEIGHT, BLOCKS, ACCEPTED, SLOTS = range(5)

INIT_SECONDS, FINISH_SECONDS, CLOSE_SECONDS = 10, 10, 20
"""What W&B may take to answer at first, to take the last figures, and at the end of training altogether."""


class BlockFigures(Protocol):
    """What `loss.BlockResult` gives of some blocks: fp32 [blocks], int64 [blocks] and bool [blocks, B]."""

    @property
    def block_loss(self) -> Tensor: ...
    @property
    def block_weight(self) -> Tensor: ...
    @property
    def accepted(self) -> Tensor: ...
    @property
    def correct(self) -> Tensor: ...
    @property
    def supervised(self) -> Tensor: ...


class MetricSums:
    """float64 [STRATA, 4 + 2 (B - 1)] on the device.

    Columns: loss, its weight, blocks, accepted tokens, then the right and the supervised ones of every slot.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._slots = block_size - 1
        self._sums = torch.zeros(STRATA, SLOTS + 2 * self._slots, dtype=torch.float64, device=device)

    def add(self, block_lengths: np.ndarray, result: BlockFigures) -> None:
        """Add blocks of rows of `block_lengths` (int64 [blocks])."""
        strata = torch.from_numpy(np.frexp(block_lengths)[1] - 1).to(self._sums.device)
        per_block = torch.stack(
            [result.block_loss, result.block_weight, torch.ones_like(result.block_loss), result.accepted], 1
        )
        rows = torch.cat([per_block, result.correct[:, 1:], result.supervised[:, 1:]], dim=1)
        self._sums.index_add_(0, strata, rows.double())

    def figures(self) -> dict[str, float]:
        """All figures, summed over the drafter ranks (a collective call)."""
        sums = self._sums.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        table = sums.cpu().numpy()
        figures = {"loss_weight": float(table[:, WEIGHT].sum()), **_figures(table.sum(0))}
        right, slots = table[:, SLOTS : SLOTS + self._slots].sum(0), table[:, SLOTS + self._slots :].sum(0)
        for slot in range(self._slots):
            if slots[slot]:
                figures[f"accuracy_slot/{slot + 1}"] = float(right[slot] / slots[slot])
        for stratum in np.flatnonzero(table[:, BLOCKS]):
            for name, value in _figures(table[stratum]).items():
                figures[f"length_{1 << int(stratum)}/{name}"] = value
        return figures


def _figures(sums: np.ndarray) -> dict[str, float]:
    slots = (len(sums) - SLOTS) // 2
    right, supervised = sums[SLOTS : SLOTS + slots].sum(), sums[SLOTS + slots :].sum()
    return {
        "loss": float(sums[LOSS] / sums[WEIGHT]) if sums[WEIGHT] else math.nan,
        "accuracy": float(right / supervised) if supervised else math.nan,
        "acceptance_length": float(sums[ACCEPTED] / sums[BLOCKS]) if sums[BLOCKS] else math.nan,
    }


class Sink(Protocol):
    """Takes the figures of an update."""

    def log(self, figures: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object an update, and one a validation.

    On a resume it is cut back to the updates that were done, and to the validations until update `validated`.
    """

    def __init__(self, path: Path, done: int, validated: int) -> None:
        kept = [line for line in _lines(path) if line["update"] <= (validated if is_validation(line) else done)]
        temporary = path.with_suffix(".writing")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._path, self._file = path, path.open("a")

    def log(self, figures: dict[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        with naming(self._path):
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def is_validation(figures: dict[str, Any]) -> bool:
    return "validation/loss" in figures


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a last line that was cut short is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    lines = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            lines.append(json.loads(line))
            lines[-1]["update"]
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}, line {number}: not the figures of an update: mend or remove the line.") from None
    return lines


class WandbRun:
    """A W&B run with `update` as its step axis: online when a key is there and W&B answers, else offline.

    metrics.jsonl is the journal, and a thread hands W&B what it lacks of it: `log` never waits, and neither a dead nor
    a slow W&B holds up training. Every line of the journal has a step of its own there, 2 * update, and one more for
    validation. Online, a run that goes on is asked for its last step: what W&B has is not logged again, and what it
    never got, because a process was killed or W&B did not answer, follows from the journal. Offline runs cannot be
    resumed (wandb 0.31 uploads each run directory from step 0), so each start writes one that is complete from the
    journal, under the same run id, and removes those of earlier starts, which it contains.

    Raises UserError where W&B's files cannot be written.
    """

    def __init__(
        self, block: dict[str, Any], directory: Path, name: str, config: dict[str, Any], run_id: str | None
    ) -> None:
        self._journal = directory / "metrics.jsonl"
        self._files = directory / "wandb"
        _check_writable(self._files)
        self.run_id = run_id or _last_run_id(self._files) or secrets.token_hex(4)
        self._options: dict[str, Any] = {
            "project": block.get("project", "ds_dflash"),
            "entity": block.get("team"),
            "group": block.get("group"),
            "name": name,
            "id": self.run_id,
            "dir": str(directory),
            "config": config,
        }
        self._news, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="wandb", daemon=True)
        self._thread.start()

    def log(self, figures: dict[str, Any]) -> None:
        """Say that the journal has these figures."""
        self._news.set()

    def close(self) -> None:
        """Wait until W&B has all, for a bounded time."""
        self._closing.set()
        self._news.set()
        self._thread.join(timeout=CLOSE_SECONDS)
        if self._thread.is_alive():
            self._say(f"W&B does not come to an end: what it lacks is in {self._journal}")

    def _follow(self) -> None:
        try:
            run = self._start()
            run.define_metric("update")
            run.define_metric("*", step_metric="update")
            files = Path(run.dir).parent
            with self._journal.open("rb") as journal:
                self._remove_earlier(files, journal)
                self._feed(run, journal)
            self._finish(run, files)
        except Exception as error:  # whatever it is, training goes on without W&B
            self._say(f"W&B is off ({_first_line(error)}): the figures are in {self._journal}")

    def _start(self) -> wandb.Run:
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        if mode == "offline":
            self._say(f"W&B: logged offline, `wandb sync {self._files}` sends it")
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        options = self._options | {"settings": settings, "mode": mode}
        if mode != "online":
            return wandb.init(**options)
        try:
            return wandb.init(**options, resume="allow")
        except (wandb.Error, OSError) as error:
            self._say(f"W&B does not answer ({_first_line(error)}): logged offline, see `wandb sync {self._files}`")
        wandb.teardown()  # or the run's id stays in use
        return wandb.init(**options | {"mode": "offline"})

    def _remove_earlier(self, present: Path, journal: BinaryIO) -> None:
        """Offline runs of earlier starts, unless the journal lacks its beginning."""
        first = next(_new_lines(journal), None)
        journal.seek(0)
        if first is not None and first["update"] > 1:
            return
        for directory in self._files.glob(f"offline-run-*-{self.run_id}*"):
            if directory != present:
                shutil.rmtree(directory)

    def _feed(self, run: wandb.Run, journal: BinaryIO) -> None:
        """Log what the journal has and W&B lacks, until the end of training."""
        while True:
            ends = self._closing.is_set()  # asked first: what was written before is then read
            for line in _new_lines(journal):
                step = 2 * line["update"] + is_validation(line)
                if step >= run.starting_step:
                    run.log({name: value for name, value in line.items() if value is not None}, step=step, commit=True)
            if ends:
                return
            self._news.wait()
            self._news.clear()

    def _finish(self, run: wandb.Run, files: Path) -> None:
        try:
            run.finish()
        except TimeoutError:
            self._say(f"W&B has not taken all figures within {FINISH_SECONDS} s: `wandb sync {files}` sends them")
        wandb.teardown()  # its process writes the last points when it ends

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _new_lines(journal: BinaryIO) -> Iterator[dict[str, Any]]:
    """The whole lines from where the journal stands; one that is still being written is left for the next time."""
    while (line := journal.readline()).endswith(b"\n"):
        yield json.loads(line)
    journal.seek(-len(line), os.SEEK_CUR)


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{directory} cannot hold W&B's files ({error.strerror}): make it a directory that can be written to, or"
            " set wandb.enabled to false."
        ) from None


def _last_run_id(directory: Path) -> str | None:
    """The id in the name of the newest run directory, run-TIME-ID or offline-run-TIME-ID; -1 may follow."""
    names = [path.name.removeprefix("offline-").split("-") for path in directory.glob("*run-*-*")]
    return max(names)[2] if names else None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class DeepSpeedMonitor:
    """DeepSpeed's own monitor (tensorboard, csv, comet), where the settings enable one."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor

    def log(self, figures: dict[str, Any]) -> None:
        update = figures["update"]
        self._monitor.write_events([(name, value, update) for name, value in figures.items()])

    def close(self) -> None:
        pass


class Terminal:
    """A progress bar on a terminal; plain lines elsewhere."""

    def __init__(self, done: int, every: int) -> None:
        self._every = every
        self._bar = tqdm(initial=done, unit="update", dynamic_ncols=True) if sys.stderr.isatty() else None

    def log(self, figures: dict[str, Any]) -> None:
        if is_validation(figures):
            is_best = figures.get("validation/best_update") == figures["update"]
            self._say(
                f"validation after update {figures['update']}  loss {figures['validation/loss']:.4f}"
                f"  acceptance {figures['validation/acceptance_length']:.3f}{' (best)' if is_best else ''}"
            )
            return
        update, total = figures["update"], figures["updates_total"]
        text = (
            f"epoch {figures['epoch']:.2f}  loss {figures['loss']:.4f}"
            f"  acceptance {figures['acceptance_length']:.3f}  lr {figures['learning_rate']:.2e}"
            f"  {figures['tokens_per_second']:,.0f} tok/s  busy/waiting s: target"
            f" {figures['target_busy_seconds']:.2f}/{figures['target_wait_seconds']:.2f} drafter"
            f" {figures['drafter_busy_seconds']:.2f}/{figures['drafter_wait_seconds']:.2f}"
        )
        if self._bar is not None:
            self._bar.total = total
            self._bar.n = update
            self._bar.set_postfix_str(f"{text}  eta {_clock(figures['eta_seconds'])}")
        elif update % self._every == 0 or update == total or update == 1:
            self._say(f"update {update}/{total}  {text}  eta {_clock(figures['eta_seconds'])}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@dataclass
class Pace:
    """Speed over the last updates, for tokens/s and ETA."""

    smoothed: float | None = None
    last: float = 0.0

    def start(self) -> None:
        self.last = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap; their moving average predicts the rest of the run."""
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        self.smoothed = seconds if self.smoothed is None else 0.9 * self.smoothed + 0.1 * seconds
        return seconds
