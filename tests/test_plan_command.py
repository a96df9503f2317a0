"""`ds-dflash plan`: what it prints, writes and refuses."""

import argparse
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from plan_checks import check_plan

from ds_dflash import planner
from ds_dflash.errors import UserError

SMALL = ["--token-budget", "4000", "--ranks", "3", "--gradient-accumulation-steps", "2"]


@pytest.fixture
def lengths() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 1000, 3000).astype(np.int32)


@pytest.fixture
def lengths_file(lengths: np.ndarray, tmp_path: Path) -> str:
    np.save(tmp_path / "lengths.npy", lengths)
    return str(tmp_path / "lengths.npy")


def plan(*words: str) -> int:
    parser = argparse.ArgumentParser()
    planner.add_arguments(parser)
    return planner.run(parser.parse_args(words))


def test_each_epoch_is_printed_with_its_figures(lengths_file, capsys):
    assert plan("--lengths", lengths_file, *SMALL, "--epochs", "3", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [epoch["epoch"] for epoch in printed["epochs"]] == [0, 1, 2]
    assert printed["epochs"][0]["pairs_that_meet_again"] is None
    for epoch in printed["epochs"]:
        assert epoch["micro_batches"] == 6 * epoch["updates"]
        assert 0.9 < epoch["lockstep_efficiency"] < epoch["padding_efficiency"] < 1
        assert 0 < epoch["window_tv"] < 0.3
        assert epoch["seconds"] > 0
        assert epoch["peak_bytes"] > 0
    assert printed["accounting"]["rows"] == 3000


def test_the_table_has_a_line_for_every_epoch(lengths_file, capsys):
    assert plan("--lengths", lengths_file, *SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3,000 samples" in lines[0]
    assert [line.split()[0] for line in lines[-3:]] == ["epoch", "0", "1"]


def test_saved_epochs_are_whole_plans(lengths, lengths_file, tmp_path):
    assert plan("--lengths", lengths_file, *SMALL, "--save", str(tmp_path / "made" / "here")) == 0
    orders = []
    for epoch in (0, 1):
        saved = np.load(tmp_path / "made" / "here" / f"epoch-{epoch}.npz")
        check_plan(lengths, saved["indices"], saved["offsets"], 4000, 6)
        orders.append(saved["indices"].tolist())
    assert orders[0] != orders[1]


def test_all_groupings_are_compared_side_by_side(lengths_file, capsys):
    assert plan("--lengths", lengths_file, *SMALL, "--bucket-edges", "200,400", "700", "--compare", "--json") == 0
    compared = json.loads(capsys.readouterr().out)["compare"]
    assert {line["settings"]["grouping"] for line in compared} == {"sorted", "shuffled", "bucketed", "pooled"}
    assert [200, 400, 700] in [line["settings"]["bucket_edges"] for line in compared]
    figures = {line["settings"]["grouping"]: line for line in compared}
    assert figures["shuffled"]["padding_efficiency"] < figures["bucketed"]["padding_efficiency"]
    assert figures["sorted"]["pairs_that_meet_again"] == 1.0
    assert plan("--lengths", lengths_file, *SMALL, "--compare") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 + len(compared)


@pytest.mark.parametrize("recipe", ["pooled", "bucketed"])
def test_the_picture_is_written(lengths_file, tmp_path, recipe):
    picture = tmp_path / "plan.png"
    assert plan("--lengths", lengths_file, *SMALL, "--grouping", recipe, "--plot", str(picture)) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("place", ["prepared", "prepared/table"])
def test_a_prepared_dataset_is_planned_by_its_length_column(lengths, tmp_path, capsys, place):
    datasets.Dataset.from_dict({"length": lengths}).save_to_disk(str(tmp_path / place))
    assert plan(str(tmp_path / "prepared"), *SMALL, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["epochs"][0]["tokens"] == lengths.sum()


def test_dropped_and_truncated_samples_are_reported(tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", np.array([0, 50, 60, 500]))
    assert plan("--lengths", str(tmp_path / "lengths.npy"), "--token-budget", "100", "--oversize", "drop") == 0
    assert "4 samples = 2 planned + 1 empty + 1 dropped as too long" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "{tmp}/none.npy"], "none.npy: No such file"),
        (["--lengths", "{tmp}"], "Is a directory"),
        (["--lengths", "{tmp}/text.npy"], "not a .npy file of integers"),
        (["--lengths", "{tmp}/float.npy"], "float64"),
        (["--lengths", "{tmp}/many.npz"], "an archive of arrays"),
        (["--lengths", "{tmp}/good.npy", "--token-budget", "7"], "token_budget is 7 and the shortest sample has 10"),
        (["--lengths", "{tmp}/good.npy", "--ranks", "0"], "--ranks is 0"),
        (["--lengths", "{tmp}/good.npy", "--epochs", "-1"], "--epochs is -1"),
        (["--lengths", "{tmp}/good.npy", "--bucket-edges", "10", "x"], "--bucket-edges 10 x: edges must be whole"),
        (["--lengths", "{tmp}/good.npy", "--plot", "{tmp}/none/plan.png"], "there is no directory"),
        (["--lengths", "{tmp}/good.npy", "--save", "{tmp}/good.npy"], "cannot write to"),
        (["--lengths", "{tmp}/good.npy", "--compare", "--save", "{tmp}/out"], "leave out --compare"),
        (["{tmp}"], "holds no prepared dataset"),
        (["{tmp}/other"], "has the columns text but no `length`"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(tmp_path, words, message):
    (tmp_path / "text.npy").write_text("10 20 30")
    np.save(tmp_path / "float.npy", np.array([10.0, 20.0]))
    np.save(tmp_path / "good.npy", np.array([10, 20]))
    np.savez(tmp_path / "many.npz", a=np.array([10, 20]))
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(UserError, match=message):
        plan(*(word.format(tmp=tmp_path) for word in words))
