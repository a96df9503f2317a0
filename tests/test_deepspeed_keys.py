"""The names in deepspeed_keys.py against those of the DeepSpeed that is installed."""

import inspect

import torch
from deepspeed.monitor.config import WandbConfig
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS as INSTALLED_OPTIMIZERS
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_dflash.deepspeed_keys import (
    ADAM_PARAMS,
    DEEPSPEED_KEYS,
    DEEPSPEED_OPTIMIZERS,
    REFUSED_KEYS,
    TORCH_OPTIMIZERS,
    Bf16Block,
    WandbBlock,
    ZeroBlock,
)


class AskedKeys(dict):
    """A DeepSpeed configuration that notes which top-level keys DeepSpeed looks for."""

    def __init__(self, **keys: object) -> None:
        super().__init__(**keys)
        self.asked: set[str] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


def test_the_keys_are_those_that_the_installed_deepspeed_looks_for() -> None:
    asked = AskedKeys(train_micro_batch_size_per_gpu=1)
    DeepSpeedConfig(asked)
    assert asked.asked == DEEPSPEED_KEYS | REFUSED_KEYS.keys()
    removed = {key for key, reason in REFUSED_KEYS.items() if reason == "DeepSpeed has removed it"}
    assert removed <= _REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= REFUSED_KEYS.keys()


def test_the_blocks_have_the_names_of_the_installed_deepspeed() -> None:
    assert WandbBlock.model_fields.keys() == WandbConfig.model_fields.keys()
    assert Bf16Block.model_fields.keys() == DeepSpeedBF16Config.model_fields.keys()
    current = {
        field.alias or name
        for name, field in DeepSpeedZeroConfig.model_fields.items()
        if not (field.json_schema_extra or {}).get("deprecated")
    }
    assert ZeroBlock.model_fields.keys() == current


def test_the_optimizers_are_those_of_the_installed_deepspeed_and_torch() -> None:
    known = {name.lower() for name in DEEPSPEED_OPTIMIZERS} | {"lamb"}
    assert known == set(INSTALLED_OPTIMIZERS)
    assert all(hasattr(torch.optim, name) for name in TORCH_OPTIMIZERS)


def test_the_parameters_of_adam_are_those_of_deepspeed_and_torch() -> None:
    fused, torch_adam = (inspect.signature(optimizer).parameters for optimizer in (FusedAdam, torch.optim.AdamW))
    read_by_the_engine = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    of_no_use_here = {"params", "capturable", "differentiable"}
    assert {*fused, *torch_adam, *read_by_the_engine} - of_no_use_here == ADAM_PARAMS
