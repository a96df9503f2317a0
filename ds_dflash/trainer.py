"""What a drafter rank does with an update: losses and gradients, the step, checkpoints, figures, validation."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_dflash.anchors import Blocks
from ds_dflash.channel import Delivery
from ds_dflash.checkpoint import (
    Progress,
    best_checkpoint,
    load_checkpoint,
    replace_progress,
    save_checkpoint,
)
from ds_dflash.drafter import DFlashDraftModel
from ds_dflash.engine import DrafterEngine
from ds_dflash.errors import UserError
from ds_dflash.export import read_drafter, write_drafter
from ds_dflash.job import Job, Update
from ds_dflash.loss import Objective, resolve_gamma
from ds_dflash.metrics import DeepSpeedMonitor, JsonLines, MetricSums, Pace, Sink, Terminal, WandbRun
from ds_dflash.phases import Phases, Profiler
from ds_dflash.run_directory import RunDirectory
from ds_dflash.schedule import ProgressCurve, multiplier
from ds_dflash.step import DrafterStep
from ds_dflash.stopping import Stopper, StopRequestedError
from ds_dflash.topology import Topology, ranks


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What a drafter rank knows of a micro-batch before its features come; `ids` only where its own target asks."""

    samples: np.ndarray
    blocks: Blocks
    ids: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class Work:
    """An update, or a step of a validation pass, with this rank's micro-batches."""

    update: Update
    micro_batches: list[MicroBatch]


Receive = Callable[[MicroBatch], Delivery]
"""The features of the next micro-batch of this rank."""


class Trainer:
    """A drafter rank. `train`, `validate` and `save` are collective calls over the drafter ranks."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        stopper: Stopper,
        directory: RunDirectory,
        progress: Progress,
        checkpoint: Path | None,
    ) -> None:
        self._job, self._topology, self._stopper, self._directory = job, topology, stopper, directory
        self._counting = threading.Thread(target=job.count_ahead, args=[job.position(progress).epoch], daemon=True)
        self._counting.start()  # while models load
        self._engine = make_engine(job, topology.device)
        if checkpoint is not None:
            load_checkpoint(self._engine.engine, checkpoint)
        self._step = make_step(job, self._engine.dtype, topology.device)
        self.progress = progress
        self._curve = ProgressCurve.from_json(progress.curve)
        self._last_saved = (progress.update, progress.validated) if checkpoint is not None else None
        self._pace = Pace()
        self.phases = Phases(job.settings.training.profile)
        self._profiler = Profiler(directory.profile, f"drafter-{topology.drafter}", self.phases)
        self._validation: MetricSums | None = None
        self._sinks = self._open_sinks() if topology.drafter == 0 else []

    # ------------------------------------------------------------------------------------------- an update

    def work(self, walk: Iterator[Update]) -> Iterator[Work]:
        """Rows, anchors and labels of this rank's micro-batches; empty ones only where its own target has a part."""
        drafters, has_target = self._topology.roles.drafters, self._topology.role == "both"
        for update in walk:
            mine = [
                samples for number, samples in update.micro_batches() if number % drafters == self._topology.drafter
            ]
            mine = [samples for samples in mine if len(samples) or has_target]
            yield Work(update, [self._micro_batch(samples, update, has_target) for samples in mine])

    def _micro_batch(self, samples: np.ndarray, update: Update, has_target: bool) -> MicroBatch:
        epoch = 0 if update.validates else update.epoch
        blocks = self._step.blocks(self._job.data_of(update), samples, epoch)
        return MicroBatch(samples, blocks, self._job.ids(samples, update) if has_target else [])

    def train(self, work: Work, receive: Receive) -> None:
        """One optimizer update. Raises StopRequestedError on all drafter ranks alike, with nothing changed."""
        objective = self._step.objective
        parts = [batch.blocks for batch in work.micro_batches]
        own_weight = sum(objective.weight(part.supervised, part.block_offsets) for part in parts)
        weight, stops = self._sum_over_ranks(own_weight, float(self._stopper.requested))
        if stops:
            raise StopRequestedError
        sums = MetricSums(objective.block_size, self._topology.device)
        waits = np.zeros(3)  # seconds: this rank for features, the targets for credit, the targets at work
        finished = True
        try:
            for batch in work.micro_batches:
                started = time.monotonic()
                delivery = receive(batch)
                arrived = time.monotonic()
                waits += arrived - started, delivery.target_waited, delivery.target_worked
                self._learn(delivery.features, batch, weight, sums)
        except StopRequestedError:
            finished = False
        self._agree(finished)
        self._finish(work.update, weight, sums, waits)
        if self._profiler.update_done():
            self._pace.start()

    def _agree(self, finished: bool) -> None:
        """Raise StopRequestedError on all drafter ranks if one of them could not finish."""
        if self._sum_over_ranks(float(not finished))[0]:
            raise StopRequestedError

    def _learn(self, features: torch.Tensor, batch: MicroBatch, weight: float, sums: MetricSums) -> None:
        slices = self._step.results(self._engine, features, batch.blocks)
        while (made := self.phases.next("forward", slices)) is not None:
            part, result = made
            with self.phases("backward"):
                self._engine.backward(result.loss_sum, weight)
                sums.add(part.block_lengths, result)

    def _finish(self, update: Update, weight: float, sums: MetricSums, waits: np.ndarray) -> None:
        training = self._job.settings.training
        position = update.plan.position_after(update.index)
        self._curve.set_total(update.number - 1, update.number + self._job.updates_after(update.number, position))
        rate = self._engine.base_learning_rate * multiplier(
            self._curve.at(update.number), training.schedule, training.warmup_ratio, training.min_lr_ratio
        )
        with self.phases("step"):
            grad_norm = self._engine.step(rate)
        self.progress.note_step(not math.isfinite(grad_norm))
        self.progress.update = update.number
        self.progress.position = position.to_dict()
        self.progress.curve = self._curve.to_json()
        figures = {
            "update": update.number,
            "updates_total": self._curve.total,
            "epoch": update.epoch + (update.index + 1) / self._job.updates_in(update.plan),
            **sums.figures(),
            "loss_weight": weight,
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "skipped_updates": self.progress.skipped,
            **self._work_figures(update, waits),
        }
        with self.phases("log"):
            for sink in self._sinks:
                sink.log(figures)
        self._give_up_if_skipping(update)

    def _give_up_if_skipping(self, update: Update) -> None:
        skipped = self.progress.skipped_in_a_row
        if skipped < self._job.settings.training.max_skipped_updates:
            return
        samples = [batch.tolist() for _, batch in update.micro_batches() if len(batch)]
        raise UserError(
            f"{skipped} updates in a row had no finite gradient and were skipped (training.max_skipped_updates), the"
            f" last is {update.number} with the samples {samples} of the training data: look at these rows, or start"
            " again under another run_name with a lower optimizer.params.lr and drafter.init_from set to a checkpoint's"
            f" drafter in {self._directory.checkpoints}."
        )

    def _work_figures(self, update: Update, waits: np.ndarray) -> dict[str, Any]:
        """How much was done and how fast. Waiting times are means over the ranks of a role."""
        lengths = self._job.dataset.lengths
        batches = [lengths[samples] for _, samples in update.micro_batches() if len(samples)]
        tokens = sum(int(batch.sum()) for batch in batches)
        padded = sum(len(batch) * int(batch.max()) for batch in batches)
        seconds = self._pace.lap()
        roles = self._topology.roles
        drafter_wait, target_wait, target_busy = self._sum_over_ranks(*waits)
        left = self._curve.total - update.number
        return {
            "samples": sum(len(batch) for batch in batches),
            "tokens": tokens,
            "padded_tokens": padded,
            "padding_efficiency": tokens / padded,
            "tokens_per_second": tokens / seconds,
            "eta_seconds": left * (self._pace.smoothed or 0.0),
            "update_seconds": seconds,
            "target_wait_seconds": target_wait / roles.targets,
            "target_busy_seconds": target_busy / roles.targets,
            "drafter_wait_seconds": drafter_wait / roles.drafters,
            "drafter_busy_seconds": seconds - drafter_wait / roles.drafters,
        }

    def _sum_over_ranks(self, *numbers: float) -> list[float]:
        """float64 sums over the drafter ranks."""
        total = torch.tensor(numbers, dtype=torch.float64, device=self._topology.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.tolist()

    # ------------------------------------------------------------------------------------------- validation

    @torch.no_grad()
    def validate(self, work: Work, receive: Receive) -> None:
        """One step of a validation pass; its figures are logged after the last one. Raises as `train` does."""
        if self._sum_over_ranks(float(self._stopper.requested))[0]:
            raise StopRequestedError
        if self._validation is None:
            self._validation = MetricSums(self._step.objective.block_size, self._topology.device)
        finished = True
        try:
            for batch in work.micro_batches:
                features = receive(batch).features
                for part, result in self._step.results(self._engine.drafter, features, batch.blocks):
                    self._validation.add(part.block_lengths, result)
        except StopRequestedError:
            finished = False
        self._agree(finished)
        update = work.update
        if update.is_last:
            figures = self._validation.figures()
            self._validation = None
            is_sound = math.isfinite(figures["loss"])  # the largest of logits that are all nan is one of them too
            self.progress.note_validation(figures["acceptance_length"] if is_sound else math.nan)
            if self.progress.best_update is not None:
                figures["best_update"] = self.progress.best_update
            for sink in self._sinks:
                sink.log({"update": update.number, **{f"validation/{name}": value for name, value in figures.items()}})
            self._pace.start()

    # ------------------------------------------------------------------------------- before, between and after

    def rehearse(self) -> None:
        """Forward and backward of the heaviest micro-batch, without a step: running out of memory shows at once."""
        samples = self._job.heaviest()
        blocks = self._step.blocks(self._job.dataset, samples, epoch=0)
        width, tokens = self._job.feature_width, int(blocks.context_offsets[-1])
        features = torch.zeros(tokens, width, dtype=self._engine.dtype, device=self._topology.device)
        try:
            for _, result in self._step.results(self._engine, features, blocks):
                self._engine.backward(result.loss_sum, 1.0)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"The drafter's rank runs out of memory with {tokens} context tokens and {len(blocks.anchors)} anchors"
                f" ({error}): lower training.slice_tokens or batching.token_budget."
            ) from None
        self._engine.forget_gradients()

    def start(self) -> None:
        """The clock of the first update starts, once all updates are counted."""
        self._counting.join()
        if self._topology.drafter == 0:
            if self.progress.update:
                print(f"going on after update {self.progress.update}", flush=True)
            print(f"drafter on {ranks(self._topology.roles.drafters)}: {self._engine.drafter.describe()}", flush=True)
            if self._job.validation is not None and not self._job.settings.training.evaluate_every:
                print("note: the validation data are not used, since training.evaluate_every is 0", flush=True)
        self._pace.start()

    def save_if_due(self) -> None:
        """After an update, or after the last step of the validation pass that follows it: that may find it the best."""
        progress, every = self.progress, self._job.settings.training.save_every
        if progress.validated < progress.update and self._job.validates_after(
            progress.update, self._job.position(progress)
        ):
            return
        if progress.best_update == progress.update or (every and progress.update % every == 0):
            self.save()

    def save(self) -> None:
        """A checkpoint of the present state, unless there is one."""
        progress, keep = self.progress, self._job.settings.training.keep_checkpoints
        state = (progress.update, progress.validated)
        if not progress.update or state == self._last_saved:
            return
        if self._last_saved is None or self._last_saved[0] != progress.update:
            save_checkpoint(self._engine.engine, self._directory.checkpoints, progress, keep)
        elif self._topology.drafter == 0:
            replace_progress(self._directory.checkpoints, progress, keep)
        self._last_saved = state

    def say_stopped(self) -> None:
        if self._topology.drafter == 0:
            print(
                f"stopped by {self._stopper.reason} after update {self.progress.update}, which is saved: the same"
                " command (without --fresh) goes on from there",
                flush=True,
            )

    def write_result(self) -> None:
        """The run's drafter in the serving format: the best by validation acceptance, without validation the last."""
        if self._topology.drafter != 0:
            return
        progress, drafter = self.progress, self._engine.drafter
        result: dict[str, Any] = {"updates": progress.update, "drafter_of_update": progress.update}
        best = best_checkpoint(self._directory.checkpoints)
        if best is None:
            write_drafter(drafter.state_dict(), drafter.config, self._directory.drafter)
            which = "of the last update"
        else:
            config, weights = read_drafter(best / "drafter")
            write_drafter(weights, config, self._directory.drafter)
            result["drafter_of_update"] = progress.best_update
            result["validation_acceptance_length"] = progress.best_acceptance_length
            which = f"of update {progress.best_update}, the best with validation acceptance"
            which += f" {progress.best_acceptance_length:.3f}"
        self._directory.write_result(result)
        skipped = f", {progress.skipped} of them skipped" if progress.skipped else ""
        print(f"{progress.update} updates done{skipped}, drafter in {self._directory.drafter} ({which})", flush=True)

    def close(self) -> None:
        self._profiler.close()
        for sink in self._sinks:
            sink.close()

    def _open_sinks(self) -> list[Sink]:
        settings, path = self._job.settings, self._directory.path
        sinks: list[Sink] = [JsonLines(path / "metrics.jsonl", self.progress.update, self.progress.validated)]
        block = settings.deepspeed.get("wandb") or {}
        if block.get("enabled", False):
            run = WandbRun(block, path, settings.run_name, settings.to_dict(), self.progress.wandb_id)
            self.progress.wandb_id = run.run_id
            sinks.append(run)
        if self._engine.engine.monitor.enabled:
            sinks.append(DeepSpeedMonitor(self._engine.engine.monitor))
        sinks.append(Terminal(self.progress.update, settings.training.log_every))
        return sinks


def make_engine(job: Job, device: torch.device) -> DrafterEngine:
    """A drafter with its first weights under an engine."""
    settings = job.settings
    drafter = initial_drafter(job.drafter_config, settings.training.seed, settings.drafter.init_from)
    drafter.checkpoints_layers = settings.training.activation_checkpointing
    return DrafterEngine(drafter, settings.deepspeed, device)


def initial_drafter(config: Any, seed: int, init_from: str | None) -> DFlashDraftModel:
    """The drafter that a run starts from, fp32 on the CPU: random from the seed, or another one's weights."""
    drafter = DFlashDraftModel(config)
    if init_from is not None:
        drafter.load_state_dict(read_drafter(Path(init_from))[1])
    else:
        drafter.initialize(seed)
    return drafter


def make_step(job: Job, dtype: torch.dtype, device: torch.device) -> DrafterStep:
    training, config = job.settings.training, job.drafter_config
    objective = Objective(training.loss, config.block_size, resolve_gamma(training.loss_decay_gamma, config.block_size))
    embedding, head = job.target.embedding_and_head(dtype, device)
    return DrafterStep(embedding, head, config.dflash_config["mask_token_id"], objective, training)
