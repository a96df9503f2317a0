"""tests/traced.py in which both roles wait at random before every micro-batch, for benchmarks/soak.py.

A drafter rank waits up to DELAY seconds and a target rank up to twice that, so that neither role is always the slower
one and a kill may fall into any phase.
"""

import os
import random
import sys
import time
from pathlib import Path

from ds_dflash.target import Target
from ds_dflash.train import main
from ds_dflash.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import traced

capture, learn = Target.capture, Trainer._learn
delay = float(os.environ["DELAY"])


def delayed_capture(self, rows):
    time.sleep(random.uniform(0, 2 * delay))
    return capture(self, rows)


def delayed_learn(self, *arguments):
    time.sleep(random.uniform(0, delay))
    learn(self, *arguments)


Target.capture, Trainer._learn = delayed_capture, delayed_learn
traced.record()
sys.exit(main())
