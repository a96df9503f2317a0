"""Runs of launch.sh one after another in one process, each a colocated world of one: in_one_process.py CONFIG STEPS.

STEPS is JSON: {"run": [argument, ...], "cheap_samples": up to how many all epochs are counted ahead}, or
{"remove": a directory}. Traces go to traces.json beside the config: {run name: [[update, epoch, sample ids], ...]}.
"""

import collections
import gc
import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

from ds_dflash import job
from ds_dflash.accelerator import deepspeed
from ds_dflash.train import main
from ds_dflash.trainer import Trainer

learn, finish = Trainer._learn, Trainer._finish
traces, learnt = collections.defaultdict(list), []


def traced_learn(self, features, batch, *rest):
    learn(self, features, batch, *rest)
    learnt.extend(batch.samples.tolist())


def traced_finish(self, update, *rest):
    finish(self, update, *rest)
    traces[self._job.settings.run_name].append([update.number, update.epoch, learnt[:]])
    learnt.clear()


def run(config, arguments, cheap_samples):
    with mock.patch.dict(os.environ), mock.patch.object(job, "CHEAP_SAMPLES", cheap_samples):
        code = main(["--config", config, *arguments])
    deepspeed.comm.comm.cdb = None  # DeepSpeed forgets its world, so that another can follow
    deepspeed.utils.groups._WORLD_GROUP = None
    gc.collect()  # and the run's directory is unlocked
    if code:
        sys.exit(code)


Trainer._learn, Trainer._finish = traced_learn, traced_finish
for step in json.loads(sys.argv[2]):
    if "remove" in step:
        shutil.rmtree(step["remove"])
    else:
        run(sys.argv[1], step["run"], step.get("cheap_samples", job.CHEAP_SAMPLES))
(Path(sys.argv[1]).parent / "traces.json").write_text(json.dumps(traces))
