"""Checkpoints are whole or absent; the newest whole one is found and old ones go."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drafters import make_drafter
from world import world_of_one

from ds_dflash import cli
from ds_dflash.checkpoint import (
    Progress,
    best_checkpoint,
    checkpoint_to_resume,
    directory,
    is_whole,
    load_checkpoint,
    newest_checkpoint,
    replace_progress,
    save_checkpoint,
)
from ds_dflash.errors import UserError
from ds_dflash.export import read_drafter


class Engine:
    """Stands in for a DeepSpeed engine of `ranks` ranks."""

    def __init__(self, ranks=1, seed=0):
        self.module = make_drafter(seed=seed)
        self.optimizer = SimpleNamespace(param_groups=[])
        self.ranks = ranks
        self.loaded = None

    def save_checkpoint(self, directory, tag, save_latest):
        assert not save_latest
        (Path(directory) / tag).mkdir()
        for rank in range(self.ranks):
            file = Path(directory) / tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            self.checkpoint_engine.save({"rank": rank, "tensor": torch.arange(500.0)}, str(file))

    def load_checkpoint(self, directory, tag, load_lr_scheduler_states):
        file = Path(directory) / tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        self.loaded = self.checkpoint_engine.load(str(file))
        return str(file), {}


class DyingEngine(Engine):
    """Is stopped in the middle of a save."""

    def save_checkpoint(self, directory, tag, save_latest):
        super().save_checkpoint(directory, tag, save_latest)
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _world():
    with world_of_one():
        yield


def save(directory, update, keep=10, engine=None):
    return save_checkpoint(engine or Engine(), directory, Progress(update=update, position={"epoch": 1}), keep)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_lists_every_file_with_its_size(tmp_path):
    checkpoint = save(tmp_path, 7)
    assert checkpoint == tmp_path / "step-000007"
    assert names(tmp_path) == ["step-000007"]
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    written = {str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if path.is_file()}
    assert manifest.keys() == written.keys() - {"manifest.json", "progress.json"}
    assert manifest == {name: written[name].stat().st_size for name in manifest}
    assert {"drafter/config.json", "drafter/model.safetensors"} < set(manifest)
    assert is_whole(checkpoint)


def test_what_was_saved_is_what_is_read(tmp_path):
    engine = Engine()
    progress = Progress(9, {"epoch": 2, "segments": [[14, 3]]}, {"seed": 1}, [[0, 0.0, 40]], "abcd1234")
    checkpoint = save_checkpoint(engine, tmp_path, progress, keep=1)
    assert Progress.read(checkpoint) == progress
    for name, tensor in read_drafter(checkpoint / "drafter")[1].items():
        assert torch.equal(tensor, engine.module.state_dict()[name].bfloat16())


def test_loading_brings_back_the_engine_and_the_random_state(tmp_path):
    torch.manual_seed(5)
    checkpoint, expected, engine = save(tmp_path, 3), torch.rand(4), Engine()
    load_checkpoint(engine, checkpoint)
    assert torch.equal(torch.rand(4), expected)
    assert engine.loaded["rank"] == 0
    assert torch.equal(engine.loaded["tensor"], torch.arange(500.0))


def test_another_number_of_ranks_that_cannot_be_cut_anew_is_refused_with_both_numbers(tmp_path):
    checkpoint = save(tmp_path, 3, engine=Engine(ranks=4))
    with pytest.raises(
        UserError, match=r"saved by 4 drafter ranks .* for 1 \(there is no .*\): resume with 4"
    ) as caught:
        load_checkpoint(Engine(), checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("moment", ["engine", "drafter", "manifest", "rename"])
def test_a_save_that_is_cut_short_leaves_the_former_checkpoint_the_newest(tmp_path, monkeypatch, moment):
    def stop(*_, **__):
        raise KeyboardInterrupt

    former = save(tmp_path, 1, keep=1)
    if moment == "drafter":
        monkeypatch.setattr(directory, "write_drafter", stop)
    if moment == "manifest":
        monkeypatch.setattr(directory, "_synchronise", stop)
    if moment == "rename":
        rename = os.rename
        monkeypatch.setattr(os, "rename", lambda old, new: (stop if new.name == "step-000002" else rename)(old, new))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, keep=1, engine=DyingEngine() if moment == "engine" else Engine())
    assert newest_checkpoint(tmp_path) == former
    monkeypatch.undo()
    assert save(tmp_path, 3, keep=1) == newest_checkpoint(tmp_path)
    assert names(tmp_path) == ["step-000003"]  # what was cut short is cleared


def test_the_newest_is_the_one_of_most_updates_also_beyond_a_million(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None
    for update in (999_999, 40, 1_000_000):
        saved = save(tmp_path, update)
    assert newest_checkpoint(tmp_path) == saved
    assert saved.name == "step-1000000"
    save(tmp_path, 1_000_001, keep=2)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda checkpoint: cut(checkpoint / "drafter/model.safetensors"),
        lambda checkpoint: cut(checkpoint / "manifest.json"),
        lambda checkpoint: (checkpoint / "manifest.json").unlink(),
        lambda checkpoint: (checkpoint / "manifest.json").write_text(""),
        lambda checkpoint: (checkpoint / "progress.json").unlink(),
        lambda checkpoint: cut(checkpoint / "progress.json"),
        lambda checkpoint: shutil.rmtree(checkpoint / "engine"),
        lambda checkpoint: [path.unlink() for path in (checkpoint / "engine").iterdir()],
        lambda checkpoint: cut(next((checkpoint / "engine").iterdir())),
    ],
    ids=[
        "shorter",
        "manifest_shorter",
        "no_manifest",
        "manifest_empty",
        "no_progress",
        "progress_cut",
        "no_engine",
        "engine_empty",
        "shard_shorter",
    ],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    former, newest = save(tmp_path, 1), save(tmp_path, 2)
    damage(newest)
    assert not is_whole(newest)
    assert newest_checkpoint(tmp_path) == former
    damage(former)
    with pytest.raises(UserError, match="None of the 2 checkpoints"):
        newest_checkpoint(tmp_path)


def change_a_tensor(checkpoint):
    """Other bytes, same size."""
    file = next((checkpoint / "engine").iterdir())
    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(200.0, 208.0).numpy().tobytes())] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda checkpoint: cut(checkpoint / "drafter/model.safetensors"),
            r"model\.safetensors has \d+ bytes, not \d+",
        ),
        (lambda checkpoint: next((checkpoint / "engine").iterdir()).unlink(), r"engine/zero\S+ is missing"),
        (change_a_tensor, r"other bytes than were written in engine/zero\S+optim_states\.pt"),
    ],
    ids=["shorter", "missing", "changed"],
)
def test_a_damaged_newest_checkpoint_is_named_with_its_damage_and_the_one_before_is_resumed(
    tmp_path, capsys, damage, reason
):
    former, newest = save(tmp_path, 1), save(tmp_path, 2)
    assert checkpoint_to_resume(tmp_path) == newest
    assert capsys.readouterr().err == ""
    damage(newest)
    assert checkpoint_to_resume(tmp_path) == former
    warning = capsys.readouterr().err
    assert re.search(rf"warning: \S+step-000002 is not whole \(.*{reason}\): \S+step-000001 is taken", warning), warning
    assert newest_checkpoint(tmp_path) == former  # nor is it the newest for whoever does not read it
    damage(former)
    with pytest.raises(UserError, match=rf"None of the 2 checkpoints .* \(step-000002: .*{reason}\)"):
        checkpoint_to_resume(tmp_path)
    assert save(tmp_path, 2) == checkpoint_to_resume(tmp_path)


def test_a_changed_checkpoint_neither_counts_as_kept_nor_prunes_others(tmp_path):
    for update in (1, 2, 3):
        save(tmp_path, update)
    change_a_tensor(tmp_path / "step-000003")
    assert checkpoint_to_resume(tmp_path) == tmp_path / "step-000002"
    (tmp_path / "step-000002").rename(tmp_path / "elsewhere")
    save(tmp_path, 2, keep=1)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000002"


def test_only_the_newest_are_kept(tmp_path):
    for update in (1, 2, 3, 4):
        save(tmp_path, update, keep=2)
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_pruning_counts_whole_checkpoints_only(tmp_path):
    for update in (1, 2, 3):
        save(tmp_path, update)
    cut(tmp_path / "step-000003" / "progress.json")
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000004"]


def test_saving_over_a_damaged_checkpoint_makes_it_whole(tmp_path):
    cut(save(tmp_path, 2) / "progress.json")
    assert not is_whole(tmp_path / "step-000002")
    assert save(tmp_path, 2) == newest_checkpoint(tmp_path)


def validated(update, acceptance_length, former=None):
    progress = former or Progress()
    progress.update, progress.position = update, {"epoch": 1}
    progress.note_validation(acceptance_length)
    return progress


def test_the_best_validated_checkpoint_is_kept_besides_the_newest(tmp_path):
    progress = None
    for update, acceptance_length in enumerate([1.5, 1.5, 1.1, 1.49, math.nan, 1.4], start=1):
        progress = validated(update, acceptance_length, progress)
        save_checkpoint(Engine(), tmp_path, progress, keep=1)
    assert names(tmp_path) == ["step-000002", "step-000006"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-000002"
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000006"
    save_checkpoint(Engine(), tmp_path, validated(7, 1.6, progress), keep=1)
    assert names(tmp_path) == ["step-000007"]


def test_export_of_a_run_writes_the_best_drafter_else_the_newest(tmp_path):
    def exported(out):
        assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / out)]) == 0
        return (tmp_path / out / "model.safetensors").read_bytes()

    def drafter_of(checkpoint):
        return (checkpoint / "drafter" / "model.safetensors").read_bytes()

    checkpoints, progress = tmp_path / "run" / "checkpoints", Progress(update=1, position={"epoch": 1})
    first = save_checkpoint(Engine(seed=1), checkpoints, progress, keep=9)
    assert exported("newest") == drafter_of(first)
    best = save_checkpoint(Engine(seed=2), checkpoints, validated(2, 1.4, progress), keep=9)
    save_checkpoint(Engine(seed=3), checkpoints, validated(3, 1.3, progress), keep=9)
    assert exported("best") == drafter_of(best) != drafter_of(first)


def test_without_validation_or_without_its_checkpoint_there_is_no_best(tmp_path):
    assert best_checkpoint(tmp_path) is None
    save(tmp_path, 1)
    assert best_checkpoint(tmp_path) is None
    save_checkpoint(Engine(), tmp_path, validated(2, 1.2), keep=3)
    save_checkpoint(Engine(), tmp_path, validated(3, 1.1, Progress.read(tmp_path / "step-000002")), keep=3)
    assert best_checkpoint(tmp_path) == tmp_path / "step-000002"
    cut(tmp_path / "step-000002" / "manifest.json")
    assert best_checkpoint(tmp_path) is None


def test_what_validation_finds_of_a_saved_state_joins_its_checkpoint(tmp_path):
    """A run that was stopped in its validation pass has saved already when the pass is made up for."""
    save(tmp_path, 1)
    checkpoint, progress = save(tmp_path, 2), Progress(update=2, position={"epoch": 1})
    progress.note_validation(1.3)
    replace_progress(tmp_path, progress, keep=1)
    assert is_whole(checkpoint)
    assert names(tmp_path) == ["step-000002"]
    assert Progress.read(checkpoint).best_acceptance_length == 1.3


def test_a_best_checkpoint_that_is_gone_no_longer_counts(tmp_path, capsys):
    progress = validated(1, 1.9)
    checkpoint = save_checkpoint(Engine(), tmp_path, progress, keep=1)
    progress.forget_lost_best(tmp_path, warn=True)
    assert (progress.best_update, capsys.readouterr().err) == (1, "")
    shutil.rmtree(checkpoint)
    progress.forget_lost_best(tmp_path, warn=True)
    assert "step-000001, the best so far, is not whole" in capsys.readouterr().err
    assert validated(2, 1.1, progress).best_update == 2


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "3",
        '{"update": "x", "position": {"epoch": 1}}',
        '{"update": 2, "position": []}',
        '{"update": 2, "position": {}}',
        '{"update": 2, "position": {"epoch": 1}, "best_update": "x"}',
        '{"update": 2, "position": {"epoch": 1}, "curve": "x"}',
        '{"update": 2, "position": {"epoch": 1}, "random_state": "zz"}',
        '{"update": 2, "position": {"epoch": 1}, "fingerprint": 3}',
    ],
)
def test_a_progress_that_cannot_be_used_is_named_in_one_line(tmp_path, content):
    checkpoint = save(tmp_path, 2)
    (checkpoint / "progress.json").write_text(content)
    with pytest.raises(UserError, match=r"step-000002/progress\.json cannot be used \(.*\): remove") as caught:
        Progress.read(checkpoint)
    assert "\n" not in str(caught.value)
