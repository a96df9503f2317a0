"""The serving checkpoint: names, shapes and fields that engines read, written whole and read again."""

import json
import os
from pathlib import Path

import pytest
import torch
from drafters import drafter_config, make_drafter, sliding
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3Config

from ds_dflash import export
from ds_dflash.config import DrafterSettings
from ds_dflash.drafter import DFlashDraftModel, make_config
from ds_dflash.errors import UserError
from ds_dflash.export import load_drafter, read_drafter, read_drafter_config, write_drafter, writing
from ds_dflash.target import default_layer_ids

TARGETS = Path(__file__).parent / "targets"


def contract(hidden, heads, kv_heads, head_dim, intermediate, layers, taps):
    """Name and shape of every tensor of a drafter."""
    tensors = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(layers):
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        tensors |= {f"layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return tensors


def settings(**fields):
    return DrafterSettings(**fields)


def published(name, **fields):
    """A drafter's config for a published target, with default taps."""
    target = AutoConfig.from_pretrained(TARGETS / name).get_text_config()
    drafter = settings(**fields)
    layer_ids = default_layer_ids(target.num_hidden_layers, drafter.num_hidden_layers)
    return make_config(drafter, target, layer_ids, mask_token_id=248_070)


def shapes_of(config):
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DFlashDraftModel(config).state_dict().items()}


RECIPE_27B = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
}


def test_the_drafter_of_the_27b_target_has_58_tensors_and_1730_million_parameters():
    config = published("qwen3.6-27b", **RECIPE_27B)
    shapes = shapes_of(config)
    assert shapes == contract(5120, 32, 8, 128, 17408, layers=5, taps=5)
    assert len(shapes) == 58
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert round(numbers / 1e9, 3) == 1.730
    fields = export.serving_config(config)
    assert fields["rope_theta"] == 1e7
    assert fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}  # plain, unlike the target's
    assert (fields["vocab_size"], fields["num_target_layers"], fields["eos_token_id"]) == (248_320, 64, 248_044)
    assert (fields["sliding_window"], fields["use_sliding_window"]) == (2048, True)
    assert fields["dflash_config"] == {"mask_token_id": 248_070, "target_layer_ids": [1, 16, 31, 46, 61]}


def test_the_drafter_of_the_8b_target_takes_its_shape_from_the_target():
    config = published("qwen3-8b")
    assert shapes_of(config) == contract(4096, 32, 8, 128, 12288, layers=5, taps=5)
    assert config.dflash_config["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert config.layer_types == ["full_attention"] * 5
    assert export.serving_config(config)["rope_theta"] == 1e6
    assert export.serving_config(config)["sliding_window"] is None


def test_heads_that_do_not_go_together_with_the_targets_are_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"30 query heads cannot share 8 key and value heads"):
        published("qwen3-8b", num_attention_heads=30)


def write(directory, config=None, seed=0):
    drafter = make_drafter(config, seed=seed)
    write_drafter(drafter.state_dict(), drafter.config, directory)
    return drafter


@pytest.mark.parametrize("fields", [{}, sliding(6, layers=3)], ids=["full", "sliding"])
def test_the_file_holds_the_contracts_tensors_in_bf16_and_nothing_else(tmp_path, fields):
    config = drafter_config(**fields)
    write(tmp_path / "drafter", config)
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    expected = contract(16, 4, 2, 8, 24, layers=config.num_hidden_layers, taps=2)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_config_has_every_field_that_engines_read(tmp_path):
    write(tmp_path / "drafter", drafter_config(**sliding(6), eos_token_id=2))
    fields = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert set(fields) == set(export.REQUIRED_FIELDS)
    assert "auto_map" not in fields
    assert fields["architectures"] == ["DFlashDraftModel"]
    assert (fields["model_type"], fields["dtype"], fields["hidden_act"]) == ("qwen3", "bfloat16", "silu")
    assert (fields["block_size"], fields["num_target_layers"], fields["tie_word_embeddings"]) == (4, 6, False)
    assert fields["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [1, 3]}
    assert fields["layer_types"] == ["sliding_attention", "full_attention"]
    assert (fields["sliding_window"], fields["use_sliding_window"], fields["eos_token_id"]) == (6, True, 2)


@pytest.mark.parametrize("form", ["both", "rope_theta", "rope_parameters"])
def test_either_form_of_the_rotary_base_is_read(tmp_path, form):
    directory = tmp_path / "drafter"
    write(directory, drafter_config(rope_parameters={"rope_type": "default", "rope_theta": 12_345.0}))
    fields = json.loads((directory / "config.json").read_text())
    assert (fields["rope_theta"], fields["rope_scaling"]) == (12_345.0, None)
    if form == "rope_theta":
        del fields["rope_parameters"]
    if form == "rope_parameters":
        del fields["rope_theta"], fields["rope_scaling"]
    (directory / "config.json").write_text(json.dumps(fields))
    config = read_drafter_config(directory)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 12_345.0}
    serving = AutoConfig.from_pretrained(directory)  # as an engine reads it
    assert isinstance(serving, Qwen3Config)
    assert serving.rope_parameters["rope_theta"] == 12_345.0


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_scaled_rotary_embedding_is_refused(tmp_path, name):
    write(tmp_path / "drafter")
    change_config(tmp_path / "drafter", **{"rope_parameters": None, name: {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(UserError, match='has rope_type "yarn"'):
        read_drafter_config(tmp_path / "drafter")


def change_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("fields", [{}, sliding(6, layers=3)], ids=["full", "sliding"])
def test_a_drafter_read_again_is_the_one_that_was_written(tmp_path, fields):
    drafter = write(tmp_path / "drafter", drafter_config(**fields))
    loaded = load_drafter(tmp_path / "drafter", torch.float32, torch.device("cpu"))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name].bfloat16().float())
    assert export.serving_config(loaded.config) == export.serving_config(drafter.config)
    write_drafter(loaded.state_dict(), loaded.config, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "drafter" / name).read_bytes()


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


CHANGES = {
    "missing": (lambda tensors: without(tensors, "fc.weight"), r"fc\.weight is missing"),
    "extra": (lambda tensors: tensors | {"lm_head.weight": torch.zeros(50, 16)}, r"lm_head\.weight is \(50, 16\)"),
    "prefix": (lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()}, r"tensor fc\.weight"),
    "shape": (
        lambda tensors: tensors | {"layers.1.mlp.up_proj.weight": torch.zeros(16, 24)},
        r"layers\.1\.mlp\.up_proj\.weight is \(16, 24\), but its config\.json asks for \(24, 16\)",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_tensor_that_breaks_the_contract_is_named_at_writing_and_at_reading(tmp_path, change, message):
    drafter = make_drafter()
    with pytest.raises(UserError, match=message):
        write_drafter(change(drafter.state_dict()), drafter.config, tmp_path / "never")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "drafter")
    save_file(change(load_file(tmp_path / "drafter" / "model.safetensors")), tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(UserError, match=message):
        read_drafter(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "holds no config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda path: (path / "config.json").write_text("{"), "is not JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "is not a JSON object"),
        (
            lambda path: (path / "config.json").write_text('{"hidden_size": 3}'),
            "lacks intermediate_size, num_hidden_layers",
        ),
        (lambda path: change_config(path, dflash_config={"mask_token_id": 3}), "lacks dflash_config.target_layer_ids"),
        (lambda path: change_config(path, head_dim="wide"), "head_dim"),
        (lambda path: change_config(path, layer_types=["full_attention"]), "layer_types"),
        (lambda path: change_config(path, layer_types=["sliding_attention"] * 2), "sliding_window is None"),
        (lambda path: os.truncate(path / "model.safetensors", 500), "cannot be read"),
    ],
)
def test_a_directory_that_is_no_drafter_is_refused_in_a_sentence(tmp_path, change, message):
    write(tmp_path / "drafter")
    change(tmp_path / "drafter")
    with pytest.raises(UserError, match=message) as caught:
        read_drafter(tmp_path / "drafter")
    assert str(tmp_path / "drafter") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_that_comes_with_a_drafter_is_never_run(tmp_path):
    directory = tmp_path / "drafter"
    write(directory)
    change_config(directory, auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"})
    (directory / "code.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')\n")
    drafter = load_drafter(directory, torch.float32, torch.device("cpu"))
    assert not (tmp_path / "it_ran").exists()
    assert not hasattr(drafter.config, "auto_map")


@pytest.mark.parametrize("moment", ["save_file", "serving_config", "_check_written"])
def test_a_write_that_is_cut_short_leaves_the_old_drafter(tmp_path, monkeypatch, moment):
    def stop(*_, **__):
        raise KeyboardInterrupt

    directory = tmp_path / "drafter"
    write(directory, seed=0)
    old = (directory / "model.safetensors").read_bytes()
    monkeypatch.setattr(writing, moment, stop)
    with pytest.raises(KeyboardInterrupt):
        write(directory, seed=1)
    assert (directory / "model.safetensors").read_bytes() == old
    monkeypatch.undo()
    write(directory, seed=1)
    assert (directory / "model.safetensors").read_bytes() != old
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_weights_that_share_a_buffer_are_written_one_by_one(tmp_path):
    """An engine keeps all parameters as views of one flat buffer."""
    drafter = make_drafter()
    tensors = drafter.state_dict()
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()]).bfloat16()
    views = dict(zip(tensors, flat.split([tensor.numel() for tensor in tensors.values()]), strict=True))
    views = {name: view.view(tensors[name].shape) for name, view in views.items()}
    write_drafter(views, drafter.config, tmp_path / "drafter")
    for name, tensor in read_drafter(tmp_path / "drafter")[1].items():
        assert torch.equal(tensor, views[name])
