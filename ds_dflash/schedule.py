"""The learning-rate curve over an estimated number of updates.

Update u of U has progress u / U. When the total becomes U' after update v, progress runs linearly from where it stands
to 1 at U', so the curve has no jump and ends exactly at the last update. The multiplier rises linearly up to
`warmup_ratio` of progress, then follows the schedule down to `min_lr_ratio` at progress 1.
"""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ProgressCurve:
    """Piecewise linear progress. segments: (update, progress at it, total updates from there on)."""

    segments: list[tuple[int, float, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.segments[-1][2]

    def at(self, update: int) -> float:
        """Progress in [0, 1] of an update (counted from 1; 0: the start) of the latest segment."""
        start, progress, total = self.segments[-1]
        if update >= total:
            return 1.0
        return progress + (1.0 - progress) * (update - start) / (total - start)

    def set_total(self, done: int, total: int) -> None:
        """From now on the run has `total` updates; `done` of them are made.

        A curve that has come to its end starts again at done / total: a finished run is made longer.
        """
        assert total >= done
        if not self.segments:
            self.segments.append((0, 0.0, total))
        elif total != self.total:
            self.segments.append((done, self.at(done) if done < self.total else done / total, total))

    def to_json(self) -> list[list[float]]:
        return [list(segment) for segment in self.segments]

    @classmethod
    def from_json(cls, segments: list[list[Any]]) -> "ProgressCurve":
        return cls([(int(update), float(progress), int(total)) for update, progress, total in segments])


def multiplier(progress: float, schedule: str, warmup_ratio: float, min_lr_ratio: float) -> float:
    """Share of the configured learning rate at `progress`; schedule: "cosine", "linear" or "constant".

    A constant schedule stays at 1 after its warmup.
    """
    if progress < warmup_ratio:
        return progress / warmup_ratio
    if schedule == "constant":
        return 1.0
    after = (progress - warmup_ratio) / (1.0 - warmup_ratio)
    falling = 0.5 * (1.0 + math.cos(math.pi * after)) if schedule == "cosine" else 1.0 - after
    return min_lr_ratio + (1.0 - min_lr_ratio) * falling
