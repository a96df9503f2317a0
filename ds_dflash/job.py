"""A job: everything that all ranks know alike before the first forward, and the walk through its updates.

Settings, target, data and batches are opened and checked here, so that a user's mistake ends every rank within
seconds, before any process group exists. The walk is what both roles follow: no message says what comes next.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from ds_dflash.batching import BatchSampler, EpochPlan, PlanSettings, Position
from ds_dflash.checkpoint import Progress
from ds_dflash.config import Settings
from ds_dflash.data import PreparedDataset, load_tokenizer, prepare
from ds_dflash.data.subset import Rows, hold_out
from ds_dflash.drafter import make_config
from ds_dflash.errors import UserError
from ds_dflash.export import check_fits, read_drafter_config
from ds_dflash.target import TargetCheckpoint, open_target
from ds_dflash.topology import Roles


@dataclass(frozen=True, eq=False)
class Update:
    """One optimizer update, or one step of a validation pass, of a plan.

    number: optimizer updates done when it is done (counted from 1 over all epochs); index: in its epoch's plan.
    """

    number: int
    plan: EpochPlan
    index: int
    validates: bool = False

    @cached_property
    def rounds(self) -> list[list[np.ndarray]]:
        """Sample ids [rounds][target ranks], some possibly empty."""
        return self.plan.update(self.index)

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def is_last(self) -> bool:
        """Whether it ends its plan."""
        return self.plan.ends_with(self.index)

    def micro_batches(self) -> Iterator[tuple[int, np.ndarray]]:
        """(t, sample ids) in plan order, t = round * ranks + rank."""
        ranks = self.plan.ranks
        for turn, micro_batches in enumerate(self.rounds):
            for rank, samples in enumerate(micro_batches):
                yield turn * ranks + rank, samples


@dataclass(frozen=True, eq=False)
class Job:
    """What a run trains on and how, the same on every rank."""

    settings: Settings
    roles: Roles
    target: TargetCheckpoint
    drafter_config: Qwen3Config
    dataset: Rows
    sampler: BatchSampler
    validation: Rows | None
    validation_sampler: BatchSampler | None
    fingerprint: dict[str, Any]

    @classmethod
    def open(cls, settings: Settings, roles: Roles) -> "Job":
        """Open and check everything; raises UserError. The first process to need the data prepares it."""
        target = open_target(settings.target)
        tokenizer = load_tokenizer(target.path, settings.target.trust_remote_code)
        config = drafter_config(settings, target, tokenizer)
        prepared = prepare_data(settings, settings.data.train, target)
        dataset: Rows = prepared
        validation: Rows | None = None
        if settings.data.validation is not None:
            validation = prepare_data(settings, settings.data.validation, target)
        elif settings.data.validation_fraction is not None:
            dataset, validation = hold_out(dataset, settings.data.validation_fraction, settings.training.seed)
        plan = _plan_settings(settings, target)
        rounds = settings.gradient_accumulation_steps
        if rounds * roles.targets > MOST_MICRO_BATCHES:
            raise UserError(
                f"gradient_accumulation_steps {rounds} on {roles.targets} target ranks makes updates of"
                f" {rounds * roles.targets} micro-batches: at most {MOST_MICRO_BATCHES} are supported."
            )
        sampler = BatchSampler(dataset.lengths, plan, ranks=roles.targets, rounds=rounds)
        validation_sampler = None
        if validation is not None:
            validation_sampler = BatchSampler(validation.lengths, plan, ranks=roles.targets, rounds=rounds)
        fingerprint = {**sampler.fingerprint, "training data": prepared.fingerprint}
        return cls(settings, roles, target, config, dataset, sampler, validation, validation_sampler, fingerprint)

    def digest(self) -> str:
        """A hash of what all ranks must have alike: the settings (paths of caches aside), data and tapped layers."""
        settings = self.settings.to_dict()
        del settings["ds_dflash"]["data"]["cache_dir"]
        facts = json.dumps([settings, self.fingerprint, self.target.text.to_dict()], sort_keys=True, default=str)
        return hashlib.sha256(facts.encode()).hexdigest()

    @property
    def layer_ids(self) -> list[int]:
        return self.drafter_config.dflash_config["target_layer_ids"]

    @property
    def feature_width(self) -> int:
        return len(self.layer_ids) * self.drafter_config.hidden_size

    def ids(self, samples: np.ndarray, update: Update | None = None) -> list[np.ndarray]:
        """Token ids int64 [length] of samples of the training data, or of the data of `update`."""
        data = self.dataset if update is None else self.data_of(update)
        return [ids for ids, _ in data.rows(samples)]

    def heaviest(self) -> np.ndarray:
        """Sample ids of the micro-batch with most padded tokens of the first epoch."""
        return self.plan(self.sampler.start()).heaviest()

    def data_of(self, update: Update) -> Rows:
        """The dataset that the sample ids of an update refer to."""
        data = self.validation if update.validates else self.dataset
        assert data is not None
        return data

    def ends_at(self, update: int, position: Position) -> bool:
        """Whether a run that has done `update` updates and stands at `position` is finished."""
        training = self.settings.training
        return position.epoch >= training.num_epochs or (
            training.max_updates is not None and update >= training.max_updates
        )

    def walk(self, progress: Progress) -> Iterator[Update]:
        """All updates from `progress` on, each followed by the validation pass that is due after it."""
        return self._walk(progress.update, self.position(progress), progress.validated)

    def _walk(self, done: int, position: Position, validated: int) -> Iterator[Update]:
        if validated < done and self.validates_after(done, position):  # a pass that was cut short
            yield from self.validation_pass(done)
        while not self.ends_at(done, position):
            plan = self.plan(position)
            while position.epoch == plan.epoch and not self.ends_at(done, position):
                update = Update(done + 1, plan, position.update)
                yield update
                done, position = update.number, plan.position_after(update.index)
                if self.validates_after(done, position):
                    yield from self.validation_pass(done)

    def position(self, progress: Progress) -> Position:
        """Where the data stands."""
        if not progress.position:
            return self.sampler.start()
        return self.sampler.resume(Position.from_dict(progress.position))

    def plan(self, position: Position) -> EpochPlan:
        """The epoch that a position is in."""
        *past, (product, _) = self.sampler.resume(position).segments
        return _plan(self.sampler, Position(position.epoch, (*past, (product, 0))))

    def validation_pass(self, done: int) -> Iterator[Update]:
        """The same validation batches every time."""
        assert self.validation_sampler is not None
        plan = _plan(self.validation_sampler, self.validation_sampler.start())
        for index in range(plan.num_updates):
            yield Update(done, plan, index, validates=True)

    def validates_after(self, done: int, position: Position) -> bool:
        """Whether a validation pass is due when `done` updates are done."""
        every = self.settings.training.evaluate_every
        if not every or self.validation is None:
            return False
        return done % every == 0 or self.ends_at(done, position)

    @property
    def counts_all_epochs(self) -> bool:
        return len(self.dataset) * self.settings.training.num_epochs <= CHEAP_SAMPLES

    def count_ahead(self, epoch: int) -> None:
        """Count the updates of every epoch, or where that is not cheap of this one; `updates_after` is quick then."""
        epochs = range(self.settings.training.num_epochs) if self.counts_all_epochs else [epoch]
        for number in epochs:
            self.sampler.count_updates(number)

    def updates_in(self, plan: EpochPlan) -> int:
        """Updates of the epoch that a plan is of, exact."""
        return plan.num_updates if plan.first else self.sampler.count_updates(plan.epoch)

    def updates_after(self, done: int, position: Position) -> int:
        """Updates that are left, exact where epochs are cheap to plan; else the current one stands in for the later."""
        training = self.settings.training
        if self.ends_at(done, position):
            return 0
        plan = self.plan(position)
        left = self.updates_in(plan) - position.update
        later = range(position.epoch + 1, training.num_epochs)
        if self.counts_all_epochs:
            left += sum(self.sampler.count_updates(epoch) for epoch in later)
        else:
            left += len(later) * self.updates_in(plan)
        if training.max_updates is not None:
            left = min(left, training.max_updates - done)
        return left


MOST_MICRO_BATCHES = 100_000
"""Micro-batches of an update; more are a slip of the pen."""

CHEAP_SAMPLES = 20_000_000
"""Samples, over all epochs, up to which every epoch is counted ahead (about 0.2 s a million)."""


@lru_cache(maxsize=3)
def _plan(sampler: BatchSampler, position: Position) -> EpochPlan:
    """Kept, because the two walks of a drafter rank (to receive ahead, to train) are in the same epochs."""
    return sampler.plan(position)


def drafter_config(
    settings: Settings, target: TargetCheckpoint, tokenizer: PreTrainedTokenizerBase | None
) -> Qwen3Config:
    """The configuration of the drafter that the settings ask for, or of the one it starts from."""
    drafter = settings.drafter
    layer_ids = target.layer_ids(settings.target.layer_ids, drafter.num_hidden_layers)
    mask_token_id = target.mask_token_id(drafter.mask_token_id, tokenizer)
    config = make_config(drafter, target.text, layer_ids, mask_token_id)
    if drafter.init_from is not None:
        try:
            given = read_drafter_config(Path(drafter.init_from))
            check_fits(given, target, Path(drafter.init_from))
        except UserError as error:
            raise UserError(f"drafter.init_from {error}") from None
        _check_same_shape(config, given, drafter.init_from)
        config.rms_norm_eps = given.rms_norm_eps  # a part of what its weights compute, and no setting asks for another
    return config


SETTING_OF = {
    "num_hidden_layers": "drafter.num_hidden_layers",
    "num_attention_heads": "drafter.num_attention_heads",
    "num_key_value_heads": "drafter.num_key_value_heads",
    "head_dim": "drafter.head_dim",
    "intermediate_size": "drafter.intermediate_size",
    "block_size": "drafter.block_size",
    "layer_types": "drafter.layer_types",
    "sliding_window": "drafter.sliding_window",
    "rope_theta": "drafter.rope_theta",
    "mask_token_id": "drafter.mask_token_id",
    "target_layer_ids": "target.layer_ids",
}
"""The setting for each field of a configuration that a drafter's weights were trained with."""


def _check_same_shape(config: Qwen3Config, given: Qwen3Config, directory: str) -> None:
    if config.hidden_size != given.hidden_size:
        raise UserError(
            f"drafter.init_from {directory} has hidden_size {given.hidden_size} and the target {config.hidden_size}: it"
            " was trained for another target."
        )
    asked, has = _shape(config), _shape(given)
    wrong = [name for name in SETTING_OF if asked[name] != has[name]]
    if wrong:
        raise UserError(
            f"drafter.init_from {directory} has "
            + " and ".join(
                f"{name} {json.dumps(has[name])} where {json.dumps(asked[name])} is asked for" for name in wrong
            )
            + ": set "
            + " and ".join(f"{SETTING_OF[name]} to {json.dumps(has[name])}" for name in wrong)
            + "."
        )


def _shape(config: Qwen3Config) -> dict[str, Any]:
    """The fields of SETTING_OF. The window is None where no layer slides: Qwen3Config drops it then."""
    fields = {name: getattr(config, name) for name in SETTING_OF if hasattr(config, name)}
    own = {name: config.dflash_config[name] for name in ("mask_token_id", "target_layer_ids")}
    rope_theta = (config.rope_parameters or {})["rope_theta"]
    return fields | own | {"rope_theta": rope_theta}


def prepare_data(settings: Settings, source: str, target: TargetCheckpoint) -> PreparedDataset:
    data, batching = settings.data, settings.batching
    max_length = data.max_length
    if batching.oversize == "truncate":  # cut here, so that the row accounting sees what is lost
        max_length = min(max_length, batching.token_budget)
    return prepare(
        source,
        tokenizer_path=target.path,
        max_length=max_length,
        supervise=data.supervise,
        chat_template=data.chat_template,
        cache_dir=data.cache_dir,
        num_proc=data.num_proc,
        vocab_size=target.text.vocab_size,
        trust_remote_code=settings.target.trust_remote_code,
    )


def _plan_settings(settings: Settings, target: TargetCheckpoint) -> PlanSettings:
    batching = settings.batching
    return PlanSettings(
        token_budget=batching.token_budget,
        max_batch_size=batching.max_batch_size,
        grouping=batching.grouping,
        ordering=batching.ordering,
        num_buckets=batching.num_buckets or 6,
        bucket_edges=tuple(batching.bucket_edges) if batching.bucket_edges else None,
        quadratic_share=quadratic_share(target.text),
        seed=settings.training.seed,
        oversize=batching.oversize,
    )


def quadratic_share(text: PretrainedConfig) -> float:
    """q in the cost n * L * (1 + q * L) of a micro-batch: attention over the context against all matrices, per token.

    Causal attention costs 2 * width multiply-adds a key in every full layer (half the keys, two products), a matrix
    one a weight; projections are counted as those of full attention in every layer.
    """
    heads, hidden = text.num_attention_heads, text.hidden_size
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    experts = getattr(text, "num_experts_per_tok", None)
    inner = text.moe_intermediate_size * experts if experts else text.intermediate_size
    weights = text.num_hidden_layers * hidden * (2 * heads * head_dim + 2 * kv_heads * head_dim + 3 * inner)
    return types.count("full_attention") * heads * head_dim / weights
