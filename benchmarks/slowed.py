"""launch.sh with injected costs, for benchmarks/pipeline.py.

TARGET_SECONDS and DRAFTER_SECONDS are added to every micro-batch of the role. Each target rank writes the most
micro-batches and bytes that it had in flight at once to IN_FLIGHT/RANK.json.
"""

import json
import os
import sys
import time
from pathlib import Path

from ds_dflash.channel import Sender
from ds_dflash.target import Target
from ds_dflash.train import main
from ds_dflash.trainer import Trainer

capture, learn, send, finish = Target.capture, Trainer._learn, Sender.send, Sender.finish
target_seconds, drafter_seconds = (float(os.environ[name]) for name in ("TARGET_SECONDS", "DRAFTER_SECONDS"))
sizes: list[int] = []
most = {"micro_batches": 0, "bytes": 0}


def slow_capture(self, rows):
    time.sleep(target_seconds)
    return capture(self, rows)


def slow_learn(self, *arguments):
    time.sleep(drafter_seconds)
    learn(self, *arguments)


def watched_send(self, features, drafter_rank):
    send(self, features, drafter_rank)
    sizes.append(features.nbytes)
    in_flight = sizes[-self._in_flight :]
    most["micro_batches"] = max(most["micro_batches"], len(in_flight))
    most["bytes"] = max(most["bytes"], sum(in_flight))


def watched_finish(self):
    finish(self)
    (Path(os.environ["IN_FLIGHT"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(most))


Target.capture, Trainer._learn, Sender.send, Sender.finish = slow_capture, slow_learn, watched_send, watched_finish
sys.exit(main())
