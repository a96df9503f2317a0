"""The drafter's DeepSpeed engine: ZeRO-1 over the drafter ranks, fp32 masters and gradient sums, our own learning rate.

Any number of backwards, at least one on every rank, then one step: the engine's own counting of micro-batches is
switched off. Gradients are averaged over the drafter ranks, so a loss that is a part of a sum over all of them is
scaled by their number.
"""

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfigError
from torch import Tensor

from ds_dflash.accelerator import deepspeed
from ds_dflash.drafter import DFlashDraftModel
from ds_dflash.errors import UserError


def engine_config(deepspeed_keys: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The user's DeepSpeed keys with what an engine over uneven micro-batches needs."""
    config = copy.deepcopy(deepspeed_keys)
    config.pop("wandb", None)  # DeepSpeed would start a run of its own; ours is in metrics.py
    config["train_micro_batch_size_per_gpu"] = 1  # asked for, never compared with a tensor
    config["managed_gradient_accumulation"] = False
    config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
    config.setdefault("steps_per_print", 10**9)
    optimizer = config["optimizer"]
    if device.type == "cpu" and optimizer["type"] in ("Adam", "AdamW"):
        optimizer["params"].setdefault("torch_adam", True)  # DeepSpeed's would be compiled first
    return config


class DrafterEngine:
    """A drafter under a DeepSpeed engine over the default process group."""

    def __init__(self, drafter: DFlashDraftModel, deepspeed_keys: dict[str, Any], device: torch.device) -> None:
        config = engine_config(deepspeed_keys, device)
        self.base_learning_rate = float(config["optimizer"]["params"]["lr"])
        drafter.to(device)
        try:
            self.engine = deepspeed.initialize(model=drafter, model_parameters=drafter.parameters(), config=config)[0]
        except (ImportError, TypeError, ValueError, IndexError, AssertionError, DeepSpeedConfigError) as error:
            reason = str(error).strip().splitlines() or [""]
            raise UserError(
                f"DeepSpeed cannot make an engine of the top-level settings: {type(error).__name__}: {reason[0]}"
            ) from None
        self._backwards = 0

    @property
    def drafter(self) -> DFlashDraftModel:
        return self.engine.module

    @property
    def dtype(self) -> torch.dtype:
        return self.drafter.norm.weight.dtype

    def __call__(self, *inputs: Any) -> Tensor:
        return self.engine(*inputs)

    def backward(self, loss_sum: Tensor, loss_weight: float) -> None:
        """Add the gradient of this rank's part `loss_sum` of an update whose weight is `loss_weight` over all ranks."""
        self.engine.backward(loss_sum * (dist.get_world_size() / loss_weight), scale_wrt_gas=False)
        self._backwards += 1

    def step(self, learning_rate: float) -> float:
        """One optimizer update over all ranks; returns the norm of the gradient before clipping.

        Where that is not finite, nothing has changed (on all ranks alike).
        """
        if not self._backwards:  # a rank without any weight in this update: the engine wants a backward of everyone
            nothing = sum((parameter.sum() for parameter in self.drafter.parameters()), torch.zeros(()))
            self.engine.backward(nothing * 0.0, scale_wrt_gas=False)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        self._backwards = 0
        return math.nan if self.engine.optimizer.overflow else float(self.engine.get_global_grad_norm() or 0.0)

    def forget_gradients(self) -> None:
        """Drop what backwards have added since the last step."""
        self.engine.optimizer.zero_grad()
        self._backwards = 0
