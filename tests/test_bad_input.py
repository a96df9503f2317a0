"""A user's mistake: one sentence that names it, exit code 2, before any process group exists, whatever the topology."""

import json
import re
from pathlib import Path

import pytest
import tiny

from ds_dflash import cli, train
from ds_dflash.config import load_settings
from ds_dflash.errors import UserError
from ds_dflash.run_directory import RunDirectory


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    tiny.write_target(directory / "target")
    tiny.write_chats(directory / "train.jsonl", 8)
    return directory


@pytest.fixture
def config(inputs, tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny.settings(inputs / "target", inputs / "train.jsonl", tmp_path / "runs")))
    return path


@pytest.fixture(params=[(0, 1), (0, 3), (2, 3)], ids=["alone", "rank-0-of-3", "rank-2-of-3"])
def ranks(request, monkeypatch):
    """The launcher's environment of one rank; the others need not exist."""
    rank, size = request.param
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(train.time, "sleep", lambda seconds: None)


def assert_refused(capsys, code: int, *fragments: str) -> None:
    error = capsys.readouterr().err.strip()
    assert code == 2, error
    assert len(error.splitlines()) == 1, error
    assert re.match(r"(rank \d+: )?error: ", error), error
    for fragment in fragments:
        assert fragment in error


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.usefixtures("ranks")
class TestTraining:
    def refuse(self, capsys, config, setting, *fragments):
        code = train.main(["--config", str(config), "--set", setting])
        assert_refused(capsys, code, *fragments)

    def test_no_such_config(self, capsys, tmp_path):
        assert_refused(capsys, train.main(["--config", str(tmp_path / "none.json")]), "none.json")

    def test_no_such_target(self, capsys, config, tmp_path):
        self.refuse(capsys, config, f"target.path={tmp_path}/nowhere", "target.path", "nowhere")

    def test_no_such_data(self, capsys, config, tmp_path):
        self.refuse(capsys, config, f"data.train={tmp_path}/nothing.jsonl", "nothing.jsonl")

    def test_unreadable_json_names_line_and_column(self, capsys, config, tmp_path):
        broken = write(tmp_path / "broken.jsonl", '{"text": "good"}\n{"text": oops}\n')
        self.refuse(capsys, config, f"data.train={broken}", "broken.jsonl", "line 2", "column 10")

    def test_an_empty_dataset(self, capsys, config, tmp_path):
        self.refuse(capsys, config, f"data.train={write(tmp_path / 'empty.jsonl', '')}", "empty.jsonl")

    def test_tapped_layers_that_the_target_lacks(self, capsys, config):
        self.refuse(capsys, config, "target.layer_ids=[1,6]", "layer 6", "6 layers")

    def test_a_target_too_short_for_the_default_taps(self, capsys, config):
        code = train.main(
            ["--config", str(config), "--set", "target.layer_ids=null", "--set", "drafter.num_hidden_layers=5"]
        )
        assert_refused(capsys, code, "target.layer_ids")

    def test_a_mask_id_outside_the_vocabulary(self, capsys, config):
        self.refuse(capsys, config, "drafter.mask_token_id=5000", "5000", "320")

    def test_a_budget_below_the_shortest_sample(self, capsys, config):
        code = train.main(
            ["--config", str(config), "--set", "batching.token_budget=3", "--set", "batching.oversize=drop"]
        )
        assert_refused(capsys, code, "3")

    def test_an_output_directory_of_other_settings(self, capsys, config, tmp_path):
        run = tmp_path / "runs" / "run"
        run.mkdir(parents=True)
        old = json.loads(config.read_text())
        old["ds_dflash"]["training"]["seed"] = 5
        (run / "config.json").write_text(json.dumps(old))
        self.refuse(capsys, config, "training.log_every=1", "training.seed was 5 and is now 0", "--fresh")

    def test_an_output_directory_that_is_no_run(self, capsys, config, tmp_path):
        (tmp_path / "runs" / "run").mkdir(parents=True)
        write(tmp_path / "runs" / "run" / "thesis.tex", "")
        self.refuse(capsys, config, "training.log_every=1", "not a run")

    def test_an_initial_drafter_of_another_shape(self, capsys, config, tmp_path):
        assert cli.main(["init", "--config", str(config), str(tmp_path / "drafter")]) == 0
        code = train.main(
            ["--config", str(config), "--set", "drafter.block_size=6", "--set", f"drafter.init_from={tmp_path}/drafter"]
        )
        assert_refused(capsys, code, "block_size 4", "6")

    def test_an_initial_drafter_that_is_no_longer_there(self, capsys, config, tmp_path):
        code = train.main(["--config", str(config), "--set", f"drafter.init_from={tmp_path}/gone"])
        assert_refused(capsys, code, "drafter.init_from", f"{tmp_path}/gone")

    def test_an_initial_drafter_that_fresh_would_move_away(self, config, tmp_path):
        run = tmp_path / "runs" / "run"
        settings = load_settings(config, [f"drafter.init_from={run}/drafter", f"output_dir={tmp_path}/runs"])
        run.mkdir(parents=True)
        with pytest.raises(UserError, match="lies in the run that --fresh moves aside"):
            RunDirectory(settings).open(fresh=True, plan={})
        assert [path.name for path in run.parent.iterdir() if path.is_dir()] == ["run"]

    @pytest.mark.parametrize("content", ["[]", "3", "not json", "{}"])
    def test_a_result_that_says_nothing_is_no_result(self, config, tmp_path, content):
        directory = RunDirectory(load_settings(config, [f"output_dir={tmp_path}/runs"]))
        directory.path.mkdir(parents=True)
        write(directory.path / "result.json", content)
        assert directory.finished_update() is None


@pytest.mark.parametrize("drafters", [3, 8])
def test_more_drafter_ranks_than_ranks(capsys, config, monkeypatch, drafters):
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    code = train.main(["--config", str(config), "--set", f"topology.drafter_ranks={drafters}"])
    assert_refused(capsys, code, f"topology.drafter_ranks is {drafters}", "3 ranks")


class TestCommand:
    @pytest.fixture
    def drafter(self, config, tmp_path) -> Path:
        assert cli.main(["init", "--config", str(config), str(tmp_path / "drafter")]) == 0
        return tmp_path / "drafter"

    def evaluate(self, inputs, drafter, prompts) -> int:
        return cli.main(
            ["evaluate", "--target", str(inputs / "target"), "--drafter", str(drafter), "--prompts", str(prompts)]
        )

    def test_evaluating_a_directory_that_is_no_drafter(self, capsys, inputs):
        code = self.evaluate(inputs, inputs / "target", inputs / "train.jsonl")
        assert_refused(capsys, code, "block_size")

    def test_prompts_that_are_not_json(self, capsys, inputs, drafter, tmp_path):
        prompts = write(tmp_path / "prompts.jsonl", '{"prompt": "fine"}\nnot json\n')
        assert_refused(capsys, self.evaluate(inputs, drafter, prompts), "line 2", "column 1")

    def test_prompts_without_a_known_key(self, capsys, inputs, drafter, tmp_path):
        prompts = write(tmp_path / "prompts.jsonl", '{"question": "why"}\n')
        assert_refused(capsys, self.evaluate(inputs, drafter, prompts), "line 1", "messages, prompt or input_ids")

    def test_a_drafter_of_another_target(self, capsys, drafter, tmp_path):
        other = tiny.write_target(tmp_path / "other", hidden_size=64)
        prompts = write(tmp_path / "prompts.jsonl", '{"prompt": "fine"}\n')
        code = cli.main(["evaluate", "--target", str(other), "--drafter", str(drafter), "--prompts", str(prompts)])
        assert_refused(capsys, code, "hidden size 32", "64")

    def test_exporting_what_is_no_run(self, capsys, tmp_path):
        assert_refused(capsys, cli.main(["export", str(tmp_path), str(tmp_path / "out")]), "neither a run")

    @pytest.mark.parametrize("command", ["evaluate", "export"])
    def test_a_target_without_a_name(self, capsys, command):
        arguments = {"evaluate": ["--drafter", "x", "--prompts", "y"], "export": ["x", "y"]}[command]
        with pytest.raises(SystemExit, match="2"):
            cli.main([command, "--target", "", *arguments])
        assert "it is empty" in capsys.readouterr().err

    def test_exporting_over_what_is_there(self, capsys, config, drafter):
        assert_refused(capsys, cli.main(["init", "--config", str(config), str(drafter)]), "exists already")
