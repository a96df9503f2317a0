"""The drafter engine's files: how they are written, checked and read.

DeepSpeed reads and writes files through an object that can be replaced, its "checkpoint engine"; here is ours.

Writing: what the disk refuses does not break off DeepSpeed's save, within which the other ranks wait in barriers: it is
kept for the ranks to agree on afterwards. Checking: every file is a zip archive of torch's, which has a CRC-32 of each
tensor already, so checking costs one reading when a run goes on, and a save nothing. Reading: a file is a pickle, and
pickles can run code, so names other than the few that DeepSpeed needs are refused before anything is called.
"""

import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_dflash.checkpoint.resharding import UnknownFormError, cut_anew
from ds_dflash.errors import UserError, naming

ALLOWED = [LossScaler, ZeroStageEnum, fragment_address]
"""What DeepSpeed's files name beyond tensors and plain values: records without any behaviour when they are made."""

READ_BYTES = 1 << 20

UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OSError)
"""What zipfile raises over changed bytes: wrong sums and places, names in no encoding, kinds that it cannot read."""


class EngineFiles(CheckpointEngine):
    """For one save or one load of this rank.

    shares: for each parameter group, the elements that this rank holds, filling included; for a load only.
    failure: why a file could not be written.
    """

    def __init__(self, shares: Sequence[int] = ()) -> None:
        super().__init__()
        self._shares = shares
        self.failure: OSError | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        if self.failure is not None:
            return
        try:
            write(state_dict, Path(path))
        except OSError as error:
            self.failure = error

    def load(self, path: str, map_location: object = None) -> dict[str, Any]:
        """As this rank would find it, had as many ranks saved as there are now. Raises UserError."""
        ranks, directory = dist.get_world_size(), Path(path).parent
        saved = optimizer_files(directory)
        if not path.endswith("_optim_states.pt"):
            return {**read(Path(path)), "dp_world_size": ranks}
        if len(saved) == ranks:
            return read(Path(path))
        try:
            return cut_anew([read(file, mapped=True) for file in saved], self._shares, dist.get_rank(), ranks)
        except UnknownFormError as error:
            raise UserError(
                f"{directory.parent} was saved by {len(saved)} drafter ranks and its optimizer state cannot be cut anew"
                f" for {ranks} ({error}): resume with {len(saved)} drafter ranks."
            ) from None


def optimizer_files(directory: Path) -> list[Path]:
    """The files with optimizer state, by the rank that wrote them."""
    ranks = {path: re.search(r"zero_pp_rank_(\d+)_", path.name) for path in directory.glob("*_optim_states.pt")}
    return sorted(ranks, key=lambda path: int(found[1]) if (found := ranks[path]) else -1)


# ------------------------------------------------------------------------------------------------------- writing


def write(state: dict[str, Any], path: Path) -> None:
    """torch.save onto the disk itself; raises OSError with the system's own reason, where torch has one of its own."""
    with naming(path), path.open("wb", buffering=0) as file:
        output = _Output(file)
        torch.save(state, cast(BinaryIO, output))
        if output.failure is not None:
            raise output.failure
        os.fsync(file.fileno())
    with torch.serialization.safe_globals(ALLOWED):
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    assert not refused, f"{path} names {refused}, which no load would accept"


class _Output:
    """A file for torch's writer, which must not see an exception: what follows a failure is let drop."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while self.failure is None and len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            self.failure = error
        return size

    def flush(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------ checking, reading


def damaged_files(directory: Path) -> list[Path]:
    """The .pt files whose bytes are not those that were written."""
    records: list[tuple[Path, str]] = []
    damaged = set()
    for path in sorted(directory.glob("*.pt")):
        try:
            with zipfile.ZipFile(path) as archive:
                records += [(path, name) for name in archive.namelist()]
        except UNREADABLE:
            damaged.add(path)
    with ThreadPoolExecutor() as pool:  # a tensor each; zlib leaves other threads the interpreter
        sound = pool.map(_is_sound, *zip(*records, strict=True)) if records else []
        damaged |= {path for (path, _), is_sound in zip(records, sound, strict=True) if not is_sound}
    return sorted(damaged)


def _is_sound(path: Path, name: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as record:
            while record.read(READ_BYTES):
                pass
    except UNREADABLE:
        return False
    return True


def read(path: Path, mapped: bool = False) -> dict[str, Any]:
    """What `write` has written, on the CPU; mapped: read where it is used. Raises UserError before code could run."""
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|class|function) (\S+)", str(error))
        what = f"the name {named[1]}" if named else "something"
        raise UserError(
            f"{path} holds {what} that no checkpoint of ds_dflash has and that could run code, so it was not loaded:"
            " take this checkpoint from where it was made, or remove it to go on from the one before."
        ) from None
