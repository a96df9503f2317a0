"""What drafter ranks have trained on, from the traces that tests/traced.py writes."""

import collections
import json
from pathlib import Path


def trace(directory: Path) -> dict[int, tuple[int, list[int]]]:
    """update -> (epoch, sample ids of all ranks), the last word on each update."""
    by_rank: dict[tuple[str, int], tuple[int, list[int]]] = {}
    for file in directory.glob("trace-*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            by_rank[file.name, line["update"]] = line["epoch"], line["samples"]
    updates: dict[int, tuple[int, list[int]]] = {}
    for (_, update), (epoch, samples) in sorted(by_rank.items()):
        updates[update] = epoch, updates.get(update, (epoch, []))[1] + samples
    return updates


def samples_by_epoch(directory: Path) -> dict[int, list[int]]:
    """epoch -> the ids of all samples trained on in it, ascending."""
    epochs = collections.defaultdict(list)
    for epoch, samples in trace(directory).values():
        epochs[epoch] += samples
    return {epoch: sorted(samples) for epoch, samples in epochs.items()}
