"""One training spread over ranks in different ways, each with the same micro-batches in every update.

For tests/test_topologies.py and benchmarks/topologies.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import distributed
import tiny
import torch
from traces import samples_by_epoch

from ds_dflash.checkpoint import Progress
from ds_dflash.config import load_settings
from ds_dflash.job import Job
from ds_dflash.topology import Roles

MICRO_BATCHES = 6
ROWS, EPOCHS = 9, 15


@dataclass(frozen=True)
class Spread:
    """How a training is spread over ranks: `rounds` times its target ranks are MICRO_BATCHES."""

    name: str
    ranks: int
    rounds: int
    settings: tuple[str, ...] = ()
    ranks_per_node: int | None = None

    @property
    def arguments(self) -> list[str]:
        options = (f"gradient_accumulation_steps={self.rounds}", *self.settings)
        return [part for option in options for part in ("--set", option)]


SPREADS = (
    Spread("colocated", 1, 6),
    Spread("colocated on 2", 2, 3, ("topology.mode=colocated",)),
    Spread("1 + 1", 2, 6),
    Spread("2 + 1", 3, 3),
    Spread("3 + 1", 4, 2),
    Spread("3 + 2", 5, 2, ("topology.drafter_ranks=2",)),
    Spread("2 nodes of 1 + 1", 4, 3, ranks_per_node=2),
)


@dataclass(frozen=True)
class Outcome:
    """Lines of metrics.jsonl, the final weights, the ids of the samples of every epoch."""

    lines: list[dict]
    weights: dict[str, torch.Tensor]
    samples: dict[int, list[int]]

    def figures(self, name: str) -> torch.Tensor:
        """float64 [updates]"""
        return torch.tensor([line[name] for line in self.lines], dtype=torch.float64)


def write_inputs(directory: Path) -> Path:
    """A target and chats."""
    tiny.write_target(directory / "target")
    tiny.write_chats(directory / "train.jsonl", ROWS)
    return directory


def train(spread: Spread, inputs: Path, directory: Path) -> Outcome:
    """A whole run of `spread`, fp32 on the CPU."""
    config = write_config(inputs, directory)
    distributed.run(
        spread.ranks, config, *spread.arguments, ranks_per_node=spread.ranks_per_node, traced=True, timeout=300
    )
    run = directory / "runs" / "run"
    return Outcome(distributed.metrics(run), last_weights(run), samples_by_epoch(directory))


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of a run's last checkpoint: those of its drafter/ are rounded to bf16."""
    *_, last = sorted((run / "checkpoints").glob("step-*"))
    return torch.load(last / "engine" / "mp_rank_00_model_states.pt", weights_only=False)["module"]


def write_config(inputs: Path, directory: Path) -> Path:
    """ds_config.json in a directory of the run's own; the prepared data are shared.

    The budget is such that the chats of some epochs make one update of micro-batches of one or two chats, and those of
    others two updates of one chat a micro-batch, three of them empty.
    """
    content = tiny.settings(
        inputs / "target",
        inputs / "train.jsonl",
        directory / "runs",
        data={"cache_dir": str(inputs / "cache")},
        batching={"token_budget": 132, "grouping": "shuffled"},
        training={"num_epochs": EPOCHS, "save_every": 0},
    )
    config = directory / "config.json"
    config.write_text(json.dumps(content))
    return config


def micro_batch_sizes(inputs: Path, directory: Path) -> list[list[int]]:
    """Samples of every micro-batch of every update."""
    arguments = [f"gradient_accumulation_steps={MICRO_BATCHES}"]
    settings = load_settings(write_config(inputs, directory), arguments)
    job = Job.open(settings, Roles.assign(settings.topology, world_size=1, ranks_per_node=1))
    return [[len(samples) for _, samples in update.micro_batches()] for update in job.walk(Progress())]


def relative_difference(values: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference of two vectors of numbers, each as a share of the reference's number."""
    return float(((values - reference) / reference).abs().max())


def weight_difference(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of tensors, each as a share of the largest magnitude in its tensor."""
    assert weights.keys() == reference.keys()
    return max(float((weights[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in reference.items())
