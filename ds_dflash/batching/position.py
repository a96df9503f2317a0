"""Where a run stands in its epochs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """An epoch, and the updates done in it: segments of (micro-batches per update, updates done).

    Each segment but the first plans anew the samples that were not seen before it, so an epoch can go through any
    number of topologies. Everything else about the rest of the epoch follows from the sampler.
    """

    epoch: int
    segments: tuple[tuple[int, int], ...]

    @property
    def update(self) -> int:
        """Updates done in this epoch, which is also the number of the next one."""
        return sum(done for _, done in self.segments)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"epoch": self.epoch, "segments": [list(segment) for segment in self.segments]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Position":
        """From what `to_dict` gave."""
        return cls(int(saved["epoch"]), tuple((int(product), int(done)) for product, done in saved["segments"]))
