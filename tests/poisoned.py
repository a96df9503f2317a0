"""launch.sh whose drafter ranks find no finite loss in the updates that POISONED lists (JSON)."""

import json
import os
import sys

from ds_dflash.train import main
from ds_dflash.trainer import Trainer

learn, finish = Trainer._learn, Trainer._finish
poisoned = set(json.loads(os.environ["POISONED"]))


def poisoned_learn(self, features, batch, weight, sums):
    bad = self.progress.update + 1 in poisoned and self._topology.drafter == 0
    learn(self, features * float("nan") if bad else features, batch, weight, sums)


Trainer._learn = poisoned_learn
sys.exit(main())
