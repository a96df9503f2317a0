"""launch.sh in which rank HANGING_RANK sleeps for ever at HANGING_PLACE: capture, learn or save."""

import os
import sys
import time

from ds_dflash import trainer
from ds_dflash.target import Target
from ds_dflash.train import main
from ds_dflash.trainer import Trainer

capture, learn, save = Target.capture, Trainer._learn, trainer.save_checkpoint
calls = 0


def hang_on_call(number):
    global calls
    calls += 1
    if calls >= number:
        sleep_for_ever()


def sleep_for_ever():
    while True:
        time.sleep(1)


def hanging_capture(self, rows):
    hang_on_call(6)
    return capture(self, rows)


def hanging_learn(self, *arguments):
    hang_on_call(6)
    return learn(self, *arguments)


def hanging_save(*arguments):
    hang_on_call(1)
    return save(*arguments)


if os.environ["RANK"] == os.environ["HANGING_RANK"]:
    place = os.environ["HANGING_PLACE"]
    Target.capture = hanging_capture if place == "capture" else capture
    Trainer._learn = hanging_learn if place == "learn" else learn
    trainer.save_checkpoint = hanging_save if place == "save" else save
sys.exit(main())
