"""launch.sh with a trace: every drafter rank writes the sample ids of the updates that it has finished.

Lines of TRACE_DIRECTORY/trace-RANK.jsonl: {"update": number, "epoch": epoch, "samples": [ids this rank trained on]}.
"""

import json
import os
import sys
from pathlib import Path

from ds_dflash.train import main
from ds_dflash.trainer import Trainer


def record():
    """From now on this process writes its trace."""
    learn, finish = Trainer._learn, Trainer._finish
    file = (Path(os.environ["TRACE_DIRECTORY"]) / f"trace-{os.environ['RANK']}.jsonl").open("a")
    learnt: list[int] = []

    def traced_learn(self, features, batch, weight, sums):
        learn(self, features, batch, weight, sums)
        learnt.extend(batch.samples.tolist())

    def traced_finish(self, update, *rest):
        finish(self, update, *rest)
        file.write(json.dumps({"update": update.number, "epoch": update.epoch, "samples": learnt}) + "\n")
        file.flush()
        learnt.clear()

    Trainer._learn, Trainer._finish = traced_learn, traced_finish


if __name__ == "__main__":
    record()
    sys.exit(main())
