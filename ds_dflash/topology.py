"""Which rank has which role, and the process groups that follow.

`split`: on every node the first T ranks hold the target and the last D train the drafter. Each node's target ranks are
one world of their own (ZeRO-3 gathers never leave a node), all drafter ranks of all nodes are another, and the *bridge*
is a group over all ranks. Roles are made disjoint default worlds before DeepSpeed initialises, because much of it works
on the default world without asking. `colocated`: every rank holds both, one world.

Plan ranks are numbered so that micro-batch t (t = round * R + plan rank, R = all target ranks) goes to drafter t mod D
(D = all drafter ranks) on the same node: plan rank and drafter index run over nodes first.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_dflash.accelerator import deepspeed
from ds_dflash.config import TopologySettings
from ds_dflash.errors import UserError


@dataclass(frozen=True)
class Roles:
    """The roles of all ranks of a job; `split` or colocated, T target and D drafter ranks on each node."""

    nodes: int
    ranks_per_node: int
    split: bool
    targets_per_node: int
    drafters_per_node: int

    @classmethod
    def assign(cls, settings: TopologySettings, world_size: int, ranks_per_node: int) -> "Roles":
        """Raises UserError when the ranks do not suffice for the mode."""
        if world_size % ranks_per_node:
            raise UserError(
                f"The job has {world_size} ranks and {ranks_per_node} on this node: give every node the same number of"
                " ranks (slots in the hostfile)."
            )
        nodes = world_size // ranks_per_node
        if settings.mode == "colocated" or (settings.mode == "auto" and world_size == 1):
            return cls(nodes, ranks_per_node, False, ranks_per_node, ranks_per_node)
        if settings.drafter_ranks >= ranks_per_node:
            raise UserError(
                f"topology.drafter_ranks is {settings.drafter_ranks}, but a node has {ranks_per_node} ranks and at"
                " least one must hold the target: lower it, start more ranks (deepspeed --num_accelerators N), or set"
                ' topology.mode to "colocated".'
            )
        return cls(nodes, ranks_per_node, True, ranks_per_node - settings.drafter_ranks, settings.drafter_ranks)

    @property
    def targets(self) -> int:
        """R: micro-batches of a round."""
        return self.nodes * self.targets_per_node

    @property
    def drafters(self) -> int:
        """D: micro-batch t belongs to drafter t mod D."""
        return self.nodes * self.drafters_per_node

    def target_rank(self, plan_rank: int) -> int:
        """The global rank that forwards the micro-batches of `plan_rank`."""
        return plan_rank % self.nodes * self.ranks_per_node + plan_rank // self.nodes

    def drafter_rank(self, drafter: int) -> int:
        """The global rank of a drafter index."""
        first = self.targets_per_node if self.split else 0
        return drafter % self.nodes * self.ranks_per_node + first + drafter // self.nodes


@dataclass(frozen=True)
class Topology:
    """This rank's place in the job.

    plan_rank: its index among target ranks, or None; drafter: its index among drafter ranks, or None.
    bridge: the gloo group over all ranks, carrier: what the features travel over, the same group or NCCL (not verified
    on GPUs); both None when colocated. store: the key-value store of the job, hosted by rank 0.
    """

    rank: int
    roles: Roles
    plan_rank: int | None
    drafter: int | None
    device: torch.device
    timeout: timedelta
    store: dist.Store
    bridge: dist.ProcessGroup | None
    carrier: dist.ProcessGroup | None

    @property
    def role(self) -> str:
        if not self.roles.split:
            return "both"
        return "drafter" if self.plan_rank is None else "target"

    @property
    def target_world_size(self) -> int:
        """Ranks that hold one copy of the target together."""
        return self.roles.targets_per_node if self.roles.split else self.roles.targets

    @classmethod
    def from_environment(cls, settings: TopologySettings) -> "Topology":
        """Read the launcher's environment, split the job into role worlds and join them by the bridge."""
        rank, world_size, ranks_per_node = launcher_ranks()
        roles = Roles.assign(settings, world_size, ranks_per_node)
        node, local = divmod(rank, ranks_per_node)
        is_target = not roles.split or local < roles.targets_per_node
        is_drafter = not roles.split or not is_target
        plan_rank = local * roles.nodes + node if is_target else None
        drafter = (local - (roles.targets_per_node if roles.split else 0)) * roles.nodes + node if is_drafter else None
        timeout = timedelta(seconds=settings.timeout_seconds)
        store = _open_store(rank, world_size, timeout)
        device = _device()
        if not roles.split:
            _init_world("both", rank, world_size, device, store, timeout)
        elif is_target:
            _init_world(f"target-{node}", local, roles.targets_per_node, device, store, timeout)
        else:
            assert drafter is not None
            _init_world("drafter", drafter, roles.drafters, device, store, timeout)
        bridge: dist.ProcessGroup | None = None
        carrier: dist.ProcessGroup | None = None
        if roles.split:
            bridge = carrier = _gloo(dist.PrefixStore("bridge", store), rank, world_size, timeout)
            if settings.transport == "nccl":
                carrier = _nccl(dist.PrefixStore("carrier", store), rank, world_size, timeout)
        return cls(rank, roles, plan_rank, drafter, device, timeout, store, bridge, carrier)


def ranks(count: int) -> str:
    """A number of ranks in words."""
    return f"{count} rank{'s' if count > 1 else ''}"


def launcher_ranks() -> tuple[int, int, int]:
    """(rank, world size, ranks per node) from the launcher's environment; (0, 1, 1) without a launcher."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    per_node = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size
    return int(os.environ.get("RANK", "0")), world_size, int(per_node)


def _open_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    if world_size == 1 and "MASTER_PORT" not in os.environ:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout)


def _device() -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _init_world(name: str, rank: int, size: int, device: torch.device, store: dist.Store, timeout: timedelta) -> None:
    """Make the role's ranks the default process group, then let DeepSpeed adopt it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=os.environ.get("LOCAL_RANK", "0"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    backend = "gloo"
    if device.type == "cuda":
        backend = "nccl"
    else:  # the shared-memory collectives would be compiled at the first start, for nothing that is needed here
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[return-value]


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Not verified on GPUs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[return-value]
