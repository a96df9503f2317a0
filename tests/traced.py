"""launch.sh with a trace: every drafter rank writes the sample ids of the updates that it has finished.

Lines of TRACE_DIRECTORY/trace-RANK.jsonl: {"update": number, "epoch": epoch, "samples": [ids this rank trained on]}.
"""

import json
import os
import sys
from pathlib import Path

from ds_dflash.train import main
from ds_dflash.trainer import Trainer

make_blocks, learn, finish = Trainer._blocks, Trainer._learn, Trainer._finish
file = (Path(os.environ["TRACE_DIRECTORY"]) / f"trace-{os.environ['RANK']}.jsonl").open("a")
samples_of: dict[int, list[int]] = {}
learnt: list[int] = []


def traced_blocks(self, samples, update):
    blocks = make_blocks(self, samples, update)
    samples_of[id(blocks)] = samples.tolist()
    return blocks


def traced_learn(self, features, blocks, weight, sums):
    learn(self, features, blocks, weight, sums)
    learnt.extend(samples_of[id(blocks)])


def traced_finish(self, update, *rest):
    finish(self, update, *rest)
    file.write(json.dumps({"update": update.number, "epoch": update.epoch, "samples": learnt}) + "\n")
    file.flush()
    learnt.clear()
    samples_of.clear()


Trainer._blocks, Trainer._learn, Trainer._finish = traced_blocks, traced_learn, traced_finish
sys.exit(main())
