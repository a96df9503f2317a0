"""What a checkpoint is: one directory a save, whole or absent.

    checkpoints/step-000123/
        engine/         DeepSpeed's files: fp32 masters and optimizer state, a part from each drafter rank
        drafter/        the weights in the serving format
        progress.json   updates done, position in the data, learning-rate curve, random state, W&B run, best validation
        manifest.json   every other file with its size: what makes the directory whole
        damaged         only where a resume has found bytes changed: it no longer counts as whole

All is written under a hidden name, synchronised to disk and renamed, so a save that was cut short never looks finished.
Only progress.json may be replaced later (atomically): by what a validation pass found of this very state.
"""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from ds_dflash.checkpoint.engine_files import EngineFiles, damaged_files
from ds_dflash.errors import UserError, describe_os_error, naming
from ds_dflash.export import write_drafter

ENGINE_TAG = "engine"


@dataclass
class Progress:
    """What the drafter has consumed; the same on every rank.

    update: updates done; position: `batching.Position` as a dict; fingerprint: the sampler's; curve: segments of the
    learning-rate curve; wandb_id: the W&B run; random_state: torch's on the CPU, as hexadecimal digits; skipped,
    skipped_in_a_row: updates without a finite gradient, all and the last ones; validated: the last update that a
    validation pass has followed; best_update, best_acceptance_length: the one whose validation had the largest.
    """

    update: int = 0
    position: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    curve: list[list[float]] = field(default_factory=list)
    wandb_id: str | None = None
    random_state: str = ""
    skipped: int = 0
    skipped_in_a_row: int = 0
    validated: int = 0
    best_update: int | None = None
    best_acceptance_length: float | None = None

    def note_validation(self, acceptance_length: float) -> None:
        """The validation of the present state is done; a state without blocks (nan) is never the best."""
        self.validated = self.update
        if acceptance_length >= (self.best_acceptance_length or 0.0):  # of equal ones that which is trained longer
            self.best_update, self.best_acceptance_length = self.update, acceptance_length

    def forget_lost_best(self, directory: Path, warn: bool = False) -> None:
        """Where the best checkpoint is gone or damaged, later validations shall not compete with it."""
        if self.best_update is None or is_whole(checkpoint_path(directory, self.best_update)):
            return
        if warn:
            lost = checkpoint_path(directory, self.best_update)
            print(f"warning: {lost}, the best so far, is not whole: it no longer counts.", file=sys.stderr, flush=True)
        self.best_update = self.best_acceptance_length = None

    def note_step(self, is_skipped: bool) -> None:
        self.skipped += is_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        try:
            progress = TypeAdapter(cls).validate_json((checkpoint / "progress.json").read_bytes())
            bytes.fromhex(progress.random_state)
            if progress.update < 1 or "epoch" not in progress.position:
                raise ValueError("it holds no position in the data")
        except ValueError as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise UserError(
                f"{checkpoint}/progress.json cannot be used ({reason}): remove this checkpoint, and the one before is"
                " taken."
            ) from None
        return progress


def save_checkpoint(engine: Any, directory: Path, progress: Progress, keep: int) -> Path:
    """Write `directory/step-...` from all drafter ranks (a collective call); prune to the `keep` newest and the best.

    directory: on a file system that all drafter ranks share. Raises UserError on all ranks alike where the disk refuses
    a write on one of them; earlier checkpoints are untouched then.
    """
    final = checkpoint_path(directory, progress.update)
    writing = directory / f".{final.name}.writing"
    progress.random_state = torch.get_rng_state().numpy().tobytes().hex()

    def begin() -> None:
        for cut_short in directory.glob(".step-*.writing"):
            shutil.rmtree(cut_short)
        writing.mkdir(parents=True)

    def complete() -> None:
        drafter = engine.module
        write_drafter(drafter.state_dict(), drafter.config, writing / "drafter")
        _write_json(writing / "progress.json", asdict(progress))
        _finish(writing, final)
        _prune(directory, keep, progress)

    _agree(_on_first_rank(begin), writing)
    engine.checkpoint_engine = files = EngineFiles()
    engine.save_checkpoint(str(writing), tag=ENGINE_TAG, save_latest=False)
    _agree(describe_os_error(files.failure) if files.failure else None, writing)
    _agree(_on_first_rank(complete), writing)
    return final


def _on_first_rank(work: Callable[[], None]) -> str | None:
    """Why the disk refused it, if it did."""
    try:
        if dist.get_rank() == 0:
            work()
    except OSError as error:
        return describe_os_error(error)
    except SafetensorError as error:  # of an I/O error: with the system's reason, without the file
        return str(error)
    return None


def _agree(failure: str | None, writing: Path) -> None:
    """A barrier of all drafter ranks; where one brings a failure, all raise the same UserError and nothing is left."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    reason = next(filter(None, failures), None)
    if reason is None:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(writing, ignore_errors=True)
    raise UserError(
        f"The checkpoint {writing.name.removeprefix('.').removesuffix('.writing')} could not be written to"
        f" {writing.parent} ({reason}): the checkpoints before it are untouched; make room on this disk, and the same"
        " command goes on from the newest."
    )


def checkpoint_path(directory: Path, update: int) -> Path:
    return directory / f"step-{update:06d}"


def replace_progress(directory: Path, progress: Progress, keep: int) -> None:
    """Write into the checkpoint of the present state what its validation found, and prune again (one rank only)."""
    checkpoint = checkpoint_path(directory, progress.update)
    temporary = checkpoint / ".progress.json.writing"
    _write_json(temporary, asdict(progress))
    _synchronise(temporary)
    os.replace(temporary, checkpoint / "progress.json")
    _synchronise(checkpoint)
    _prune(directory, keep, progress)


def load_checkpoint(engine: Any, checkpoint: Path) -> None:
    """Load the drafter engine's part of a checkpoint of any number of drafter ranks.

    Raises UserError where it does not fit, or holds what could run code.
    """
    engine.checkpoint_engine = EngineFiles([group["params"][0].numel() for group in engine.optimizer.param_groups])
    try:
        loaded, _ = engine.load_checkpoint(str(checkpoint), tag=ENGINE_TAG, load_lr_scheduler_states=False)
    except (RuntimeError, KeyError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines() or [""]
        raise UserError(
            f"{checkpoint} cannot be loaded ({type(error).__name__}: {reason[0]}): remove it to go on from the one"
            " before."
        ) from None
    assert loaded is not None, f"DeepSpeed found no checkpoint in {checkpoint}"
    random_state = bytearray.fromhex(Progress.read(checkpoint).random_state)
    torch.set_rng_state(torch.frombuffer(random_state, dtype=torch.uint8))


def newest_checkpoint(directory: Path, warn: bool = False) -> Path | None:
    """The newest whole checkpoint of a run's `checkpoints` directory, None if there is none at all.

    `warn` names a damaged newer one on stderr; if all are damaged that is a UserError, never a fresh start.
    """
    found = list(reversed(_by_age(directory)))
    whole = next((checkpoint for checkpoint in found if is_whole(checkpoint)), None)
    if found and whole is None:
        raise UserError(
            f"None of the {len(found)} checkpoints in {directory} is whole ({found[0].name}: {find_damage(found[0])}):"
            " put one back, or start over with --fresh."
        )
    if warn and found and found[0] != whole:
        print(
            f"warning: {found[0]} is not whole ({find_damage(found[0])}): {whole} is taken in its place.",
            file=sys.stderr,
            flush=True,
        )
    return whole


def checkpoint_to_resume(directory: Path) -> Path | None:
    """The newest checkpoint that is whole to the last byte of the engine's files (to be called by one rank only).

    All are read for that, which takes as long as the disk does. One with other bytes than were written is marked
    as damaged, so that it never counts as whole again; then as `newest_checkpoint`, with a warning.
    """
    while (newest := newest_checkpoint(directory)) is not None:
        damaged = damaged_files(newest / ENGINE_TAG)
        if not damaged:
            break
        names = ", ".join(str(path.relative_to(newest)) for path in damaged)
        (newest / "damaged").write_text(f"other bytes than were written in {names}")
    return newest_checkpoint(directory, warn=True)


def best_checkpoint(directory: Path) -> Path | None:
    """The whole checkpoint with the largest validation acceptance as the newest one knows it, if it is there."""
    newest = newest_checkpoint(directory)
    best = Progress.read(newest).best_update if newest else None
    found = checkpoint_path(directory, best) if best is not None else None
    return found if found is not None and is_whole(found) else None


def is_whole(checkpoint: Path) -> bool:
    """Whether every file that the manifest lists is there in its size, and progress.json can be read."""
    return find_damage(checkpoint) is None


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, as far as sizes tell, or None."""
    if (checkpoint / "damaged").exists():
        return (checkpoint / "damaged").read_text()
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        json.loads((checkpoint / "progress.json").read_text())
        if not manifest:
            return "manifest.json is empty"
        for name, size in manifest.items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(checkpoint)} is missing"
    except OSError as error:
        return describe_os_error(error)
    except (ValueError, AttributeError):
        return "manifest.json or progress.json cannot be read"
    return None


def _by_age(directory: Path) -> list[Path]:
    """All checkpoints of a directory, oldest first: by number, since names stop to sort at a million updates."""
    found = (path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _finish(writing: Path, final: Path) -> None:
    files = sorted(path for path in writing.rglob("*") if path.is_file() and path.name != "progress.json")
    manifest = {str(path.relative_to(writing)): path.stat().st_size for path in files}
    _write_json(writing / "manifest.json", manifest)
    for path in [*writing.rglob("*"), writing]:  # directories too: their entries are what the rename relies on
        _synchronise(path)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(writing, final)
    _synchronise(final.parent)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with naming(path):
        path.write_text(json.dumps(content, indent=1))


def _synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def _prune(directory: Path, keep: int, progress: Progress) -> None:
    """Remove all but the best and the `keep` newest whole checkpoints; what is not whole goes only when it is older."""
    checkpoints = _by_age(directory)
    kept = [checkpoint for checkpoint in checkpoints if is_whole(checkpoint)][-keep:]
    best = checkpoint_path(directory, progress.best_update) if progress.best_update is not None else None
    for checkpoint in checkpoints[: checkpoints.index(kept[0])]:
        if checkpoint != best:
            going = directory / f".{checkpoint.name}.writing"  # never seen in part; the next save removes what is left
            os.rename(checkpoint, going)
            shutil.rmtree(going)
