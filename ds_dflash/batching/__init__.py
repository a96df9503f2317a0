"""Batching: lengths in, epoch plans out. numpy only; nothing here opens a sample."""

from ds_dflash.batching.plan import EpochPlan
from ds_dflash.batching.position import Position
from ds_dflash.batching.sampler import BatchSampler
from ds_dflash.batching.settings import CLASSIC_EDGES, GROUPINGS, ORDERINGS, OVERSIZE, PlanSettings, check_fingerprint

__all__ = [
    "CLASSIC_EDGES",
    "GROUPINGS",
    "ORDERINGS",
    "OVERSIZE",
    "BatchSampler",
    "EpochPlan",
    "PlanSettings",
    "Position",
    "check_fingerprint",
]
