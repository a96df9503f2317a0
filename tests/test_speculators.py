"""The format of the package `speculators`: written, read again, and told from what is not trained here."""

import json

import pytest
import tiny
import torch
from drafters import drafter_config, make_drafter, sliding
from safetensors.torch import load_file, save_file

from ds_dflash import cli
from ds_dflash.config import TargetSettings
from ds_dflash.errors import UserError
from ds_dflash.export import inspect, read_drafter, read_drafter_config, serving_config, write_drafter
from ds_dflash.target import open_target

KINDS = {
    "full": {},
    "mixed": sliding(6, layers=3),
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tiny.write_target(tmp_path_factory.mktemp("inputs") / "target", hidden_size=16)
    return open_target(TargetSettings(path=str(path)))


@pytest.fixture
def write(tmp_path, target):
    """Writes a drafter of a kind in the format; returns its directory and the model."""

    def write(kind="full"):
        model = make_drafter(drafter_config(vocab_size=target.text.vocab_size, eos_token_id=2, **KINDS[kind]))
        directory = tmp_path / kind
        write_drafter(model.state_dict(), model.config, directory, target, "owner/target")
        return directory, model

    return write


def fields_of(directory):
    return json.loads((directory / "config.json").read_text())


def change(directory, *removed, layer=None, **changes):
    fields = fields_of(directory) | changes
    for name in removed:
        del fields[name]
    fields["transformer_layer_config"] = fields["transformer_layer_config"] | (layer or {})
    (directory / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_comes_back_from_the_format_with_equal_weights_taps_and_config(tmp_path, write, kind):
    directory, model = write(kind)
    write_drafter(model.state_dict(), model.config, tmp_path / "dflash")
    config, weights = read_drafter(directory)
    expected_config, expected = read_drafter(tmp_path / "dflash")
    assert serving_config(config) == serving_config(expected_config)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    write_drafter(weights, config, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "dflash" / name).read_bytes()


def test_the_config_says_what_the_package_and_vllm_read(write, target):
    """The fields and values that DFlashConverter of speculators 0.9.0 writes for this drafter."""
    directory, _ = write()
    fields = fields_of(directory)
    layer = fields.pop("transformer_layer_config")
    assert fields["speculators_model_type"] == "dflash"
    assert fields["architectures"] == ["DFlashDraftModel"]
    assert fields["aux_hidden_state_layer_ids"] == [2, 4]  # hidden states: one more than the tapped layers 1 and 3
    assert (fields["mask_token_id"], fields["block_size"]) == (3, 4)
    assert fields["draft_vocab_size"] == layer["vocab_size"] == target.text.vocab_size
    assert fields["sample_from_anchor"] is False
    speculators = fields["speculators_config"]
    assert (speculators["algorithm"], speculators["default_proposal_method"]) == ("dflash", "greedy")
    assert [method["speculative_tokens"] for method in speculators["proposal_methods"]] == [3]
    assert speculators["verifier"] == {"name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]}
    assert (layer["model_type"], layer["num_hidden_layers"], layer["hidden_size"]) == ("qwen3", 2, 16)
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10_000.0
    assert "dflash_config" not in layer
    assert "block_size" not in layer


def test_the_tensors_are_those_of_the_other_format(tmp_path, write):
    directory, model = write()
    write_drafter(model.state_dict(), model.config, tmp_path / "dflash")
    assert (directory / "model.safetensors").read_bytes() == (tmp_path / "dflash" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("kind", "non_causal"), [("full", True), ("mixed", False), ("sliding", False)])
def test_sliding_layers_are_causal_and_full_ones_are_not_as_far_as_the_format_can_say(write, kind, non_causal):
    directory, _ = write(kind)
    assert fields_of(directory)["sliding_window_non_causal"] is non_causal
    inspection = inspect(directory)
    assert inspection.violations == []
    assert [sentence[:34] for sentence in inspection.warnings] == (
        ["sliding_window_non_causal is false"] if kind == "mixed" else []  # vLLM has one switch for all layers
    )


def test_a_drafter_as_the_package_writes_it_is_read(write, target):
    directory, model = write()
    layer = fields_of(directory)["transformer_layer_config"]
    del layer["rope_theta"], layer["rope_scaling"]
    change(
        directory,
        "num_target_layers",
        auto_map={"": "config.DFlashSpeculatorConfig"},
        speculators_version="0.9.0",
        sliding_window_non_causal=False,
        transformer_layer_config=layer,
    )
    (directory / "config.py").write_text("raise SystemExit('it ran')\n")
    inspection = inspect(directory, target)
    assert inspection.violations == []
    assert inspection.description.startswith(
        "format speculators: 2 layers, hidden size 16, block size 4, taps 1 3, mask"
    )
    config, weights = read_drafter(directory)
    assert config.dflash_config == model.config.dflash_config
    assert config.rope_parameters["rope_theta"] == 10_000.0
    assert weights.keys() == model.state_dict().keys()


def test_the_targets_own_tensors_in_the_file_are_passed_over(write):
    directory, model = write()
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"embed_tokens.weight": torch.full([320, 16], torch.nan)}, file)
    assert any("embed_tokens.weight is the target's" in sentence for sentence in inspect(directory).warnings)
    assert read_drafter(directory)[1].keys() == model.state_dict().keys()


BROKEN = {
    "another type": (lambda d: change(d, speculators_model_type="eagle3"), 'speculators_model_type is "eagle3"'),
    "no layers": (lambda d: change(d, transformer_layer_config={}, layer={}), "transformer_layer_config.hidden_size"),
    "no ids": (lambda d: change(d, "aux_hidden_state_layer_ids"), "lacks aux_hidden_state_layer_ids"),
    "no mask": (lambda d: change(d, mask_token_id=None), "lacks mask_token_id"),
    "the embedding tapped": (lambda d: change(d, aux_hidden_state_layer_ids=[0, 3]), "has 0, the embedding's output"),
    "ids that are none": (lambda d: change(d, aux_hidden_state_layer_ids="2 4"), 'is "2 4", but should be a list'),
    "a vocabulary of its own": (lambda d: change(d, draft_vocab_size=32), "draft_vocab_size is 32"),
    "drafts at the anchor": (lambda d: change(d, sample_from_anchor=True), "sample_from_anchor is True"),
    "a target of other width": (lambda d: change(d, target_hidden_size=64), "target_hidden_size is 64"),
    "no number of layers": (
        lambda d: change(d, layer={"num_hidden_layers": "2"}),
        'transformer_layer_config.num_hidden_layers is "2"',
    ),
    "a wrong switch": (lambda d: change(d, sliding_window_non_causal="no"), 'sliding_window_non_causal is "no"'),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_drafter_of_this_kind_is_refused_with_the_formats_own_names(write, spoil, message):
    directory, _ = write()
    spoil(directory)
    assert any(message in sentence for sentence in inspect(directory).violations)
    with pytest.raises(UserError):
        read_drafter(directory)


def test_sliding_layers_that_are_not_causal_are_refused(write):
    directory, _ = write("mixed")
    change(directory, sliding_window_non_causal=True)
    with pytest.raises(UserError, match="sliding_window_non_causal is true"):
        read_drafter_config(directory)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: change(d, "speculators_config"), "speculative_tokens None, but a block of 4 drafts 3"),
        (lambda d: change(d, "speculators_config"), "verifier.name_or_path, the target of the drafter, is missing"),
    ],
)
def test_what_vllm_needs_to_serve_is_asked_for_but_not_to_train(write, spoil, message):
    directory, _ = write()
    spoil(directory)
    assert any(message in sentence for sentence in inspect(directory).violations)
    read_drafter(directory)


def write_checkpoint(directory, config):
    """What `export` needs of a checkpoint."""
    checkpoint = directory / "step-000003"
    model = make_drafter(config)
    write_drafter(model.state_dict(), model.config, checkpoint / "drafter")
    files = {"drafter/config.json": (checkpoint / "drafter" / "config.json").stat().st_size}
    (checkpoint / "manifest.json").write_text(json.dumps(files))
    (checkpoint / "progress.json").write_text("{}")
    return checkpoint


def test_the_command_writes_the_format_with_the_targets_place(capsys, tmp_path, target):
    checkpoint = write_checkpoint(tmp_path, drafter_config(vocab_size=target.text.vocab_size, **KINDS["mixed"]))
    out = tmp_path / "out"
    options = ["export", str(checkpoint), str(out), "--format", "speculators"]
    assert cli.main(options) == UserError.EXIT_CODE
    assert "give it with --target" in capsys.readouterr().err
    assert not out.exists()
    assert cli.main([*options, "--target", str(target.path)]) == 0
    assert "warning: sliding_window_non_causal is false" in capsys.readouterr().out
    assert fields_of(out)["speculators_config"]["verifier"]["name_or_path"] == str(target.path.resolve())
    assert cli.main(["export", "--check", str(out), "--target", str(target.path)]) == 0


def test_a_drafter_of_another_target_is_not_exported_for_it(capsys, tmp_path, target):
    checkpoint = write_checkpoint(tmp_path, drafter_config())
    for kind in ("dflash", "speculators"):
        options = ["export", str(checkpoint), str(tmp_path / "out"), "--format", kind, "--target", str(target.path)]
        assert cli.main(options) == UserError.EXIT_CODE
        assert "vocabulary of 50 and the target" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_turns_one_format_into_the_other_and_back(tmp_path, target):
    model = make_drafter(drafter_config(vocab_size=target.text.vocab_size))
    directories = [tmp_path / name for name in ("first", "second", "third")]
    write_drafter(model.state_dict(), model.config, directories[0])
    options = ["--format", "speculators", "--target", str(target.path)]
    assert cli.main(["export", str(directories[0]), str(directories[1]), *options]) == 0
    assert cli.main(["export", str(directories[1]), str(directories[2])]) == 0
    for name in ("config.json", "model.safetensors"):
        assert (directories[2] / name).read_bytes() == (directories[0] / name).read_bytes()
