"""Writing a serving checkpoint, whole or not at all, and reading it back before it is put in its place."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from ds_dflash.errors import UserError
from ds_dflash.export.fields import REQUIRED_FIELDS, Fields, check_fields
from ds_dflash.export.findings import refuse
from ds_dflash.export.reading import compare_shapes, open_drafter, shapes_of
from ds_dflash.export.speculators import to_speculators
from ds_dflash.target import TargetCheckpoint


def write_drafter(
    weights: Mapping[str, Tensor],
    config: Qwen3Config,
    directory: Path,
    target: TargetCheckpoint | None = None,
    target_name: str | None = None,
) -> None:
    """Write a serving checkpoint; a directory that is there already is replaced once the new one is whole.

    weights: the drafter's state dict, of any float dtype. target, target_name: write the format `speculators`, with
    `target_name` for engines to load the target by. Raises UserError where the weights are not those of `config`, or
    what was written does not hold the contract or is not read back as it was.
    """
    refuse(
        compare_shapes(shapes_of(config), {name: tuple(tensor.shape) for name, tensor in weights.items()}), directory
    )
    fields = serving_config(config)
    refuse([finding for finding in check_fields(fields) if finding.breaks_contract], directory)
    if target is not None:
        assert target_name is not None
        fields = to_speculators(fields, target_name, target.config.architectures or [])
    fresh = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(stored, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    _check_written(fresh, stored, config)
    old = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.rename(directory, old)
    os.rename(fresh, directory)
    shutil.rmtree(old, ignore_errors=True)


def serving_config(config: Qwen3Config) -> Fields:
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


def _check_written(fresh: Path, stored: Mapping[str, Tensor], config: Qwen3Config) -> None:
    """Hold a directory against the contract and against what was meant; not a number is a number like others here."""
    opened = open_drafter(fresh)
    refuse([finding for finding in opened.findings if finding.breaks_contract], fresh)
    for name, tensor in opened.tensors.read():
        if not torch.equal(tensor.view(torch.int16), stored[name].view(torch.int16)):
            raise UserError(f"{fresh}: the tensor {name} is not read back as it was written: check the disk.")
    assert opened.config is not None
    assert serving_config(opened.config) == serving_config(config)
