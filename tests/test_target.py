"""The frozen target: taps, mask token, number format, and what is said of a broken checkpoint. Every kind of target is
captured from in test_target_kinds.py.
"""

import json
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_targets
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from ds_dflash import target as target_module
from ds_dflash.config import TargetSettings
from ds_dflash.errors import UserError
from ds_dflash.target import RESERVED_MASK_IDS, Target, TargetCheckpoint, default_layer_ids, open_target

CPU = torch.device("cpu")
TARGETS = Path(__file__).parent / "targets"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """kind -> (model, directory of its checkpoint)."""
    root = tmp_path_factory.mktemp("targets")

    @cache
    def save(kind):
        model = small_targets.build(getattr(small_targets, kind))
        return model, small_targets.write(model, root / kind)

    return save


def settings_of(directory, dtype="float32", **fields):
    return TargetSettings(path=str(directory), dtype=dtype, **fields)


def load(directory, layer_ids, **fields):
    settings = settings_of(directory, **fields)
    return Target.load(open_target(settings), settings, layer_ids, CPU, zero=None)


def random_rows(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, small_targets.VOCABULARY, length) for length in lengths]


def test_the_last_layer_is_tapped_before_the_final_norm(saved):
    model, directory = saved("qwen3")
    rows = random_rows(11)
    expected = model(input_ids=torch.from_numpy(rows[0])[None], output_hidden_states=True).hidden_states[-1]
    features = load(directory, [5]).capture(rows)
    torch.testing.assert_close(model.model.norm(features), expected[0])
    assert not torch.allclose(features, expected[0])


def test_no_rows_give_no_features_of_the_right_width(saved):
    features = load(saved("qwen3")[1], [1, 4], dtype="bfloat16").capture([])
    assert features.shape == (0, 32)
    assert features.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_weights_have_the_format_asked_for_or_the_checkpoints(tmp_path, dtype, expected):
    model = small_targets.build(small_targets.hybrid).bfloat16()
    features = load(small_targets.write(model, tmp_path / "target"), [1], dtype=dtype).capture(random_rows(4))
    assert features.dtype == expected


# ------------------------------------------------------------------------------------------ taps and mask token


@pytest.mark.parametrize(
    ("target_layers", "drafter_layers", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (30, 5, [1, 8, 14, 20, 27]),
        (64, 1, [32]),
        (7, 1, [3]),
        (6, 2, [1, 3]),
    ],
)
def test_default_taps_are_spread_over_the_target(target_layers, drafter_layers, expected):
    assert default_layer_ids(target_layers, drafter_layers) == expected


def with_layers(layers):
    return TargetCheckpoint(Path("/models/short"), SimpleNamespace(get_text_config=lambda: numbered(layers)))


def numbered(layers):
    return SimpleNamespace(num_hidden_layers=layers, model_type="other_text")


@pytest.mark.parametrize(("layers", "drafter_layers"), [(6, 5), (2, 2), (4, 3), (1, 3), (5, 5)])
def test_default_taps_that_repeat_or_fall_below_0_ask_for_layer_ids(layers, drafter_layers):
    with pytest.raises(UserError, match=rf"has {layers} layers, too few .* of {drafter_layers} layers .*layer_ids"):
        with_layers(layers).layer_ids(None, drafter_layers)


def test_configured_taps_are_taken_as_they_are_or_refused_with_both_numbers():
    assert with_layers(6).layer_ids([0, 5], 4) == [0, 5]
    assert with_layers(8).layer_ids(None, 5) == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match=r"names layer 6, but /models/short has 6 layers: ids go from 0 to 5"):
        with_layers(6).layer_ids([0, 6], 4)


def test_the_lowest_default_tap_may_come_last(saved):
    """A target of 3 layers and a drafter of 2: layers 1 and 0, in this order."""
    model = small_targets.build(small_targets.qwen3)
    expected = model(input_ids=torch.from_numpy(random_rows(4)[0])[None], output_hidden_states=True).hidden_states
    features = load(saved("qwen3")[1], with_layers(3).layer_ids(None, 2)).capture(random_rows(4))
    torch.testing.assert_close(features, torch.cat([expected[2][0], expected[1][0]], -1))


def tokenizer(mask_token_id):
    return SimpleNamespace(mask_token_id=mask_token_id)


def test_the_mask_is_the_configured_id_else_the_tokenizers_else_the_reserved_one(saved, monkeypatch):
    checkpoint = open_target(settings_of(saved("hybrid")[1]))
    monkeypatch.setitem(RESERVED_MASK_IDS, "qwen3_5", 59)
    assert checkpoint.mask_token_id(0, tokenizer(7)) == 0
    assert checkpoint.mask_token_id(None, tokenizer(7)) == 7
    assert checkpoint.mask_token_id(None, tokenizer(None)) == 59
    assert checkpoint.mask_token_id(None, None) == 59


def test_a_mask_outside_the_embedding_is_refused_with_both_numbers(saved):
    checkpoint = open_target(settings_of(saved("qwen3")[1]))
    with pytest.raises(UserError, match=r"mask_token_id 60 is outside .* 60 rows: choose an id from 0 to 59"):
        checkpoint.mask_token_id(60, None)
    with pytest.raises(UserError, match="151669 is outside"):
        checkpoint.mask_token_id(None, tokenizer(None))  # reserved for Qwen3, but this one is small


def test_a_target_without_any_mask_asks_for_one(saved):
    with pytest.raises(UserError, match=r"no mask token and none is reserved for llama: set drafter\.mask_token_id"):
        open_target(settings_of(saved("llama_tied")[1])).mask_token_id(None, tokenizer(None))


@pytest.mark.parametrize(("name", "mask"), [("qwen3-8b", 151_669), ("qwen3.6-27b", 248_070)])
def test_reserved_masks_are_inside_the_published_embeddings(name, mask):
    text = AutoConfig.from_pretrained(TARGETS / name).get_text_config()
    assert RESERVED_MASK_IDS[text.model_type.removesuffix("_text")] == mask
    assert mask < text.vocab_size


# ------------------------------------------------------------------------------------------ broken checkpoints


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def first_shard(directory):
    return min(directory.glob("*.safetensors"))


def remove_tensor(directory, name):
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(name, None) is not None:
            save_file(tensors, file, metadata={"format": "pt"})


def use_all(directory):
    """Everything that training and evaluation read of a target."""
    settings = settings_of(directory)
    checkpoint = open_target(settings)
    Target.load(checkpoint, settings, [1, 3], CPU, zero=None)
    checkpoint.embedding_and_head(torch.float32, CPU)


UP = "model.layers.2.mlp.up_proj.weight"
BROKEN = {
    "no_config": (lambda path: (path / "config.json").unlink(), "holds no config.json"),
    "config_cut": (lambda path: (path / "config.json").write_text('{"model_type"'), "not a valid JSON file"),
    "config_of_nothing": (lambda path: (path / "config.json").write_text("{}"), "Should have a `model_type` key"),
    "unknown_type": (lambda path: change_json(path / "config.json", model_type="unheard_of"), "unheard_of"),
    "wrong_type": (lambda path: change_json(path / "config.json", hidden_size="x"), "'hidden_size' expected int"),
    "other_size": (
        lambda path: change_json(path / "config.json", hidden_size=24),
        r"differ in \d+ tensors, first embed_tokens.weight: \(60, 16\) in the shard, \(60, 24\) by the config",
    ),
    "no_shards": (lambda path: [file.unlink() for file in path.glob("model*")], "holds no model.safetensors"),
    "shard_missing": (lambda path: first_shard(path).unlink(), r"shard .*00001-of.* cannot be read"),
    "shard_cut": (lambda path: os.truncate(first_shard(path), 3000), r"shard .*00001-of.* cannot be read"),
    "shard_empty": (lambda path: os.truncate(first_shard(path), 0), r"shard .*00001-of.* cannot be read"),
    "tensor_missing": (lambda path: remove_tensor(path, UP), r"lack 1 tensors .*first layers\.2\.mlp\.up_proj"),
    "head_missing": (lambda path: remove_tensor(path, "lm_head.weight"), r"lacks the tensor lm_head\.weight"),
    "index_cut": (lambda path: os.truncate(path / "model.safetensors.index.json", 100), "index.json is not JSON"),
    "index_empty": (
        lambda path: (path / "model.safetensors.index.json").write_text("{}"),
        "index.json has no weight_map",
    ),
    "tied_unsaid": (
        lambda path: change_json(
            path / "model.safetensors.index.json",
            weight_map={
                name: file
                for name, file in json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].items()
                if name != "lm_head.weight"
            },
        ),
        r"no tensor lm_head\.weight and its config does not say tie_word_embeddings",
    ),
}


@pytest.mark.parametrize(("breaks", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_checkpoint_is_named_in_one_line(saved, tmp_path, breaks, message):
    directory = small_targets.write(saved("qwen3")[0], tmp_path / "target", max_shard_size="20KB")
    breaks(directory)
    with pytest.raises(UserError, match=message) as caught:
        use_all(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_attention_kernel_is_refused(saved):
    with pytest.raises(UserError, match="fast_attention"):
        load(saved("qwen3")[1], [1], attn_implementation="fast_attention")


@pytest.mark.parametrize("path", ["/no/such/directory", "./nowhere", "one/two/three", "nowhere"])
def test_a_path_that_is_no_directory_is_said_not_to_exist(path):
    with pytest.raises(UserError, match=f"target.path {path} does not exist"):
        open_target(settings_of(path))


def test_a_name_that_the_hub_does_not_give_is_said_to_be_neither(monkeypatch):
    def refuse(*_, **__):
        raise target_module.LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(target_module, "snapshot_download", refuse)
    with pytest.raises(UserError, match=r"owner/name is neither a directory nor a model .*no connection\)\.$"):
        open_target(settings_of("owner/name"))
