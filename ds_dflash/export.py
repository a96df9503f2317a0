"""The serving checkpoint: what vLLM (method `dflash`) and SGLang (algorithm DFLASH) read and training can start from.

A directory with `model.safetensors` (bf16) and `config.json`. Engines pass over wrong names in silence or add prefixes
of their own, so names, shapes and fields are checked here, when it is written and when it is read.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from ds_dflash.drafter import DFlashDraftModel
from ds_dflash.errors import UserError

REQUIRED_FIELDS = [
    "architectures",
    "model_type",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "tie_word_embeddings",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
]


def write_drafter(weights: Mapping[str, Tensor], config: Qwen3Config, directory: Path) -> None:
    """Write a serving checkpoint; a directory that is there already is replaced once the new one is whole.

    weights: the drafter's state dict, of any float dtype. Raises UserError where they are not those of `config`.
    """
    _check_contract({name: tuple(tensor.shape) for name, tensor in weights.items()}, config, directory)
    fresh = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(stored, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "config.json").write_text(json.dumps(serving_config(config), indent=2) + "\n")
    read_drafter(fresh)
    old = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.rename(directory, old)
    os.rename(fresh, directory)
    shutil.rmtree(old, ignore_errors=True)


def serving_config(config: Qwen3Config) -> dict[str, Any]:
    """The fields of `config.json`, with the rotary base in both forms that engines read."""
    theta = (config.rope_parameters or {})["rope_theta"]
    fixed = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    return {name: fixed[name] if name in fixed else getattr(config, name) for name in REQUIRED_FIELDS}


def read_drafter(directory: Path) -> tuple[Qwen3Config, dict[str, Tensor]]:
    """Configuration and weights of a serving checkpoint, checked against the contract.

    Code that an `auto_map` names is never run. Raises UserError naming what is off.
    """
    config = read_drafter_config(directory)
    file = directory / "model.safetensors"
    if not file.is_file():
        raise UserError(f"{directory} holds no model.safetensors: it is not a drafter in the serving format.")
    try:
        weights = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}).") from None
    _check_contract({name: tuple(tensor.shape) for name, tensor in weights.items()}, config, directory)
    return config, weights


def read_drafter_config(directory: Path) -> Qwen3Config:
    """The drafter's configuration from `config.json`, with its rotary base in either form."""
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(f"{directory} holds no config.json: it is not a drafter in the serving format.")
    try:
        fields = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}).") from None
    missing = _missing_fields(fields)
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}: it is not the config of a DFlash drafter.")
    kept = {name: value for name, value in fields.items() if name not in REPLACED_FIELDS}
    try:
        config = Qwen3Config(**kept, rope_parameters=_plain_rope(fields, file))
    except StrictDataclassError as error:
        raise UserError(f"{file} cannot be used: {str(error).splitlines()[-1].strip()}.") from None
    if "sliding_attention" in (config.layer_types or []) and config.sliding_window is None:
        raise UserError(f"{file} has sliding_attention layers, but no sliding_window with use_sliding_window true.")
    return config


REPLACED_FIELDS = ("auto_map", "rope_theta", "rope_scaling", "rope_parameters", "model_type", "dtype")


def _missing_fields(fields: Any) -> list[str]:
    if not isinstance(fields, dict):
        return ["a JSON object"]
    missing = [name for name in ("block_size", "num_hidden_layers", "hidden_size") if name not in fields]
    taps = fields.get("dflash_config") or {}
    return missing + [f"dflash_config.{name}" for name in ("mask_token_id", "target_layer_ids") if name not in taps]


def _plain_rope(fields: dict[str, Any], file: Path) -> dict[str, Any]:
    """`rope_parameters` from either form; raises UserError for a rotary embedding that is scaled."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f'{file} has rope_type "{kind}": a drafter has the plain rotary embedding, "default".')
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta", fields.get("rope_theta", 10_000.0))}


def load_drafter(directory: Path, dtype: torch.dtype, device: torch.device) -> DFlashDraftModel:
    """A drafter ready to decode, or to continue training from."""
    config, weights = read_drafter(directory)
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict(weights)
    return drafter.to(device, dtype)


def _check_contract(shapes: Mapping[str, tuple[int, ...]], config: Qwen3Config, directory: Path) -> None:
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in DFlashDraftModel(config).state_dict().items()}
    for name in sorted({*expected, *shapes}):
        if shapes.get(name) != expected.get(name):
            found = shapes.get(name, "missing")
            raise UserError(
                f"{directory}: the tensor {name} is {found}, but its config.json asks for {expected.get(name, 'none')}."
            )
