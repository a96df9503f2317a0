"""Training: from the command line to the loops of the two roles.

Target ranks forward the micro-batches of the plan and send their features; drafter ranks receive them in the same
order. A colocated rank is a drafter rank whose features come from its own target.
"""

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import datasets
import numpy as np
import psutil
import torch
import torch.distributed as dist
import transformers

import ds_dflash.accelerator  # noqa: F401  before anything imports DeepSpeed
from ds_dflash.batching import check_fingerprint
from ds_dflash.channel import Bridge, Delivery, Parcel, Receiver, Sender
from ds_dflash.checkpoint import Progress, checkpoint_to_resume
from ds_dflash.config import Settings, load_settings
from ds_dflash.errors import UserError, describe_os_error
from ds_dflash.job import Job
from ds_dflash.peers import find_launchers
from ds_dflash.phases import Phases, Profiler
from ds_dflash.read_ahead import ReadAhead
from ds_dflash.run_directory import RunDirectory
from ds_dflash.stopping import Stopper, StopRequestedError, leave, outlive_readers, wait_for
from ds_dflash.target import Target, weights_dtype
from ds_dflash.topology import Roles, Topology, launcher_ranks, ranks
from ds_dflash.trainer import MicroBatch, Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """The program behind launch.sh; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.sh", description="Train a DFlash drafter as ds_config.json says.")
    parser.add_argument("--config", type=Path, default=Path("ds_config.json"), help="settings file (ds_config.json)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--fresh", action="store_true", help="move an old run of this name aside and start over")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # given by the launcher, which sets LOCAL_RANK too
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    try:
        train(load_settings(options.config, options.set), options.fresh)
    except UserError as error:
        return report_user_error(error)
    except OSError as error:
        return report_user_error(UserError(describe_os_error(error)))
    return 0


def report_user_error(error: UserError) -> int:
    """Print a user's mistake once a job: the other ranks give rank 0, whose end stops them, the time to say it."""
    rank = launcher_ranks()[0]
    if rank > 0:
        time.sleep(5)
    print(describe_user_error(error, rank), file=sys.stderr, flush=True)
    return UserError.EXIT_CODE


def describe_user_error(error: UserError, rank: int) -> str:
    return f"{f'rank {rank}: ' if rank > 0 else ''}error: {error}"


def train(settings: Settings, fresh: bool = False) -> None:
    """Train to the end of the settings, or to a stop; goes on with the run that is there unless `fresh`."""
    rank, world_size, ranks_per_node = launcher_ranks()
    share_the_machine(rank, ranks_per_node)
    roles = Roles.assign(settings.topology, world_size, ranks_per_node)
    directory = RunDirectory(settings)
    if not fresh:
        directory.check()
        finished = directory.finished_update()
        if finished is not None:
            if rank == 0:
                print(f"{directory.path} is finished: {finished} updates, drafter in {directory.drafter}", flush=True)
            return
    launchers = find_launchers()  # before anything takes long, since one that is gone by then is not found
    job = Job.open(settings, roles)
    topology = join(settings, rank)
    outlive_readers()
    stopper = make_stopper(settings, topology, world_size, launchers)
    stopper.start()
    try:
        run_role(job, topology, stopper, directory, fresh)
        if not stopper.requested:
            finish_together(topology, stopper, world_size)
    except UserError as error:
        end_for_user(error, rank, stopper)
    except OSError as error:
        if isinstance(error, ConnectionError | TimeoutError):  # of peers, not of the disk
            end_badly(error, rank, world_size, stopper)
        end_for_user(UserError(describe_os_error(error)), rank, stopper)
    except Exception as error:
        end_badly(error, rank, world_size, stopper)
    stopper.close()
    if stopper.requested:
        leave(0)
    dist.destroy_process_group()


def make_stopper(
    settings: Settings, topology: Topology, world_size: int, launchers: Sequence[psutil.Process]
) -> Stopper:
    role = "target and drafter" if topology.role == "both" else topology.role
    exits_alone, max_hours = topology.role == "target", settings.training.max_hours
    return Stopper(topology.rank, topology.store, exits_alone, max_hours, role, world_size, launchers)


def join(settings: Settings, rank: int) -> Topology:
    """Meet the other ranks; raises UserError when some do not come."""
    try:
        return Topology.from_environment(settings.topology)
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"Not all ranks arrived within topology.timeout_seconds, {settings.topology.timeout_seconds}: see what the"
            f" others say ({type(error).__name__})."
        ) from None


def share_the_machine(rank: int, ranks_per_node: int) -> None:
    """The ranks of a node share its cores, and none may spin on another's; one of them shows progress bars."""
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_per_node))
    if rank > 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def run_role(job: Job, topology: Topology, stopper: Stopper, directory: RunDirectory, fresh: bool) -> None:
    """Train as this rank's role says, from the checkpoint that all ranks agree on."""
    checkpoint = agree_on_start(job, topology, directory, fresh)
    progress = Progress() if checkpoint is None else Progress.read(checkpoint)
    if checkpoint is not None:
        progress.forget_lost_best(directory.checkpoints, warn=topology.rank == 0)
        check_same_data(progress, job, directory)
    progress.fingerprint = job.fingerprint
    if topology.role == "target":
        run_target(job, topology, stopper, directory, progress)
    else:
        run_drafter(job, topology, stopper, Trainer(job, topology, stopper, directory, progress, checkpoint))


def check_same_data(progress: Progress, job: Job, directory: RunDirectory) -> None:
    try:
        check_fingerprint(progress.fingerprint, job.fingerprint)
    except UserError as error:
        raise UserError(
            f"{directory.path} cannot go on: {error}; put data.train back as it was, or start over with --fresh."
        ) from None


def end_for_user(error: UserError, rank: int, stopper: Stopper) -> NoReturn:
    """End the whole job for a user's mistake."""
    stopper.fail(str(error))
    leave(UserError.EXIT_CODE, describe_user_error(error, rank))


def end_badly(error: Exception, rank: int, world_size: int, stopper: Stopper) -> NoReturn:
    """A target rank that is to stop waits for the save; any other error ends the whole job with its reason."""
    comes_of_stop = isinstance(error, StopRequestedError) or is_of_peers(error)  # a peer has left on the same stop
    if stopper.requested and comes_of_stop:
        stopper.wait_for_the_end()
    if is_of_peers(error):
        stopper.wait_for_reason()  # a peer that died is found, one that failed has said why: this rank ends with that
        reason = f"{str(error).splitlines()[0]}\n{stopper.ask_where_all_are(world_size)}"
        print(f"rank {rank}: {reason}", file=sys.stderr, flush=True)
        stopper.fail(reason)
    else:
        traceback.print_exception(error)
        stopper.fail(f"{type(error).__name__}: {error}")
    leave(1)


def is_of_peers(error: Exception) -> bool:
    """Whether another rank broke off or did not come; gloo says so in a RuntimeError."""
    said = str(error)
    kinds = ConnectionError | TimeoutError | dist.DistError
    return isinstance(error, kinds) or "imed out" in said or "gloo" in said


def run_target(job: Job, topology: Topology, stopper: Stopper, directory: RunDirectory, progress: Progress) -> None:
    """Forward this rank's micro-batches of the plan and send their features."""
    target = load_target(job, topology)
    if not progress.update:
        target.capture(job.ids(job.heaviest()))  # rehearsal: running out of memory shows at once
    depth, timeout = job.settings.topology.channel_depth, topology.timeout.total_seconds()
    sender = Sender(make_bridge(topology), depth, stopper, timeout)
    phases = Phases(job.settings.training.profile)
    profiler = Profiler(directory.profile, f"target-{topology.plan_rank}", phases)
    reader = ReadAhead(micro_batches(job, topology, progress))
    try:
        while (work := phases.next("read", reader)) is not None:
            stopper.raise_if_requested()
            with phases("forward"):
                features = target.capture(work.ids)
            if work.ids:
                with phases("send"):
                    sender.send(features, topology.roles.drafter_rank(work.number % topology.roles.drafters))
            if work.ends_update:
                profiler.update_done()
        sender.finish()
    finally:
        reader.close()
    profiler.close()


@dataclass(frozen=True)
class TargetWork:
    """A micro-batch of a target rank: its number in its update, the ids of its samples, and whether it is the last."""

    number: int
    ids: list[np.ndarray]
    ends_update: bool


def micro_batches(job: Job, topology: Topology, progress: Progress) -> Iterator[TargetWork]:
    """All micro-batches of a target rank, also the empty ones: under ZeRO-3 every rank makes every forward."""
    targets = topology.roles.targets
    for update in job.walk(progress):
        last = targets * (job.sampler.rounds - 1)
        for number, samples in update.micro_batches():
            if number % targets == topology.plan_rank:
                yield TargetWork(number, job.ids(samples, update), number >= last)


def run_drafter(job: Job, topology: Topology, stopper: Stopper, trainer: Trainer) -> None:
    """Train on this rank's micro-batches of the plan, whose features are received or captured."""
    source = (
        OwnTarget(job, topology, trainer.phases)
        if topology.role == "both"
        else SentFeatures(job, topology, stopper, trainer)
    )
    if not trainer.progress.update:
        trainer.rehearse()
    trainer.start()
    reader = ReadAhead(trainer.work(job.walk(trainer.progress)))
    stopper.must_save()
    stopped = False
    try:
        while (work := trainer.phases.next("read", reader)) is not None:
            if work.update.validates:
                trainer.validate(work, source.receive)
            else:
                trainer.train(work, source.receive)
            trainer.save_if_due()
        source.finish()
    except StopRequestedError:
        stopped = True
    finally:
        reader.close()
    trainer.save()
    if stopped:
        trainer.say_stopped()
    else:
        trainer.write_result()
    stopper.saved()
    trainer.close()  # may wait for W&B


class SentFeatures:
    """Features that target ranks send over the bridge, in the order of the plan."""

    def __init__(self, job: Job, topology: Topology, stopper: Stopper, trainer: Trainer) -> None:
        self._phases = trainer.phases
        self._receiver = Receiver(
            make_bridge(topology),
            parcels(job, topology, trainer.progress),
            job.settings.topology.channel_depth,
            job.feature_width,
            weights_dtype(job.target, job.settings.target),
            stopper,
            topology.timeout.total_seconds(),
        )

    def receive(self, batch: MicroBatch) -> Delivery:
        with self._phases("receive"):
            return self._receiver.receive()

    def finish(self) -> None:
        self._receiver.finish()


class OwnTarget:
    """Features of a colocated rank's own target, which takes part in every micro-batch, also an empty one."""

    def __init__(self, job: Job, topology: Topology, phases: Phases) -> None:
        self._phases = phases
        self._target = load_target(job, topology)

    def receive(self, batch: MicroBatch) -> Delivery:
        started = time.monotonic()
        with self._phases("target forward"):
            features = self._target.capture(batch.ids)
        return Delivery(features, 0.0, time.monotonic() - started)

    def finish(self) -> None:
        pass


def parcels(job: Job, topology: Topology, progress: Progress) -> Iterator[Parcel]:
    """All that a drafter rank will receive, in order."""
    roles = topology.roles
    for update in job.walk(progress):
        lengths = job.data_of(update).lengths
        for number, samples in update.micro_batches():
            if len(samples) and number % roles.drafters == topology.drafter:
                yield Parcel(roles.target_rank(number % roles.targets), int(lengths[samples].sum()))


def load_target(job: Job, topology: Topology) -> Target:
    """This rank's target, or its part of it; a world of one rank has nothing to shard over."""
    settings = job.settings
    zero: dict[str, Any] | None = None
    if settings.target.sharding == "zero3" and topology.target_world_size > 1:
        keys = settings.deepspeed["zero_optimization"]
        zero = {name: value for name, value in keys.items() if name.startswith("stage3_")}
    target = Target.load(job.target, settings.target, job.layer_ids, topology.device, zero)
    if topology.plan_rank == 0:
        spread = "whole on each of" if zero is None else "sharded over"
        print(f"target {spread} {ranks(topology.target_world_size)}: {target.describe()}", flush=True)
    return target


def make_bridge(topology: Topology) -> Bridge:
    assert topology.bridge is not None
    assert topology.carrier is not None
    return Bridge(topology.bridge, topology.carrier, topology.device)


def agree_on_start(job: Job, topology: Topology, directory: RunDirectory, fresh: bool) -> Path | None:
    """Rank 0 opens the run's directory; all ranks start from the checkpoint that it names."""
    digest = job.digest()
    if topology.rank == 0:
        answer: dict[str, str | None] = {"digest": digest}
        try:
            directory.open(fresh, plan_facts(job))
            newest = checkpoint_to_resume(directory.checkpoints)
            answer["checkpoint"] = str(newest) if newest else None
        except (UserError, OSError) as error:
            answer["error"] = str(error)
        topology.store.set("start", json.dumps(answer))
    answer = json.loads(topology.store.get("start"))
    if answer.get("error") is not None:
        raise UserError(answer["error"])
    if answer["digest"] != digest:
        raise UserError(
            f"Rank {topology.rank} has other settings or other data than rank 0: give all nodes the same files."
        )
    return Path(answer["checkpoint"]) if answer["checkpoint"] else None


def plan_facts(job: Job) -> dict[str, Any]:
    """plan.json: the first epoch's batches in figures."""
    return {
        "updates_in_first_epoch": job.sampler.estimate_updates(0),
        "target_ranks": job.sampler.ranks,
        "rounds_per_update": job.sampler.rounds,
        "samples": job.sampler.accounting,
        "fingerprint": job.sampler.fingerprint,
    }


def finish_together(topology: Topology, stopper: Stopper, world_size: int) -> None:
    """No rank leaves before all have finished: one that dies on the last steps takes the others along."""
    topology.store.add("finished", 1)

    def all_have(seconds: float) -> bool:
        time.sleep(min(seconds, 0.05))
        return topology.store.add("finished", 0) >= world_size

    wait_for(all_have, stopper, topology.timeout.total_seconds(), "the other ranks to finish")
