"""A checkpoint is read as data: no file of it can run code, and no changed byte is taken for what was saved."""

import itertools
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from drafters import make_drafter
from learning import engine_of, engine_world

from ds_dflash.checkpoint import Progress, load_checkpoint, save_checkpoint
from ds_dflash.checkpoint.engine_files import damaged_files, read, write
from ds_dflash.errors import UserError


class Touch:
    """A pickle of it runs a shell command when it is read as pickles usually are."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def zipped(content, path):
    torch.save(content, path)


def plain(content, path):
    path.write_bytes(pickle.dumps(content["more"], protocol=2))


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_pickle_that_runs_code_is_refused_before_it_does(tmp_path, keys):
    with engine_world():
        engine = engine_of(make_drafter(), 1e-3, **keys)
        progress, ran = Progress(update=1, position={"epoch": 0}), tmp_path / "ran"
        for kind, store in itertools.product(["model_states", "optim_states"], [zipped, plain]):
            checkpoint = save_checkpoint(engine.engine, tmp_path / "checkpoints", progress, keep=1)
            load_checkpoint(engine.engine, checkpoint)
            (file,) = (checkpoint / "engine").glob(f"*{kind}.pt")
            store(read(file) | {"more": Touch(ran)}, file)
            with pytest.raises(UserError, match=rf"{file} holds the name \S*system that .* could run code") as caught:
                load_checkpoint(engine.engine, checkpoint)
            assert "\n" not in str(caught.value)
            assert not ran.exists()
            (pickle.loads(file.read_bytes()) if store is plain else torch.load(file, weights_only=False))
            ran.unlink()  # so it does run, where nobody looks first


def test_files_of_other_ranks_are_read_as_data_too(tmp_path):
    with engine_world():
        engine = engine_of(make_drafter(), 1e-3)
        checkpoint = save_checkpoint(engine.engine, tmp_path, Progress(update=1, position={"epoch": 0}), keep=1)
        second = checkpoint / "engine" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": Touch(tmp_path / "ran")}, second)
        with pytest.raises(UserError, match=r"rank_1\S+ holds the name \S*system"):
            load_checkpoint(engine.engine, checkpoint)
        assert not (tmp_path / "ran").exists()


def test_a_changed_byte_is_found_or_changes_nothing_that_is_read(tmp_path):
    state = {"tensor": torch.arange(40.0), "step": 7, "name": "drafter"}
    write(state, tmp_path / "file.pt")
    content, found = (tmp_path / "file.pt").read_bytes(), 0
    for place in range(0, len(content), 5):
        changed = bytearray(content)
        changed[place] ^= 0x24
        (tmp_path / "file.pt").write_bytes(changed)
        if damaged_files(tmp_path):
            found += 1
            continue
        got = same_or_refused(tmp_path / "file.pt")
        assert got is None or (
            torch.equal(got.pop("tensor"), state["tensor"]) and got == {"step": 7, "name": "drafter"}
        )
    assert found > len(content) / 5 / 4
    (tmp_path / "file.pt").write_bytes(content)
    assert damaged_files(tmp_path) == []


def same_or_refused(file: Path):
    """What is read; None where torch cannot read it, which a load says."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return read(file)
        except (RuntimeError, UserError):
            return None
