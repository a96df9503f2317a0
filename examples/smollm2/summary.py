"""Print what a run of the example came to: `summary.py metrics.jsonl untrained.json trained.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

WINDOW = 10  # updates whose losses are averaged at the start and at the end


def summary(metrics: Path, untrained: Path, trained: Path) -> str:
    """A table of loss, acceptance length and equality with greedy decoding, before and after training."""
    updates = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [update["loss"] for update in updates if "loss" in update]
    before, after = json.loads(untrained.read_text()), json.loads(trained.read_text())
    return "\n".join(
        [
            f"{'':40}{'untrained':>12}{'trained':>12}",
            f"{f'loss (mean of {WINDOW} updates)':40}{mean(losses[:WINDOW]):12.3f}{mean(losses[-WINDOW:]):12.3f}",
            row("acceptance length, held-out prompts", before, after, "acceptance_length", "12.3f"),
            row(f"outputs equal to greedy, of {after['prompts']}", before, after, "equal", "12d"),
            row("first difference on a tie", before, after, "ties", "12d"),
            row("other differences", before, after, "different", "12d"),
        ]
    )


def row(label: str, before: dict[str, float], after: dict[str, float], key: str, form: str) -> str:
    return f"{label:40}{format(before[key], form)}{format(after[key], form)}"


if __name__ == "__main__":
    print(summary(*(Path(argument) for argument in sys.argv[1:])))
