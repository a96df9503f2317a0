"""A rank of worlds of 1, 2 and 3 drafter ranks that save and load each other's checkpoints, for test_resharding.py.

    python resharding_ranks.py DIRECTORY RANK     of three ranks

Rank 0 keeps what it has seen in DIRECTORY/seen.pt: {(precision, saved by): state}, {(precision, saved by, loaded by):
state as loaded, and after another update}.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import conftest  # noqa: F401  the environment of a test
import learning
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from drafters import drafter_config, make_drafter

from ds_dflash.accelerator import deepspeed
from ds_dflash.checkpoint import Progress, load_checkpoint, save_checkpoint
from ds_dflash.engine import DrafterEngine

RANKS = (1, 2, 3)
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def updates_before(precision: str, ranks: int) -> int:
    """Once past 256, where a counter in bf16 would stay."""
    return 260 if (precision, ranks) == ("bf16", 2) else 3


@contextmanager
def world(directory: Path, name: str, rank: int, ranks: int) -> Iterator[None]:
    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled first
    store = f"file://{directory}/{name}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._WORLD_GROUP = None


def engine_of(precision: str, seed: int) -> DrafterEngine:
    """Of a drafter whose elements cannot be shared out evenly, neither among 2 ranks nor among 3."""
    config = drafter_config(num_hidden_layers=1, hidden_size=18, intermediate_size=25)
    return learning.engine_of(make_drafter(config, seed=seed), 1e-3, **PRECISIONS[precision])


def update(engine: DrafterEngine, number: int) -> None:
    """A gradient of its own for every element and every update; all of it from rank 0, so that it is exact in bf16."""
    noise = torch.Generator().manual_seed(number)
    gradients = [torch.randint(-3, 4, p.shape, generator=noise) for p in engine.drafter.parameters()]
    parts = [(p.float() * gradient).sum() for p, gradient in zip(engine.drafter.parameters(), gradients, strict=True)]
    engine.backward(sum(parts) * float(dist.get_rank() == 0), 1.0)
    engine.step(1e-3)


def state_of(engine: DrafterEngine) -> dict[str, torch.Tensor]:
    """All ranks' shares end to end, without their filling, and the step counter."""
    optimizer = engine.engine.optimizer.optimizer
    (share,) = optimizer.param_groups[0]["params"]
    flat = {"masters": share.detach(), **optimizer.state[share]}
    step = flat.pop("step")
    elements = sum(parameter.numel() for parameter in engine.drafter.parameters())
    assert elements % 4
    assert elements % 6
    whole = {}
    for name, tensor in sorted(flat.items()):
        shares = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, tensor)
        whole[name] = torch.cat(shares)[:elements]
        assert not torch.cat(shares)[elements:].any()
    weights = torch.cat([parameter.detach().flatten() for parameter in engine.drafter.parameters()])
    return whole | {"step": torch.as_tensor(step), "weights": weights}


def state_by_name(engine: DrafterEngine) -> dict[str, torch.Tensor]:
    """As DeepSpeed itself finds masters and moments of every parameter."""
    parameters = list(engine.drafter.parameters())
    by_name = {"masters": [safe_get_full_fp32_param(parameter) for parameter in parameters]}
    for name in ("exp_avg", "exp_avg_sq"):
        by_name[name] = [safe_get_full_optimizer_state(parameter, name) for parameter in parameters]
    return {name: torch.cat([tensor.flatten() for tensor in tensors]) for name, tensors in by_name.items()}


def save(directory: Path, precision: str) -> dict[str, torch.Tensor]:
    engine = engine_of(precision, seed=0)
    updates = updates_before(precision, dist.get_world_size())
    for number in range(updates):
        update(engine, number)
    progress = Progress(update=updates, position={"epoch": 0})
    save_checkpoint(engine.engine, directory, progress, keep=1)
    return state_of(engine) | {f"by name: {name}": tensor for name, tensor in state_by_name(engine).items()}


def load(directory: Path, precision: str) -> dict[str, dict[str, torch.Tensor]]:
    engine = engine_of(precision, seed=1)
    (checkpoint,) = directory.iterdir()
    load_checkpoint(engine.engine, checkpoint)
    loaded = {name: tensor.clone() for name, tensor in state_of(engine).items()}
    update(engine, number=1000)
    return {"loaded": loaded, "updated": state_of(engine)}


def main(directory: Path, rank: int) -> None:
    seen = {}
    for precision in PRECISIONS:
        for saved_by in RANKS:
            if rank < saved_by:
                with world(directory, f"{precision}-{saved_by}", rank, saved_by):
                    seen[precision, saved_by] = save(directory / f"{precision}-{saved_by}", precision)
    for precision in PRECISIONS:
        for loaded_by in RANKS:
            for saved_by in RANKS:
                if rank < loaded_by:
                    with world(directory, f"{precision}-{saved_by}-{loaded_by}", rank, loaded_by):
                        seen[precision, saved_by, loaded_by] = load(directory / f"{precision}-{saved_by}", precision)
    if rank == 0:
        torch.save(seen, directory / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
