"""Does it matter how a training is spread over ranks? The same one on several topologies, against one rank.

    python benchmarks/topologies.py

Tiny models in fp32 on the CPU, a process a rank; every update has 6 micro-batches, some of them empty. The differences
are relative: of losses to the loss of one rank, of weights to the largest magnitude in their tensor.
"""

import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

import spreads  # noqa: E402

COLUMNS = {
    "topology": 18,
    "ranks": 7,
    "rounds": 8,
    "updates": 9,
    "loss at 1": 12,
    "at 20": 10,
    "at the last": 13,
    "first 5": 10,
    "all": 10,
    "weights": 10,
}


def row(*cells: object) -> str:
    first, *others = zip(cells, COLUMNS.values(), strict=True)
    return f"{first[0]:<{first[1]}}" + "".join(f"{cell:>{width}}" for cell, width in others)


def compare(spread: spreads.Spread, outcome: spreads.Outcome, reference: spreads.Outcome) -> str:
    losses, expected = outcome.figures("loss"), reference.figures("loss")
    return row(
        spread.name,
        spread.ranks,
        spread.rounds,
        len(losses),
        *(f"{float(losses[update - 1]):.6f}" for update in (1, 20, len(losses))),
        f"{spreads.relative_difference(losses[:5], expected[:5]):.1e}",
        f"{spreads.relative_difference(losses, expected):.1e}",
        f"{spreads.weight_difference(outcome.weights, reference.weights):.1e}",
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        inputs = spreads.write_inputs(directory)
        sizes = [size for update in spreads.micro_batch_sizes(inputs, directory) for size in update]
        print(f"{len(sizes)} micro-batches, {sizes.count(0)} of them empty, of at most {max(sizes)} samples")
        print(row(*COLUMNS))
        reference = None
        for number, spread in enumerate(spreads.SPREADS):
            (directory / str(number)).mkdir()
            outcome = spreads.train(spread, inputs, directory / str(number))
            reference = reference or outcome
            print(compare(spread, outcome, reference), flush=True)


if __name__ == "__main__":
    main()
