"""A disk that refuses a write: one sentence, nothing half-written that counts, and earlier checkpoints untouched.

/dev/full refuses every write with ENOSPC as a full disk does; a limit on the size of files (RLIMIT_FSIZE) lets a write
begin and refuses it in the middle (EFBIG).
"""

import contextlib
import errno
import json
import resource
from pathlib import Path

import distributed
import pytest
import tiny
import torch
from test_checkpoint import Engine, names, save
from world import world_of_one

from ds_dflash.checkpoint import checkpoint_to_resume, directory, newest_checkpoint
from ds_dflash.checkpoint.engine_files import read, write
from ds_dflash.errors import UserError

FULL = "/dev/full"
write_drafter = directory.write_drafter


@contextlib.contextmanager
def largest_file(size):
    """Writes beyond so many bytes are refused, with the system's own error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


STATE = {"tensors": [torch.arange(3000.0), torch.ones(5, dtype=torch.bfloat16)], "step": 7}


def test_what_is_written_is_what_is_read(tmp_path):
    write(STATE, tmp_path / "file.pt")
    for mapped in (False, True):
        got = read(tmp_path / "file.pt", mapped)
        assert all(torch.equal(*pair) for pair in zip(got["tensors"], STATE["tensors"], strict=True))
        assert got["step"] == 7


def test_a_write_that_is_refused_anywhere_is_the_systems_own_error_with_the_file(tmp_path):
    write(STATE, tmp_path / "whole.pt")
    size = (tmp_path / "whole.pt").stat().st_size
    for limit in [*range(0, size, 997), size - 1]:
        with largest_file(limit), pytest.raises(OSError, match="File too large") as caught:
            write(STATE, tmp_path / "cut.pt")
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "cut.pt"))
        assert (tmp_path / "cut.pt").stat().st_size == limit
    with largest_file(size):
        write(STATE, tmp_path / "cut.pt")
    with pytest.raises(OSError, match="No space left on device"):
        write(STATE, Path(FULL))


class FullDiskEngine(Engine):
    """Finds no room for the file of its second rank."""

    def save_checkpoint(self, directory, tag, save_latest):
        (Path(directory) / tag).mkdir()
        for rank in range(self.ranks):
            file = Path(directory) / tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            if rank == 1:
                file.symlink_to(FULL)
            self.checkpoint_engine.save(STATE, str(file))


def refuse(monkeypatch, place):
    """Let the disk refuse the write of a file outside the engine's."""

    def refusing(weights, config, out):
        with largest_file(1000) if place == "model.safetensors" else contextlib.nullcontext():
            write_drafter(weights, config, out)
        if place != "model.safetensors":
            (out.parent / place).symlink_to(FULL)

    monkeypatch.setattr(directory, "write_drafter", refusing)


@pytest.mark.parametrize("place", ["engine", "model.safetensors", "progress.json", "manifest.json"])
def test_a_full_disk_ends_a_save_in_one_sentence_and_leaves_the_former_checkpoint(tmp_path, monkeypatch, place):
    with world_of_one():
        former = save(tmp_path, 1, keep=1)
        before = {path: path.read_bytes() for path in former.rglob("*") if path.is_file()}
        if place != "engine":
            refuse(monkeypatch, place)
        with pytest.raises(UserError) as caught:
            save(tmp_path, 2, keep=1, engine=FullDiskEngine(ranks=3) if place == "engine" else Engine())
        said = str(caught.value)
        reason = "File too large" if place == "model.safetensors" else "No space left on device"
        assert f"The checkpoint step-000002 could not be written to {tmp_path} (" in said
        assert reason in said
        assert place == "model.safetensors" or f".step-000002.writing/{place}" in said
        assert "\n" not in said
        assert names(tmp_path) == ["step-000001"]
        assert {path: path.read_bytes() for path in former.rglob("*") if path.is_file()} == before
        assert checkpoint_to_resume(tmp_path) == former
        monkeypatch.undo()
        assert save(tmp_path, 2, keep=1) == newest_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------ a whole run


@pytest.mark.slow
def test_a_run_whose_disk_is_full_ends_on_every_rank_and_goes_on_bitwise_once_there_is_room(tmp_path, monkeypatch):
    """A target and two drafter ranks; the second of these finds no room in the save after update 4."""
    config, run = tmp_path / "config.json", tmp_path / "runs" / "run"
    tiny.write_target(tmp_path / "target")
    tiny.write_chats(tmp_path / "train.jsonl", 48)
    config.write_text(json.dumps(tiny.settings(tmp_path / "target", tmp_path / "train.jsonl", tmp_path / "runs")))
    options = ["topology.drafter_ranks=2", "training.save_every=2", "gradient_accumulation_steps=6"]
    options += ["training.num_epochs=3", "target.sharding=none"]
    arguments = [part for option in options for part in ("--set", option)]
    monkeypatch.setenv("FULL_DISK_RANK", "1")
    monkeypatch.setenv("FULL_DISK_STEP", "4")
    codes = distributed.start(3, config, *arguments, program="tests/full_disk.py").wait(120)
    assert all(code != 0 for code in codes)
    for rank in range(3):
        said = distributed.output(config, rank)
        assert f"The checkpoint step-000004 could not be written to {run / 'checkpoints'}" in said, said
        assert "rank_1_mp_rank_00_optim_states.pt: No space left on device" in said
        assert "Traceback" not in said
    assert names(run / "checkpoints") == ["step-000002"]
    before = figures(run)
    assert len(before) == 4
    distributed.run(3, config, *arguments)
    assert len(figures(run)) > 4
    assert figures(run)[:4] == before


def figures(run):
    return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in distributed.metrics(run)]
