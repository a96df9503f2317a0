"""The pipeline between the roles: is the slower one always busy, what does a round cost beside, what is in flight.

    python benchmarks/pipeline.py [--seconds 0.1] [--ratios 1:2 1:1 2:1] [--skip-eight]

Whole runs of tiny models on the CPU, a process a rank. With injected costs (target : drafter) and channel depths of 1,
2 and 4 the table has the busy share, busy / (busy + waiting), of the role that has more to do (at 1:1 what the tiny
models themselves cost decides which), over all updates but the first two, whose features may have been sent while the
drafter still started; the baseline is the same work in one process after the other, whose time the pipeline's is a
share of. Without injected costs: milliseconds a round.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

import distributed  # noqa: E402
import tiny  # noqa: E402

ROUNDS = 4  # micro-batches of a target rank in an update


def run(directory: Path, name: str, ranks: int, depth: int, target: float, drafter: float) -> tuple[list[dict], dict]:
    """(log lines of all updates but the first two, most in flight of target rank 0)"""
    file = directory / f"{name}.json"
    settings = tiny.settings(
        directory / "target",
        directory / "train.jsonl",
        directory / name,
        batching={"token_budget": 192},
        training={"num_epochs": 3, "save_every": 0},
        topology={"channel_depth": depth},
    )
    settings["gradient_accumulation_steps"] = ROUNDS
    settings["ds_dflash"]["data"]["cache_dir"] = str(directory / "cache")
    file.write_text(json.dumps(settings))
    os.environ |= {"TARGET_SECONDS": str(target), "DRAFTER_SECONDS": str(drafter), "IN_FLIGHT": str(directory)}
    distributed.run(ranks, file, program="benchmarks/slowed.py", timeout=900)
    most = json.loads((directory / "0.json").read_text()) if ranks > 1 else {}
    return distributed.metrics(directory / name / "run")[2:], most


def total(lines: list[dict], *names: str) -> float:
    return sum(line[name] for line in lines for name in names)


def slower_role(lines: list[dict]) -> tuple[str, float]:
    """The role with more to do, and its busy share."""
    busy = {role: total(lines, f"{role}_busy_seconds") for role in ("target", "drafter")}
    role = max(busy, key=lambda role: busy[role])
    return role, busy[role] / (busy[role] + total(lines, f"{role}_wait_seconds"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.1, help="the smaller injected cost of a micro-batch (0.1)")
    parser.add_argument("--ratios", nargs="*", default=["1:2", "1:1", "2:1"], metavar="TARGET:DRAFTER")
    parser.add_argument("--skip-eight", action="store_true", help="no run of 7 + 1 ranks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        tiny.write_target(directory / "target")
        tiny.write_chats(directory / "train.jsonl", rows=32)
        print(f"{'target : drafter':18}{'depth':>6}{'slower role':>13}{'busy':>8}{'of serial':>11}{'in flight':>24}")
        for target, drafter in (map(int, ratio.split(":")) for ratio in options.ratios):
            costs = target * options.seconds, drafter * options.seconds
            serial, _ = run(directory, f"serial-{target}-{drafter}", 1, 2, *costs)
            for depth in (1, 2, 4):
                lines, most = run(directory, f"{target}-{drafter}-{depth}", 2, depth, *costs)
                slower, busy = slower_role(lines)
                share = total(lines, "update_seconds") / total(serial, "update_seconds")
                flight = f"{most['micro_batches']} ({most['bytes'] / 1000:.0f} kB)"
                print(
                    f"{target} : {drafter:<14}{depth:6}{slower:>13}{busy:8.1%}{share:11.2f}{flight:>24}",
                    flush=True,
                )
        for ranks in (1, 2) if options.skip_eight else (1, 2, 8):
            lines, _ = run(directory, f"bare-{ranks}", ranks, 2, 0.0, 0.0)
            seconds = statistics.median(line["update_seconds"] for line in lines) / ROUNDS
            label = "colocated, one rank" if ranks == 1 else f"{ranks - 1} + 1 ranks"
            print(f"{label:24}{1000 * seconds:8.1f} ms a round of {max(1, ranks - 1)} micro-batches, nothing injected")


if __name__ == "__main__":
    main()
