"""DeepSpeed, imported once with its accelerator named: on a machine without GPUs it would search, and warn."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

__all__ = ["deepspeed"]
