"""A rank of a ZeRO-3 world that holds targets and drafters at once, for test_target_kinds.py and test_reports.py.

    python zero3_ranks.py DIRECTORY     in a launcher's environment

DIRECTORY holds a checkpoint of every kind of target; captured-RANK.pt beside them is {kind: {what: result}}.
"""

import sys
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  the environment of a test
import learning
import small_targets
import torch

from ds_dflash.sections import TopologySettings
from ds_dflash.target import Target, decoder_layers, open_target
from ds_dflash.topology import Topology

LAYER_IDS = [1, 3]
ROWS = learning.random_rows(3, 17, 1, 9)
MICRO_BATCHES = [[ROWS, ROWS[1:2]], [learning.random_rows(12, 5, seed=2), []]]
"""Of each rank, as many as of the other: rank 0 captures a row in a padded batch and alone, rank 1 has none left."""

BUILD_DRAFTER = ["qwen3", "llama_tied", "hybrid"]

PERSISTENCE = 0  # else tensors as small as these are whole on every rank
ZERO = {"stage3_param_persistence_threshold": PERSISTENCE}


def results(directory: Path, topology: Topology) -> dict[str, Any]:
    settings = learning.target_settings(directory, sharding="zero3")
    checkpoint = open_target(settings)
    target = Target.load(checkpoint, settings, LAYER_IDS, topology.device, ZERO)
    engine = target._model
    parameters = dict(engine.module.named_parameters())
    layers = [sum(weight.ds_numel for weight in layer.parameters()) for layer in decoder_layers(engine.module)]
    micro_batches = MICRO_BATCHES[topology.rank]
    captured = [target.capture(rows) for rows in micro_batches]
    return {
        "captured": captured,
        "again": [target.capture(rows) for rows in micro_batches],
        "names": list(parameters),
        "held": sum(parameter.ds_tensor.numel() for parameter in parameters.values()),
        "whole": sum(parameter.ds_numel for parameter in parameters.values()),
        "largest layer": max(layers),
        "gathered ahead": engine.zero_prefetch_bucket_size(),
        "kept for reuse": engine.zero_max_reuse_distance(),
        "never cut": engine.zero_param_persistence_threshold(),
    }


def build_drafter(directory: Path, rows: list, features: torch.Tensor) -> dict[str, Any]:
    """What a drafter is made of in the process of the target, and its weights before and after an update."""
    checkpoint = open_target(learning.target_settings(directory))
    config = learning.config_for(checkpoint, LAYER_IDS)
    step, drafter = learning.step_for(checkpoint, config), learning.new_drafter(config)
    first = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    engine = learning.engine_of(drafter, rate=1e-3)
    learning.update_engine(engine, step, learning.Samples(rows), features, epoch=0)
    weights = {name: tensor.clone() for name, tensor in engine.drafter.state_dict().items()}
    return {"embedding": step.embedding, "head": step.head, "first": first, "weights": weights}


def main(directory: Path) -> None:
    topology = Topology.from_environment(TopologySettings(mode="colocated", timeout_seconds=60))
    captured = {kind: results(directory / kind, topology) for kind in small_targets.KINDS}
    for kind in BUILD_DRAFTER:
        features = captured[kind]["captured"][0]
        captured[kind] |= build_drafter(directory / kind, MICRO_BATCHES[topology.rank][0], features)
    torch.save(captured, directory / f"captured-{topology.rank}.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
