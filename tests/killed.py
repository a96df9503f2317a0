"""launch.sh and ds-dflash in which a process is ended by a signal at a named place.

On rank KILLED_RANK the signal KILLED_WITH (SIGKILL where it is not set) comes when KILLED_PLACE, one of `PLACES`, is
reached for the KILLED_CALLth time; without KILLED_PLACE nothing does. MACHINES=apart lets every rank take itself for
the only one on its machine. SECONDS_AN_UPDATE slows every update.
"""

import io
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import datasets
import safetensors.torch
import torch

from ds_dflash import cli, peers, train
from ds_dflash.data import build
from ds_dflash.engine import DrafterEngine
from ds_dflash.export import writing
from ds_dflash.target import TapRecorder
from ds_dflash.trainer import Trainer

program = os.getpid()  # also for the processes that it forks
reached = 0


def strike(stopper=None):
    """The place is reached once more. A signal that may be taken note of is given the time for it."""
    global reached
    reached += 1
    if reached != int(os.environ.get("KILLED_CALL", "1")):
        return
    os.kill(program, signal.Signals[os.environ.get("KILLED_WITH", "SIGKILL")])
    while stopper is None or not stopper.requested:
        time.sleep(0.01)


def before(owner, name, when=lambda *_: True):
    """Strike where a function is called, if `when` holds for its arguments."""
    call = getattr(owner, name)

    def struck(*arguments, **options):
        if when(*arguments):
            strike()
        return call(*arguments, **options)

    setattr(owner, name, struck)


def after(owner, name, when):
    call = getattr(owner, name)

    def struck(*arguments, **options):
        result = call(*arguments, **options)
        if when(*arguments):
            strike()
        return result

    setattr(owner, name, struck)


def within_validation():
    validate = Trainer.validate

    def struck(self, work, receive):
        strike(self._stopper)
        validate(self, work, receive)

    Trainer.validate = struck


def half_written(owner, name, write):
    """A file, given by its path or open, of which the first half is written."""
    call = getattr(owner, name)

    def struck(content, file, *arguments, **options):
        whole = io.BytesIO()
        write(content, whole)
        half = whole.getvalue()[: len(whole.getvalue()) // 2]
        if reached + 1 == int(os.environ.get("KILLED_CALL", "1")):
            if hasattr(file, "write"):
                file.write(half)
                file.flush()
            else:
                Path(file).write_bytes(half)
        strike()
        return call(content, file, *arguments, **options)

    setattr(owner, name, struck)


def slow_updates(seconds):
    train_update = Trainer.train

    def slow(self, work, receive):
        train_update(self, work, receive)
        time.sleep(seconds)

    Trainer.train = slow


def half_accounting():
    write_text = Path.write_text

    def struck(path, text, **options):
        if path.name == build.ACCOUNTING_FILE:
            write_text(path, text[: len(text) // 2])
            strike()
        return write_text(path, text, **options)

    Path.write_text = struck


def within_tokenising():
    build.BATCH_ROWS = 8
    before(build.BatchEncoder, "__call__")


def is_hidden(path):
    return any(part.startswith(".") and part.endswith(".writing") for part in Path(path).parts)


def ends_save(_, target):
    return Path(target).name.startswith("step-")


def ends_drafter(_, target):
    """The run's, not a checkpoint's."""
    return Path(target).name == "drafter" and not is_hidden(Path(target).parent)


PLACES = {
    "forward": lambda: before(TapRecorder, "_keep"),
    "backward": lambda: before(DrafterEngine, "backward", lambda engine, *_: engine._backwards > 0),
    "step": lambda: before(DrafterEngine, "step"),
    "validation": within_validation,
    "engine files": lambda: half_written(torch, "save", torch.save),
    "before rename": lambda: before(os, "rename", ends_save),
    "after rename": lambda: after(os, "rename", ends_save),
    "progress": lambda: before(os, "replace", lambda _, target: Path(target).name == "progress.json"),
    "drafter": lambda: before(os, "rename", ends_drafter),
    "result": lambda: before(os, "replace", lambda _, target: Path(target).name == "result.json"),
    "tokenising": within_tokenising,
    "prepared table": lambda: before(datasets.Dataset, "save_to_disk"),
    "accounting": half_accounting,
    "weights": lambda: half_written(
        writing, "save_file", lambda content, file: file.write(safetensors.torch.save(content))
    ),
    "export": lambda: before(os, "rename", lambda _, target: Path(target).name == "exported"),
}


def prepare():
    """Make the place deadly that the environment names."""
    if os.environ.get("MACHINES") == "apart":
        rank = os.environ["RANK"]  # of all ranks, until the roles are worlds of their own
        peers.machine = lambda: f"the machine of rank {rank}"
    if "SECONDS_AN_UPDATE" in os.environ:
        slow_updates(float(os.environ["SECONDS_AN_UPDATE"]))
    if "KILLED_PLACE" in os.environ and os.environ.get("KILLED_RANK", "0") == os.environ.get("RANK", "0"):
        PLACES[os.environ["KILLED_PLACE"]]()


def fork(environment, directory, log, arguments):
    """The body of a process that a server of forks has made, in a session of its own.

    arguments: "ds-dflash" and its own; "python", a program's text and its own; "file", a program's path and its own.
    """
    global program
    program = os.getpid()
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    torch.set_num_threads(1)
    prepare()
    command, *rest = arguments
    if command == "python":
        sys.argv = ["", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
        sys.exit(0)
    if command == "file":
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")
        sys.exit(0)
    assert command == "ds-dflash"
    sys.exit(cli.main(rest))


if __name__ == "__main__":
    prepare()
    sys.exit(train.main())
