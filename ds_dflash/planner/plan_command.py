"""`ds-dflash plan`: the batches of a configuration and their figures, before it is run.

Reads lengths only, plans whole epochs and prints for each how much is padding, how well lockstep rounds are filled,
how well lengths mix in an update and samples between epochs, and what planning took. Times are of planning alone; the
peak of memory is measured by planning the first block once more.
"""

import argparse
import dataclasses
import json
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ds_dflash.batching import CLASSIC_EDGES, GROUPINGS, ORDERINGS, OVERSIZE, BatchSampler, PlanSettings, Position
from ds_dflash.batching.plan import Dispatch, EpochPlan
from ds_dflash.batching.statistics import EpochFigures, EpochSurvey, LengthMix
from ds_dflash.errors import UserError
from ds_dflash.planner.figure import draw_plan

TABLE_DIRECTORY = "table"
MANY_BUCKETS = 32
COLUMNS = (
    "micro-batches",
    "updates",
    "padding eff.",
    "lockstep eff.",
    "window TV",
    "pairs again",
    "seconds",
    "peak MB",
)


@dataclasses.dataclass(frozen=True)
class PlannedEpoch:
    """One epoch's figures, and what planning it took: seconds, and bytes above the lengths at the peak."""

    epoch: int
    figures: EpochFigures
    seconds: float
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        costs = {"seconds": round(self.seconds, 4), "peak_bytes": self.peak_bytes}
        return {"epoch": self.epoch, **dataclasses.asdict(self.figures), **costs}

    def cells(self) -> list[str]:
        """As in COLUMNS."""
        figures, again = self.figures, self.figures.pairs_that_meet_again
        return [
            f"{figures.micro_batches:,}",
            f"{figures.updates:,}",
            f"{figures.padding_efficiency:.4f}",
            f"{figures.lockstep_efficiency:.4f}",
            f"{figures.window_tv:.4f}",
            "-" if again is None else f"{again:.2g}",
            f"{self.seconds:.2f}",
            f"{self.peak_bytes / 1e6:.0f}",
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ds-dflash plan`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("dataset", nargs="?", type=Path, help="a prepared dataset (a table with a column `length`)")
    source.add_argument("--lengths", type=Path, metavar="FILE.npy", help="lengths in tokens, integers [samples]")
    default = PlanSettings()
    plan = parser.add_argument_group("the plan")
    plan.add_argument("--token-budget", type=int, default=default.token_budget, help="padded tokens of a micro-batch")
    plan.add_argument("--max-batch-size", type=int, help="samples of a micro-batch at most")
    plan.add_argument("--ranks", type=int, default=7, help="target ranks that feed one update")
    plan.add_argument("--gradient-accumulation-steps", type=int, default=4, help="micro-batches a rank and update")
    plan.add_argument("--grouping", choices=GROUPINGS, default=default.grouping)
    plan.add_argument("--ordering", choices=ORDERINGS, default=default.ordering)
    plan.add_argument("--num-buckets", type=int, default=default.num_buckets, help="of `bucketed`, edges optimised")
    plan.add_argument("--bucket-edges", nargs="+", metavar="LENGTH", help="of `bucketed`, in place of --num-buckets")
    plan.add_argument("--oversize", choices=OVERSIZE, default=default.oversize, help="samples above the budget")
    plan.add_argument("--epochs", type=int, default=2)
    plan.add_argument("--seed", type=int, default=default.seed)
    output = parser.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="all groupings side by side, in their second epoch")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--save", type=Path, metavar="DIR", help="write epoch-0.npz ... with `indices` and `offsets`")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw lengths, padding and mixing")


def run(arguments: argparse.Namespace) -> int:
    """Plan what the arguments say and print it; raises UserError for what cannot be planned or written."""
    for name in ("ranks", "gradient_accumulation_steps", "epochs"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")
    if arguments.compare and arguments.save:
        raise UserError("--save writes the epochs of one configuration; leave out --compare")
    settings = _settings(arguments)
    lengths = _read_array(arguments.lengths) if arguments.lengths else _read_dataset(arguments.dataset)
    if arguments.compare:
        _compare(lengths, settings, arguments)
    sampler = _sampler(lengths, settings, arguments)
    if not arguments.compare:
        epochs = list(plan_epochs(sampler, arguments.epochs, arguments.save))
        _report_epochs(sampler, settings, epochs, arguments.json)
    if arguments.plot:
        draw_plan(sampler, settings, _writable(arguments.plot))
    return 0


def _settings(arguments: argparse.Namespace) -> PlanSettings:
    edges = arguments.bucket_edges
    if edges is not None:
        try:
            edges = tuple(int(edge) for part in edges for edge in part.split(","))
        except ValueError:
            raise UserError(f"--bucket-edges {' '.join(edges)}: edges must be whole numbers of tokens") from None
    return PlanSettings(
        token_budget=arguments.token_budget,
        max_batch_size=arguments.max_batch_size,
        grouping=arguments.grouping,
        ordering=arguments.ordering,
        num_buckets=arguments.num_buckets,
        bucket_edges=edges,
        seed=arguments.seed,
        oversize=arguments.oversize,
    )


def _read_array(path: Path) -> np.ndarray:
    """Lengths from a .npy file, mapped into memory rather than read."""
    try:
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"--lengths {path}: {error.strerror or 'not a .npy file of integers'}") from None
    except ValueError:
        raise UserError(f"--lengths {path}: not a .npy file of integers") from None
    if not isinstance(lengths, np.ndarray):
        raise UserError(f"--lengths {path}: an archive of arrays; give one .npy file")
    return lengths


def _read_dataset(path: Path) -> np.ndarray:
    """The column `length` of a table on disk, as one array and without touching any row."""
    directory = path / TABLE_DIRECTORY if (path / TABLE_DIRECTORY).is_dir() else path
    if not (directory / "state.json").is_file():
        raise UserError(f"{path} holds no prepared dataset; give a directory that `ds-dflash prepare` printed")
    table = datasets.Dataset.load_from_disk(str(directory))
    if "length" not in table.column_names:
        raise UserError(f"{path} has the columns {', '.join(table.column_names)} but no `length`")
    return table.data.column("length").to_numpy()


def _writable(path: Path) -> Path:
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no directory {path.parent}")
    return path


def _sampler(lengths: np.ndarray, settings: PlanSettings, arguments: argparse.Namespace) -> BatchSampler:
    return BatchSampler(lengths, settings, ranks=arguments.ranks, rounds=arguments.gradient_accumulation_steps)


def plan_epochs(sampler: BatchSampler, num_epochs: int, save: Path | None = None) -> Iterator[PlannedEpoch]:
    """Plan epochs from the first on; with `save`, also write each to epoch-N.npz there."""
    mix, before = LengthMix.of(sampler), None
    peak = _peak_bytes(sampler)
    for epoch in range(num_epochs):
        plan = sampler.plan(Position(epoch, ()))
        survey = EpochSurvey(sampler, mix, before)
        stopwatch = Stopwatch()
        kept = [dispatch for dispatch in survey.follow(stopwatch.timed(plan)) if save]
        if save:
            _save(save, epoch, kept)
        before = survey.tracked
        yield PlannedEpoch(epoch, survey.figures(), stopwatch.seconds, peak)


class Stopwatch:
    """Measures the planning alone while its dispatches are consumed."""

    seconds = 0.0

    def timed(self, plan: EpochPlan) -> Iterator[Dispatch]:
        """The dispatches of a plan."""
        dispatches = plan.dispatches()
        while True:
            begin = time.perf_counter()
            dispatch = next(dispatches, None)
            self.seconds += time.perf_counter() - begin
            if dispatch is None:
                return
            yield dispatch


def _peak_bytes(sampler: BatchSampler) -> int:
    """Memory above the lengths that planning the first block takes at its peak."""
    tracemalloc.start()
    next(sampler.plan(sampler.start()).dispatches())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def _save(directory: Path, epoch: int, dispatches: Sequence[Dispatch]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(
            directory / f"epoch-{epoch}.npz",
            indices=np.concatenate([dispatch.indices for dispatch in dispatches]),
            offsets=np.append(0, np.cumsum(np.concatenate([np.diff(part.offsets) for part in dispatches]))),
        )
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from None


def _describe(sampler: BatchSampler, settings: PlanSettings) -> str:
    counts = sampler.accounting
    lines = [
        f"{counts['rows']:,} samples = {counts['kept']:,} planned + {counts['empty']:,} empty + "
        f"{counts['too_long']:,} dropped as too long; {counts['truncated']:,} truncated",
        f"{sampler.ranks} ranks x {sampler.rounds} micro-batches an update, {settings.token_budget:,} padded tokens a "
        f"micro-batch, seed {settings.seed}",
    ]
    return "\n".join(lines)


def _report_epochs(
    sampler: BatchSampler, settings: PlanSettings, epochs: Sequence[PlannedEpoch], as_json: bool
) -> None:
    if as_json:
        rows = [epoch.to_dict() for epoch in epochs]
        print(json.dumps({"fingerprint": sampler.fingerprint, **_accounts(sampler), "epochs": rows}, indent=2))
        return
    print(_describe(sampler, settings))
    print(f"grouping {_name(settings, sampler)}, ordering {settings.ordering}\n")
    _print_table("epoch", [[str(epoch.epoch), *epoch.cells()] for epoch in epochs])


def _accounts(sampler: BatchSampler) -> dict[str, Any]:
    return {"ranks": sampler.ranks, "rounds": sampler.rounds, "accounting": sampler.accounting}


def _name(settings: PlanSettings, sampler: BatchSampler) -> str:
    if settings.grouping != "bucketed":
        return settings.grouping
    edges = " ".join(map(str, sampler.bucket_edges))
    return f"bucketed, {'given' if settings.bucket_edges else 'optimal'} edges {edges}"


def _compare(lengths: np.ndarray, settings: PlanSettings, arguments: argparse.Namespace) -> None:
    """Every grouping in its second epoch (the first has none to meet again from)."""
    rows, table = [], []
    for name, variant in _variants(settings):
        sampler = _sampler(lengths, variant, arguments)
        *_, planned = plan_epochs(sampler, 2)
        rows.append([name, *planned.cells()])
        table.append({"name": name, "settings": dataclasses.asdict(variant), **planned.to_dict()})
    if arguments.json:
        print(json.dumps({**_accounts(sampler), "compare": table}, indent=2))
        return
    print(_describe(sampler, settings), end="\n\n")
    _print_table("grouping, ordering", rows)


def _variants(settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
    edges = settings.bucket_edges or CLASSIC_EDGES
    shuffled = dataclasses.replace(settings, ordering="shuffled", bucket_edges=None)
    yield "sorted (frozen), shuffled", dataclasses.replace(shuffled, grouping="sorted")
    yield "shuffled, shuffled", dataclasses.replace(shuffled, grouping="shuffled")
    bucketed = dataclasses.replace(shuffled, grouping="bucketed")
    yield f"bucketed at {' '.join(map(str, edges))}, shuffled", dataclasses.replace(bucketed, bucket_edges=edges)
    for number in sorted({settings.num_buckets, MANY_BUCKETS}):
        yield f"bucketed, {number} optimal edges, shuffled", dataclasses.replace(bucketed, num_buckets=number)
    yield "pooled, shuffled", dataclasses.replace(shuffled, grouping="pooled")
    yield "pooled, stratified", dataclasses.replace(settings, grouping="pooled", ordering="stratified")


def _print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    lines = [[title, *COLUMNS], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        first, *others = line
        cells = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(cells))
