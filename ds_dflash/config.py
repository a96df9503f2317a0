"""The settings: ds_config.json read, overridden from the command line and validated.

The top-level keys are DeepSpeed's (`deepspeed_keys`), the block `ds_dflash` is made of the `sections`; what must
hold between sections is checked here. A file or an override that does not hold raises one `UserError` that lists
all that is wrong. Relative paths are relative to the current directory, as with the deepspeed launcher, and kept
as given.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from ds_dflash.deepspeed_keys import DEEPSPEED_KEYS, DeepSpeedKeys, with_defaults
from ds_dflash.errors import UserError
from ds_dflash.sections import (
    BatchingSettings,
    DataSettings,
    Directory,
    DrafterSettings,
    Section,
    TargetSettings,
    Text,
    TopologySettings,
    TrainingSettings,
)
from ds_dflash.setting_errors import clauses, dotted, shown

__all__ = [
    "BatchingSettings",
    "DataSettings",
    "DrafterSettings",
    "Settings",
    "TargetSettings",
    "TopologySettings",
    "TrainingSettings",
    "changed_settings",
    "describe_changes",
    "load_settings",
    "read_json",
]

BLOCK = "ds_dflash"


class Settings(Section):
    """All of ds_config.json: the sections of `ds_dflash`, and DeepSpeed's keys as the user wrote them."""

    target: TargetSettings
    drafter: DrafterSettings = DrafterSettings()
    data: DataSettings
    batching: BatchingSettings = BatchingSettings()
    training: TrainingSettings = TrainingSettings()
    topology: TopologySettings = TopologySettings()
    output_dir: Directory = Field(default=Path("runs"), description="directory that holds the runs")
    run_name: Text = Field(default="run", description="directory of this run in output_dir; the same name resumes")
    deepspeed: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @model_validator(mode="after")
    def _run_name_is_one_directory(self) -> Self:
        if self.run_name in (".", "..") or set(self.run_name) & set("/\\\0"):
            raise ValueError(
                f"run_name is {shown(self.run_name)}, but must be the plain name of a directory in output_dir"
            )
        return self

    @model_validator(mode="after")
    def _sections_hold_together(self) -> Self:
        if self.batching.oversize == "error" and self.data.max_length > self.batching.token_budget:
            raise ValueError(
                f"data.max_length is {self.data.max_length} and batching.token_budget is "
                f'{self.batching.token_budget}, but with batching.oversize "error" the budget must be at least '
                "max_length"
            )
        if self.training.slice_tokens < self.drafter.block_size:
            raise ValueError(
                f"training.slice_tokens is {self.training.slice_tokens}, but must hold a block, and "
                f"drafter.block_size is {self.drafter.block_size}"
            )
        if self.training.evaluate_every and not (self.data.validation or self.data.validation_fraction):
            raise ValueError(
                f"training.evaluate_every is {self.training.evaluate_every}, but there is no validation data: "
                "give data.validation or data.validation_fraction"
            )
        return self

    @property
    def learning_rate(self) -> float:
        """The learning rate at the end of the warmup: `optimizer.params.lr`."""
        return float(self.deepspeed["optimizer"]["params"]["lr"])

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that each target rank contributes to an update (A in the plan)."""
        return int(self.deepspeed["gradient_accumulation_steps"])

    def to_dict(self) -> dict[str, Any]:
        """The whole file again with every default filled in, JSON-able; loading it gives equal settings."""
        return {**self.deepspeed, BLOCK: self.model_dump(mode="json")}


SECTIONS: dict[str, type[Section]] = {
    "target": TargetSettings,
    "drafter": DrafterSettings,
    "data": DataSettings,
    "batching": BatchingSettings,
    "training": TrainingSettings,
    "topology": TopologySettings,
}
BLOCK_KEYS = (*SECTIONS, "output_dir", "run_name")
PLACES = {
    **{key: f'"{key}" at the top level of the file' for key in DEEPSPEED_KEYS},
    **{key: f"{BLOCK}.{key}" for key in BLOCK_KEYS},
    **{name: f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields},
}

MAY_CHANGE_ON_RESUME = (
    "training.num_epochs",
    "training.max_updates",
    "training.log_every",
    "training.save_every",
    "training.keep_checkpoints",
    "training.evaluate_every",
    "training.max_hours",
    "training.max_skipped_updates",
    "training.profile",
    "data.num_proc",
    "data.cache_dir",
    "topology",
    "output_dir",
    "run_name",
    "gradient_accumulation_steps",
    "steps_per_print",
    "wandb",
    "tensorboard",
    "csv_monitor",
    "comet",
)


def load_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings in a JSON file, with overrides "a.b=value" put in before anything is checked.

    Raises:
        UserError: the file cannot be read, or what it says does not hold; all problems in one sentence.
    """
    file = read_json(path)
    for override in overrides:
        _apply_override(file, override)
    block = file.pop(BLOCK, None)
    if not isinstance(block, dict):
        what = "is missing" if block is None else f"is {shown(block)}"
        raise UserError(f'{path}: the block "{BLOCK}" {what}, but must be an object with target and data')
    keys = with_defaults(file)
    problems = _problems(DeepSpeedKeys, keys)
    if "deepspeed" in block:
        problems.append(f"{BLOCK}.deepspeed is not a setting: DeepSpeed's keys stand at the top level of the file")
    problems += _problems(Settings, {**block, "deepspeed": keys})
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return Settings.model_validate({**block, "deepspeed": keys})


def _problems(model: type[BaseModel], values: dict[str, Any]) -> list[str]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        return clauses(error, model, PLACES)
    return []


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; duplicate keys, NaN and infinities are refused, all as `UserError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: the file cannot be read: {reason}") from None
    try:
        value = _parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: the file holds {shown(value)}, but must hold a JSON object")
    return value


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key {shown(name)} stands twice in one object")
    return dict(pairs)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that a setting can have")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        _refuse_constant(text)
    return number


def _apply_override(file: dict[str, Any], override: str) -> None:
    """Put "a.b=value" into the file: into our block if `a` is one of its keys, else among DeepSpeed's."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {override}: not of the form section.name=value, for example training.num_epochs=3")
    try:
        value = _parse_json(text)
    except json.JSONDecodeError:
        value = text
    except ValueError as error:
        raise UserError(f"--set {override}: {error}") from None
    if parts[0] in BLOCK_KEYS:
        parts = [BLOCK, *parts]
    place: Any = file
    for depth, part in enumerate(parts[:-1]):
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise UserError(f"--set {override}: {dotted(parts[: depth + 1])} is {shown(place)} and has no parts")
    place[parts[-1]] = value


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of the settings that differ and may not change on a resume, as --set takes them.

    `old` and `new` are what `Settings.to_dict` returned; a key that one of them lacks counts as null there.
    """
    before, after = _flat(old), _flat(new)
    return [
        name for name in sorted({**before, **after}) if before.get(name) != after.get(name) and not _may_change(name)
    ]


def describe_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The settings of `changed_settings` with both values: "training.seed was 0 and is now 1; ..."."""
    before, after = _flat(old), _flat(new)
    return "; ".join(
        f"{name} was {shown(before.get(name))} and is now {shown(after.get(name))}"
        for name in changed_settings(old, new)
    )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    keys = {key: value for key, value in settings.items() if key != BLOCK}
    return dict(_leaves({**keys, **settings[BLOCK]}))


def _leaves(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _may_change(name: str) -> bool:
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in MAY_CHANGE_ON_RESUME)
