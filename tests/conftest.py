"""Nothing in a test may reach a network or W&B, or draw progress bars; ranks start as forks."""

import os

import ds_dflash  # noqa: F401  before torch, whose threads it keeps from spinning

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", "cpu"))

import distributed
import transformers

distributed.forked = True
transformers.utils.logging.disable_progress_bar()
