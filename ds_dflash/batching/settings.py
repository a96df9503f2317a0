"""The settings of a batch plan, and what a resume may not change in them."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_dflash.errors import UserError

GROUPINGS = ("pooled", "bucketed", "shuffled", "sorted")
ORDERINGS = ("stratified", "shuffled")
OVERSIZE = ("truncate", "drop", "error")
CLASSIC_EDGES = (0, 770, 1216, 1728, 2432, 3296, 8192)


@dataclass(frozen=True)
class PlanSettings:
    """How samples become micro-batches; raises UserError for a value that cannot hold.

    token_budget: padded tokens of one micro-batch at most (samples * longest).
    max_batch_size: samples of one micro-batch at most; None for no cap.
    grouping, ordering: which samples share a micro-batch; where each micro-batch goes.
    num_buckets, bucket_edges: for `bucketed`: so many buckets with edges optimised for the data, or given
        ascending edges in tokens (a sample as long as an edge belongs to the bucket above it).
    quadratic_share: q in the cost of a micro-batch, samples * longest * (1 + q * longest), per token.
    oversize: what becomes of samples longer than the budget.
    """

    token_budget: int = 49_152
    max_batch_size: int | None = None
    grouping: str = "pooled"
    ordering: str = "stratified"
    num_buckets: int = 6
    bucket_edges: tuple[int, ...] | None = None
    quadratic_share: float = 3.6e-6
    seed: int = 0
    oversize: str = "truncate"

    def __post_init__(self) -> None:
        for name, allowed in (("grouping", GROUPINGS), ("ordering", ORDERINGS), ("oversize", OVERSIZE)):
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        cap = 1 if self.max_batch_size is None else self.max_batch_size
        for name, number in (("token_budget", self.token_budget), ("max_batch_size", cap)):
            if number < 1:
                raise UserError(f"{name} is {number}; it must be at least 1")
        if self.num_buckets < 1:
            raise UserError(f"num_buckets is {self.num_buckets}; it must be at least 1")
        if self.quadratic_share < 0:
            raise UserError(f"quadratic_share is {self.quadratic_share}; it must not be negative")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; it must not be negative")
        if self.bucket_edges is not None:
            object.__setattr__(self, "bucket_edges", _checked_edges(self.bucket_edges))


def _checked_edges(edges: tuple[int, ...]) -> tuple[int, ...]:
    edges = tuple(int(edge) for edge in edges)
    if not edges or edges[0] < 0:
        raise UserError(f"bucket_edges is {list(edges)}; it needs at least one edge and none below 0")
    for lower, upper in itertools.pairwise(edges):
        if lower >= upper:
            raise UserError(f"bucket_edges must ascend, but {lower} is followed by {upper}")
    return edges


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise UserError naming each entry in which the fingerprint of a saved run differs from this one's.

    Both are `BatchSampler.fingerprint`, either of them possibly after a round trip through JSON.
    """
    plain_saved, plain_current = json.loads(json.dumps(saved)), json.loads(json.dumps(current))
    differing = [
        "the lengths of the samples differ"
        if name == "lengths"
        else f"{name} was {plain_saved.get(name)} and is {plain_current.get(name)}"
        for name in sorted({*plain_saved, *plain_current})
        if plain_saved.get(name) != plain_current.get(name)
    ]
    if differing:
        raise UserError(f"the saved position belongs to other batches: {'; '.join(differing)}")
