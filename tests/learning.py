"""Drafters that learn within a test, by the product's own path: features that a target captures, anchors drawn anew in
each epoch, slices, losses, and then torch's optimizer or the DeepSpeed engine.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config
from world import world_of_one

from ds_dflash.accelerator import deepspeed
from ds_dflash.drafter import DFlashDraftModel, make_config
from ds_dflash.engine import DrafterEngine
from ds_dflash.loss import Objective, resolve_gamma
from ds_dflash.sections import DrafterSettings, TargetSettings, TrainingSettings
from ds_dflash.step import DrafterStep
from ds_dflash.target import TargetCheckpoint

CPU = torch.device("cpu")
MASK_TOKEN_ID = 3


@dataclass
class Samples:
    """A prepared dataset in memory: every token supervised unless there are masks."""

    ids: list[np.ndarray]
    masks: list[np.ndarray] | None = None

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.ids], np.int32)

    def rows(self, indices: Sequence[int] | np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        masks = self.masks or [np.ones(len(ids), bool) for ids in self.ids]
        return [(self.ids[index], masks[index]) for index in indices]


def random_rows(*lengths: int, seed: int = 0, vocabulary: int = 60) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, length) for length in lengths]


def target_settings(directory: Path, **fields) -> TargetSettings:
    return TargetSettings(**({"path": str(directory), "dtype": "float32", "sharding": "none"} | fields))


def config_for(checkpoint: TargetCheckpoint, layer_ids: Sequence[int], **fields) -> Qwen3Config:
    """The config that a run with these settings of `drafter` would have; two layers, blocks of 4."""
    settings = DrafterSettings(**({"num_hidden_layers": 2, "block_size": 4} | fields))
    return make_config(settings, checkpoint.text, layer_ids, MASK_TOKEN_ID)


def new_drafter(config: Qwen3Config, seed: int = 0) -> DFlashDraftModel:
    drafter = DFlashDraftModel(config)
    drafter.initialize(seed)
    return drafter


def step_for(checkpoint: TargetCheckpoint, config: Qwen3Config, dtype=torch.float32, **training) -> DrafterStep:
    embedding, head = checkpoint.embedding_and_head(dtype, CPU)
    objective = Objective("dflash", config.block_size, resolve_gamma(None, config.block_size))
    settings = TrainingSettings(**({"num_anchors": 8, "slice_tokens": 64} | training))
    return DrafterStep(embedding, head, MASK_TOKEN_ID, objective, settings)


@torch.enable_grad()
def learn(
    drafter: DFlashDraftModel, step: DrafterStep, data: Samples, features: Tensor, *, updates: int, rate: float = 3e-3
) -> None:
    """So many updates of Adam on all of `data`, whose packed features are given."""
    optimizer = torch.optim.Adam(drafter.parameters(), rate)
    for epoch in range(updates):
        blocks = step.blocks(data, np.arange(len(data.ids)), epoch)
        weight = step.objective.weight(blocks.supervised, blocks.block_offsets)
        for _, result in step.results(drafter, features, blocks):
            (result.loss_sum / weight).backward()
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------ under DeepSpeed


@contextmanager
def engine_world() -> Iterator[None]:
    """A world of one rank for an engine; DeepSpeed forgets it at the end, so that another can follow."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled first
    with mock.patch.dict(os.environ, LOCAL_RANK="0"), world_of_one():
        try:
            yield
        finally:
            deepspeed.comm.comm.cdb = None
            deepspeed.utils.groups._WORLD_GROUP = None


def engine_of(drafter: DFlashDraftModel, rate: float, **keys) -> DrafterEngine:
    """DeepSpeed clips gradients at a norm of 1 where nothing is said."""
    optimizer = {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.0}}
    defaults = {"optimizer": optimizer, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    return DrafterEngine(drafter, defaults | keys, CPU)


def update_engine(engine: DrafterEngine, step: DrafterStep, data: Samples, features: Tensor, epoch: int) -> None:
    """One update on all of `data` on this rank."""
    blocks = step.blocks(data, np.arange(len(data.ids)), epoch)
    weight = step.objective.weight(blocks.supervised, blocks.block_offsets)
    for _, result in step.results(engine, features, blocks):
        engine.backward(result.loss_sum, weight)
    engine.step(engine.base_learning_rate)
