"""`export --check`: every way to break the contract with serving engines is found, also in what others wrote."""

import json
import os
import re
import shutil

import pytest
import tiny
import torch
from drafters import drafter_config, make_drafter, sliding
from safetensors.torch import load_file, save_file

from ds_dflash import cli
from ds_dflash.config import TargetSettings
from ds_dflash.errors import UserError
from ds_dflash.export import inspect, load_drafter, read_drafter, read_drafter_config, write_drafter
from ds_dflash.target import open_target


@pytest.fixture
def drafter(tmp_path):
    return write(tmp_path / "drafter")


@pytest.fixture
def sliding_drafter(tmp_path):
    return write(tmp_path / "drafter", drafter_config(**sliding(6)))


def write(directory, config=None):
    model = make_drafter(config)
    write_drafter(model.state_dict(), model.config, directory)
    return directory


def change(directory, *removed, own=None, **changes):
    """Change `config.json`; `own` is for dflash_config."""
    file = directory / "config.json"
    fields = json.loads(file.read_text()) | changes
    fields["dflash_config"] = fields["dflash_config"] | (own or {})
    for name in removed:
        del (fields["dflash_config"] if name in fields["dflash_config"] else fields)[name]
    file.write_text(json.dumps(fields))


def change_weights(directory, **tensors):
    file = directory / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, file)


def shard(directory, moved=None):
    """Distribute the weights over two files with an index; `moved`: a tensor that the index places wrongly."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, directory / file)
    if moved is not None:
        places[moved] = "model-0.safetensors" if places[moved] == "model-1.safetensors" else "model-1.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (directory / "model.safetensors").unlink()


def assert_same_weights(directory, original):
    expected = load_file(original / "model.safetensors")
    found = read_drafter(directory)[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)


# ----------------------------------------------------------------------------------------------------- what breaks it

BROKEN = {
    "another network": (lambda d: change(d, architectures=["DFlash2DraftModel"]), r"architectures is \['DFlash2"),
    "a mask outside": (lambda d: change(d, own={"mask_token_id": 50}), "mask_token_id is 50, but vocab_size is 50"),
    "a mask below": (lambda d: change(d, own={"mask_token_id": -1}), "mask_token_id is -1, but should be a token"),
    "a mask of another type": (lambda d: change(d, own={"mask_token_id": True}), "mask_token_id is True"),
    "taps that fall": (lambda d: change(d, own={"target_layer_ids": [3, 1]}), r"\[3, 1\], but should increase"),
    "taps that repeat": (lambda d: change(d, own={"target_layer_ids": [1, 1]}), r"\[1, 1\], but should increase"),
    "taps below": (lambda d: change(d, own={"target_layer_ids": [-1, 1]}), r"\[-1, 1\], but should be a list of layer"),
    "taps above": (lambda d: change(d, own={"target_layer_ids": [1, 6]}), "names layer 6, but num_target_layers is 6"),
    "no taps": (lambda d: change(d, own={"target_layer_ids": []}), r"target_layer_ids is \[\]"),
    "taps that are no list": (lambda d: change(d, own={"target_layer_ids": 3}), "target_layer_ids is 3"),
    "a tap more than fc": (lambda d: change(d, own={"target_layer_ids": [1, 3, 5]}), r"fc.weight is \(16, 32\)"),
    "two block sizes": (lambda d: change(d, own={"block_size": 5}), "block_size is 4 at top level and 5 in dflash_con"),
    "a block of one": (lambda d: change(d, block_size=1), "block_size is 1, but a block has at least 2"),
    "two bases": (lambda d: change(d, rope_theta=7.0), "rope_theta is 7.0 and rope_parameters.rope_theta is 10000.0"),
    "no base": (lambda d: change(d, "rope_theta", rope_parameters=None), "rope_theta is missing"),
    "a base that is no number": (lambda d: change(d, rope_theta="1e6"), 'rope_theta is "1e6"'),
    "a base that is not finite": (lambda d: change(d, rope_theta=float("nan")), "rope_theta is nan"),
    "a partial embedding": (lambda d: change(d, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "a multimodal embedding": (
        lambda d: change(d, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}),
        r"rope_parameters.mrope_section is \[1, 1, 2\]",
    ),
    "a scaled embedding": (lambda d: change(d, rope_scaling={"type": "linear", "factor": 2.0}), 'rope_type "linear"'),
    "too few layer types": (
        lambda d: change(d, layer_types=["full_attention"]),
        "has 1 entries, but num_hidden_layers",
    ),
    "an unknown layer type": (lambda d: change(d, layer_types=["full_attention", "linear"]), "but should list"),
    "heads that don't divide": (
        lambda d: change(d, num_key_value_heads=3),
        "is 4, no multiple of num_key_value_heads, 3",
    ),
    "heads of odd width": (lambda d: change(d, head_dim=7), "head_dim is 7, but the rotary embedding needs"),
    "a size that is no number": (lambda d: change(d, hidden_size="16"), 'hidden_size is "16"'),
    "a huge number of layers": (lambda d: change(d, num_hidden_layers=10**9, layer_types=None), "from 1 to 1000"),
    "a huge width": (lambda d: change(d, hidden_size=10**40), "hidden_size is a number of 133 bits"),
    "no null where a number is": (lambda d: change(d, head_dim=None), "head_dim is None"),
    "biases": (lambda d: change(d, attention_bias=True), "attention_bias is True"),
    "another activation": (lambda d: change(d, hidden_act="gelu"), 'hidden_act is "gelu"'),
    "an epsilon of zero": (lambda d: change(d, rms_norm_eps=0), "rms_norm_eps is 0"),
    "drafts at the anchor": (lambda d: change(d, own={"sample_from_anchor": True}), "sample_from_anchor is True"),
    "causal full layers": (lambda d: change(d, own={"causal": True}), "causal is True for all layers"),
    "a vocabulary of its own": (lambda d: change(d, draft_vocab_size=32), "draft_vocab_size is 32 and vocab_size 50"),
    "quantised": (lambda d: change(d, quantization_config={"bits": 4}), "quantization_config is {'bits': 4}"),
    "an infinite weight": (
        lambda d: change_weights(d, norm__weight=torch.full([16], torch.inf, dtype=torch.bfloat16)),
        "norm.weight has 16 numbers that are not finite",
    ),
    "a context of zeros": (
        lambda d: change_weights(d, fc__weight=torch.zeros(16, 32, dtype=torch.bfloat16)),
        "fc.weight is all zeros",
    ),
    "whole numbers": (lambda d: change_weights(d, norm__weight=torch.ones(16, dtype=torch.int8)), "the format I8"),
    "a mask of its own": (lambda d: (d / "mask_embedding.pt").touch(), "holds mask_embedding.pt"),
    "no tensors": (lambda d: save_file({}, d / "model.safetensors"), "holds no tensors"),
    "an empty file": (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors cannot be read"),
    "half a file": (lambda d: os.truncate(d / "model.safetensors", 900), "model.safetensors cannot be read"),
    "nested too deeply": (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
    "another encoding": (lambda d: (d / "config.json").write_bytes(b"\xff\x00{}"), "config.json is not JSON"),
    "no fields": (lambda d: (d / "config.json").write_text("{}"), "config.json is empty"),
    "nothing": (lambda d: [file.unlink() for file in d.iterdir()], "holds no config.json"),
    "no directory": (lambda d: shutil.rmtree(d), "not a directory that exists"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_breaks_the_contract_is_found_by_the_check_and_by_every_reader(capsys, drafter, spoil, message):
    spoil(drafter)
    assert cli.main(["export", "--check", str(drafter)]) == 1
    output = capsys.readouterr()
    assert "holds the contract" not in output.out
    found = [line for line in output.err.splitlines() if line]
    assert all(line.startswith("error: ") and line.endswith(".") for line in found)
    assert any(re.search(message, line) for line in found), found
    with pytest.raises(UserError) as caught:
        read_drafter(drafter)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(drafter) in sentence


SLIDING_BROKEN = {
    "no window": (lambda d: change(d, sliding_window=None), "sliding_window is None"),
    "a window below the block": (lambda d: change(d, sliding_window=3), "sliding_window is 3, but should be at least"),
    "two windows": (lambda d: change(d, own={"swa_window_size": 8}), "swa_window_size 8"),
    "not causal": (lambda d: change(d, is_causal=False), "is_causal is False for all layers"),
    "not in the layer types": (lambda d: change(d, "layer_types"), "layer_types does not say which layers slide"),
    "all of them": (lambda d: change(d, own={"use_swa": True}), "use_swa is true"),
}


@pytest.mark.parametrize(("spoil", "message"), SLIDING_BROKEN.values(), ids=SLIDING_BROKEN.keys())
def test_sliding_layers_that_engines_would_misread_are_refused(sliding_drafter, spoil, message):
    spoil(sliding_drafter)
    assert any(message in sentence for sentence in inspect(sliding_drafter).violations)
    with pytest.raises(UserError, match=message):
        read_drafter_config(sliding_drafter)


def test_all_violations_are_named_not_the_first_only(capsys, drafter):
    change(drafter, "num_key_value_heads", own={"mask_token_id": 99, "target_layer_ids": [3, 1]}, rope_theta=7.0)
    change_weights(drafter, lm_head__weight=torch.zeros(50, 16), norm__weight=torch.full([16], torch.nan))
    assert cli.main(["export", "--check", str(drafter)]) == 1
    errors = capsys.readouterr().err
    for part in (
        "mask_token_id is 99",
        "should increase",
        "rope_theta is 7.0",
        "lm_head.weight is (50, 16)",
        "16 numb",
    ):
        assert part in errors
    assert errors.count("k_proj.weight is (16, 16), but its config.json asks for (256, 16)") == 2
    with pytest.raises(UserError, match=r"; `ds-dflash export --check .*` shows this and \d+ more\.$"):
        read_drafter(drafter)


def test_a_target_in_the_place_of_a_drafter_is_told_in_few_sentences(capsys, tmp_path):
    tiny.write_target(tmp_path / "target")
    assert cli.main(["export", "--check", str(tmp_path / "target")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) <= 3
    assert "block_size, dflash_config.mask_token_id, dflash_config.target_layer_ids" in errors[0]


UNSERVABLE = {
    "no class": (lambda d: change(d, "architectures"), "architectures is None"),
    "no model type": (lambda d: change(d, "model_type"), "model_type is None"),
    "another model type": (lambda d: change(d, model_type="llama"), 'model_type is "llama"'),
    "no depth of the target": (lambda d: change(d, "num_target_layers"), "refuses the layer id 3 as too large"),
    "code that isn't there": (lambda d: change(d, auto_map={"AutoModel": "dflash.Model"}), "has no file dflash.py"),
    "code of another type": (lambda d: change(d, auto_map=3), "auto_map names 3"),
}


@pytest.mark.parametrize(("spoil", "message"), UNSERVABLE.values(), ids=UNSERVABLE.keys())
def test_what_only_engines_trip_over_fails_the_check_but_can_be_trained_on(capsys, tmp_path, drafter, spoil, message):
    shutil.copytree(drafter, tmp_path / "original")
    spoil(drafter)
    assert cli.main(["export", "--check", str(drafter)]) == 1
    assert message in capsys.readouterr().err
    assert_same_weights(drafter, tmp_path / "original")


def test_a_window_that_engines_would_drop_is_still_read(sliding_drafter):
    change(sliding_drafter, use_sliding_window=False)
    assert inspect(sliding_drafter).violations == [
        "use_sliding_window should be true: layer_types has sliding_attention layers."
    ]
    assert read_drafter_config(sliding_drafter).sliding_window == 6


# ------------------------------------------------------------------------------------------------- what others publish


def as_published(directory, form):
    """Rewrite a drafter as others do, without changing what it computes."""
    if form == "with code":
        change(directory, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
        (directory / "dflash.py").write_text(f"open({str(directory.parent / 'it_ran')!r}, 'w')\n")
    elif form == "of transformers 5":
        change(directory, "block_size", "rope_theta", "rope_scaling", own={"block_size": 4})
    elif form == "of transformers 4":
        change(directory, "rope_parameters", "dtype", torch_dtype="bfloat16", tie_word_embeddings=True, use_cache=True)
    elif form == "short":
        change(directory, "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "pad_token_id")
    elif form == "ids at top level":
        change(directory, mask_token_id=3, target_layer_ids=[1, 3], dflash_config={})
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dflash_config": {}}))
    elif form == "further fields":
        change(directory, trained_by="someone", id2label={"3": 4}, own={"loss_decay_gamma": 7.0, "causal": False})
    elif form == "shards":
        shard(directory)
    elif form in ("float32", "float16"):
        tensors = load_file(directory / "model.safetensors")
        save_file({name: t.to(getattr(torch, form)) for name, t in tensors.items()}, directory / "model.safetensors")
    elif form == "links":
        blobs = directory.parent / "blobs"
        blobs.mkdir()
        for file in list(directory.iterdir()):
            shutil.move(file, blobs / file.name)
            file.symlink_to(blobs / file.name)


FORMS = {
    "with code": None,
    "of transformers 5": "engines on transformers 4 read it alone, and take 10000",
    "of transformers 4": "transformers 5 makes it from rope_theta",
    "short": "leaves out layer_types, sliding_window, use_sliding_window, max_window_layers, pad_token_id",
    "ids at top level": "target_layer_ids is not in dflash_config",
    "further fields": None,
    "shards": None,
    "float32": "the weights are float32: we write bfloat16",
    "float16": "the weights are float16: we write bfloat16",
    "links": None,
}


@pytest.mark.parametrize(("form", "warning"), FORMS.items(), ids=FORMS.keys())
def test_a_drafter_as_others_publish_it_holds_the_contract_and_is_the_same_drafter(
    capsys, tmp_path, drafter, form, warning
):
    shutil.copytree(drafter, tmp_path / "original")
    as_published(drafter, form)
    before = {file: file.read_bytes() for file in drafter.iterdir()}
    assert cli.main(["export", "--check", str(drafter)]) == 0
    output = capsys.readouterr().out
    assert output.endswith("holds the contract\n")
    assert "2 layers, hidden size 16, block size 4, taps 1 3 of 6, mask id 3, 25 tensors, 6,016 parameters" in output
    assert (warning or "holds the contract") in output
    if warning is None:
        assert "warning" not in output
    assert {file: file.read_bytes() for file in drafter.iterdir()} == before  # a check writes nothing
    assert_same_weights(drafter, tmp_path / "original")
    ours, theirs = read_drafter_config(tmp_path / "original"), read_drafter_config(drafter)
    for name in ("block_size", "dflash_config", "rope_parameters", "layer_types", "num_target_layers", "rms_norm_eps"):
        assert getattr(theirs, name) == getattr(ours, name)
    load_drafter(drafter, torch.float32, torch.device("cpu"))
    assert not (tmp_path / "it_ran").exists()


SHARDS = {
    "a shard is missing": (lambda d: (d / "model-1.safetensors").unlink(), "holds no model-1.safetensors"),
    "half a shard": (lambda d: os.truncate(d / "model-1.safetensors", 300), "model-1.safetensors cannot be read"),
    "an index without a map": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    "an index that is no JSON": (lambda d: (d / "model.safetensors.index.json").write_text("{"), "is not JSON"),
    "both": (lambda d: save_file({}, d / "model.safetensors"), "holds both"),
    "a file outside": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../other"}}'),
        "names ../other: shards are files of the directory itself",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), SHARDS.values(), ids=SHARDS.keys())
def test_shards_that_are_not_whole_are_named(drafter, spoil, message):
    shard(drafter)
    spoil(drafter)
    assert any(message in sentence for sentence in inspect(drafter).violations)
    with pytest.raises(UserError, match=message):
        read_drafter(drafter)


def test_a_tensor_that_the_index_places_in_another_shard_is_named(drafter):
    shard(drafter, moved="fc.weight")
    assert any("lacks the tensor fc.weight that model" in sentence for sentence in inspect(drafter).violations)


# ------------------------------------------------------------------------------------------------- against the target


@pytest.mark.parametrize(
    ("target_fields", "drafter_fields", "message"),
    [
        ({"hidden_size": 32}, {}, "hidden size 16 and the target"),
        ({"layers": 3}, {}, "taps layer 3 and the target"),
        ({"layers": 8}, {}, "is for 6 layers and the target"),
        ({}, {"vocab_size": 60}, "vocabulary of 60 and the target"),
    ],
)
def test_a_drafter_of_another_target_is_told(capsys, tmp_path, target_fields, drafter_fields, message):
    target = tiny.write_target(tmp_path / "target", **({"hidden_size": 16} | target_fields))
    rows = open_target(TargetSettings(path=str(target))).text.vocab_size
    directory = write(tmp_path / "drafter", drafter_config(**({"vocab_size": rows} | drafter_fields)))
    assert cli.main(["export", "--check", str(directory)]) == 0
    assert cli.main(["export", "--check", str(directory), "--target", str(target)]) == 1
    assert message in capsys.readouterr().err


def test_a_drafter_of_this_target_fits_it(tmp_path):
    target = open_target(TargetSettings(path=str(tiny.write_target(tmp_path / "target", hidden_size=16))))
    directory = write(tmp_path / "drafter", drafter_config(vocab_size=target.text.vocab_size))
    assert inspect(directory, target).violations == []


# -------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "export needs a run or checkpoint and a new directory to write, or --check DIR"),
        (["runs/run"], "export needs a run or checkpoint and a new directory"),
        (["runs/run", "out", "--format", "speculators"], "give it with --target"),
        (["--check", "drafter", "out"], "leave OUT and --format away"),
        (["--check", "drafter", "--format", "dflash"], "leave OUT and --format away"),
    ],
)
def test_options_that_make_no_export_are_refused_in_a_sentence(capsys, options, message):
    assert cli.main(["export", *options]) == UserError.EXIT_CODE
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors


def test_an_unknown_format_lists_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        cli.main(["export", "runs/run", "out", "--format", "gguf"])
    assert "dflash" in capsys.readouterr().err
