"""The settings: ds_config.json read, overridden from the command line and validated, with all cross-field checks.

The top-level keys are DeepSpeed's (`deepspeed_keys`), the block `ds_dflash` is described by the models below. A
file or an override that does not hold raises one `UserError` that lists all that is wrong. Relative paths are
relative to the current directory, as with the deepspeed launcher, and kept as given.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from ds_dflash.deepspeed_keys import DEEPSPEED_KEYS, DeepSpeedKeys, with_defaults
from ds_dflash.errors import UserError
from ds_dflash.setting_errors import clauses, dotted, shown

BLOCK = "ds_dflash"

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[
    Text, AfterValidator(lambda text: str(Path(text).expanduser()) if text[0] == "~" else text)
]
Directory = Annotated[
    Path,
    BeforeValidator(lambda path: Path(path).expanduser() if path and isinstance(path, str | Path) else path),
]
LayerType = Literal["full_attention", "sliding_attention"]


def _check_increasing(name: str, numbers: list[int] | None) -> None:
    for before, after in zip(numbers or [], (numbers or [])[1:], strict=False):
        if after <= before:
            raise ValueError(f"{name} must increase strictly, but {after} follows {before}")


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )


class TargetSettings(Section):
    """The frozen target and how it is spread over its ranks."""

    path: PathText = Field(description="directory of the target, or its name on the Hugging Face hub")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        default="bfloat16", description="number format of the target's weights; auto: as in its checkpoint"
    )
    sharding: Literal["zero3", "none"] = Field(
        default="zero3",
        description="zero3: each target rank holds a part of the weights; none: each holds all",
    )
    layer_ids: list[NonNegativeInt] | None = Field(
        default=None,
        description="tapped decoder layers, counted from 0, increasing; null: spread over the target's depth",
    )
    attn_implementation: Text | None = Field(
        default=None,
        description="attention kernel that transformers uses for the target; null: its own choice",
    )
    trust_remote_code: bool = Field(
        default=False, description="whether code that comes with the target may run"
    )

    @model_validator(mode="after")
    def _layers_increase(self) -> Self:
        _check_increasing("target.layer_ids", self.layer_ids)
        return self


class DrafterSettings(Section):
    """The shape of the drafter; what is null comes from the target."""

    num_hidden_layers: PositiveInt = Field(default=5, description="layers of the drafter")
    block_size: int = Field(
        default=16, ge=2, description="tokens in a block: the anchor and those drafted at once"
    )
    mask_token_id: NonNegativeInt | None = Field(
        default=None, description="token id that stands for a drafted slot; null: from the target's tokenizer"
    )
    num_attention_heads: PositiveInt | None = Field(
        default=None, description="query heads; null: as the target"
    )
    num_key_value_heads: PositiveInt | None = Field(
        default=None, description="key and value heads, a divisor of the query heads; null: as the target"
    )
    head_dim: int | None = Field(
        default=None, ge=2, multiple_of=2, description="width of a head, even; null: as the target"
    )
    intermediate_size: PositiveInt | None = Field(
        default=None, description="width of the MLP; null: as the target"
    )
    layer_types: list[LayerType] | None = Field(
        default=None,
        description="full_attention or sliding_attention, one for each layer; null: all full_attention",
    )
    sliding_window: PositiveInt | None = Field(
        default=None, description="tokens that a sliding layer sees back, at least block_size"
    )
    rope_theta: float | None = Field(
        default=None, gt=0, description="base of the rotary embedding; null: as the target"
    )
    init_from: PathText | None = Field(
        default=None,
        description="directory of a drafter whose weights training starts from; null: random weights",
    )

    @model_validator(mode="after")
    def _shape_holds(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads and groups and heads % groups:
            raise ValueError(
                f"drafter.num_attention_heads is {heads}, which is not a multiple of "
                f"drafter.num_key_value_heads, {groups}"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"drafter.layer_types names {len(self.layer_types)} layers, but drafter.num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        return self

    @model_validator(mode="after")
    def _window_holds_a_block(self) -> Self:
        if "sliding_attention" not in (self.layer_types or ()):
            return self
        if self.sliding_window is None:
            raise ValueError(
                "drafter.sliding_window is missing: drafter.layer_types has sliding_attention layers"
            )
        if self.sliding_window < self.block_size:
            raise ValueError(
                f"drafter.sliding_window is {self.sliding_window}, but must be at least drafter.block_size, "
                f"{self.block_size}"
            )
        return self


class DataSettings(Section):
    """What is trained on."""

    train: PathText = Field(
        description="training data: a JSONL or Parquet file, a directory or a dataset's name"
    )
    validation: PathText | None = Field(
        default=None, description="validation data, as train; null: none of its own"
    )
    validation_fraction: float | None = Field(
        default=None, gt=0, lt=1, description="share of the training rows held out for validation; null: none"
    )
    max_length: int = Field(
        default=4096, ge=2, description="tokens that are kept of a sample, from its start"
    )
    supervise: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="tokens that are learnt: of all assistant turns, of the last one only, or all of them",
    )
    chat_template: Text | None = Field(
        default=None, description="chat template to use in place of the target's own"
    )
    cache_dir: Directory = Field(
        default=Path("~/.cache/ds_dflash"), description="directory of the prepared datasets"
    )
    num_proc: PositiveInt | None = Field(
        default=None, description="processes that prepare the data; null: one per CPU core"
    )

    @model_validator(mode="after")
    def _one_source_of_validation(self) -> Self:
        if self.validation is not None and self.validation_fraction is not None:
            raise ValueError(
                f"data.validation is {shown(self.validation)} and data.validation_fraction is "
                f"{self.validation_fraction}, but only one of them can be given"
            )
        return self


class BatchingSettings(Section):
    """Which samples share a micro-batch, and in which order micro-batches come."""

    token_budget: PositiveInt = Field(
        default=16384, description="padded tokens of a micro-batch at most, on one target rank"
    )
    max_batch_size: PositiveInt | None = Field(
        default=None, description="samples of a micro-batch at most; null: no limit"
    )
    grouping: Literal["pooled", "bucketed", "shuffled", "sorted"] = Field(
        default="pooled", description="how samples of like length are brought together"
    )
    ordering: Literal["stratified", "shuffled"] = Field(
        default="stratified", description="stratified: each update has short and long samples in proportion"
    )
    num_buckets: PositiveInt | None = Field(
        default=None,
        description="length buckets of the grouping bucketed, with edges fitted to the data; null: 6",
    )
    bucket_edges: list[NonNegativeInt] | None = Field(
        default=None,
        description="edges of the length buckets, in tokens, increasing, in place of num_buckets",
    )
    oversize: Literal["truncate", "drop", "error"] = Field(
        default="truncate", description="what happens to a sample that is longer than token_budget"
    )

    @model_validator(mode="before")
    @classmethod
    def _six_buckets_unless_told(cls, section: Any) -> Any:
        if isinstance(section, dict) and section.get("grouping") == "bucketed":
            given = section.get("num_buckets") is not None or section.get("bucket_edges") is not None
            return section if given else {**section, "num_buckets": 6}
        return section

    @model_validator(mode="after")
    def _buckets_belong_to_bucketed(self) -> Self:
        given = [name for name in ("num_buckets", "bucket_edges") if getattr(self, name) is not None]
        if given and self.grouping != "bucketed":
            raise ValueError(
                f"batching.{given[0]} is {shown(getattr(self, given[0]))}, but batching.grouping is "
                f'"{self.grouping}" and only "bucketed" has buckets'
            )
        if len(given) == 2:
            raise ValueError(
                f"batching.num_buckets is {self.num_buckets} and batching.bucket_edges is "
                f"{shown(self.bucket_edges)}, but only one of them can be given: set the other to null"
            )
        _check_increasing("batching.bucket_edges", self.bucket_edges)
        return self


class TrainingSettings(Section):
    """How long, on what and at which rate the drafter learns; the optimizer itself is DeepSpeed's."""

    num_epochs: PositiveInt = Field(default=6, description="passes over the training data")
    max_updates: PositiveInt | None = Field(
        default=None, description="optimizer updates at most; null: all of num_epochs"
    )
    num_anchors: PositiveInt | None = Field(
        default=None,
        description="anchors drawn in a sample at most, in each epoch; 64 where neither way is given",
    )
    anchors_per_1000_tokens: float | None = Field(
        default=None, gt=0, description="anchors for 1000 tokens of a sample, in place of num_anchors"
    )
    slice_tokens: PositiveInt = Field(
        default=8192, description="block tokens the drafter works on at once; fewer take less memory"
    )
    loss: Literal["dflash", "dpace"] = Field(
        default="dflash",
        description="objective: dflash weighs slots by their place, dpace by how likely they are reached",
    )
    loss_decay_gamma: float | None = Field(
        default=None,
        ge=0,
        description="slots in which the weight of the loss dflash falls to 1/e; 0: no decay; null: by block_size",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="course of the learning rate after the warmup"
    )
    warmup_ratio: float = Field(
        default=0.04, ge=0, lt=1, description="share of all updates in which the learning rate rises"
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="last learning rate as a share of optimizer.params.lr"
    )
    seed: NonNegativeInt = Field(default=0, description="seed of weights, batches and anchors")
    log_every: PositiveInt = Field(default=1, description="updates from one log line to the next")
    save_every: NonNegativeInt = Field(
        default=500, description="updates from one checkpoint to the next; 0: at the end only"
    )
    keep_checkpoints: PositiveInt = Field(default=2, description="newest checkpoints that are kept")
    evaluate_every: NonNegativeInt = Field(
        default=0, description="updates from one validation to the next; 0: never"
    )

    @model_validator(mode="before")
    @classmethod
    def _64_anchors_unless_told(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        given = section.get("num_anchors") is not None or section.get("anchors_per_1000_tokens") is not None
        return section if given else {**section, "num_anchors": 64}

    @model_validator(mode="after")
    def _one_number_of_anchors(self) -> Self:
        if self.num_anchors is not None and self.anchors_per_1000_tokens is not None:
            raise ValueError(
                f"training.num_anchors is {self.num_anchors} and training.anchors_per_1000_tokens is "
                f"{self.anchors_per_1000_tokens}, but only one of them can be given: set the other to null"
            )
        return self

    @model_validator(mode="after")
    def _decay_belongs_to_dflash(self) -> Self:
        if self.loss == "dpace" and self.loss_decay_gamma:
            raise ValueError(
                f'training.loss_decay_gamma is {self.loss_decay_gamma}, but training.loss is "dpace", '
                "which has no decay: set it to null"
            )
        return self


class TopologySettings(Section):
    """Which ranks hold the target, which the drafter, and how hidden states travel between them."""

    mode: Literal["auto", "split", "colocated"] = Field(
        default="auto",
        description="split: target and drafter on ranks of their own; auto: split from 2 ranks on",
    )
    drafter_ranks: PositiveInt = Field(
        default=1, description="ranks of each node that train the drafter, when split"
    )
    channel_depth: PositiveInt = Field(
        default=2, description="micro-batches that a target rank may be ahead of the drafter"
    )
    transport: Literal["gloo", "nccl"] = Field(default="gloo", description="what carries the hidden states")
    timeout_seconds: PositiveInt = Field(
        default=1800,
        description="seconds after which a silent rank counts as dead; more than any load or save takes",
    )


class Settings(Section):
    """All of ds_config.json: the sections of `ds_dflash`, and DeepSpeed's keys as the user wrote them."""

    target: TargetSettings
    drafter: DrafterSettings = DrafterSettings()
    data: DataSettings
    batching: BatchingSettings = BatchingSettings()
    training: TrainingSettings = TrainingSettings()
    topology: TopologySettings = TopologySettings()
    output_dir: Directory = Field(default=Path("runs"), description="directory that holds the runs")
    run_name: Text = Field(
        default="run", description="directory of this run in output_dir; the same name resumes"
    )
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
                f'{self.batching.token_budget}, but with batching.oversize "error" the budget must hold max_length'
            )
        if self.training.slice_tokens < self.drafter.block_size:
            raise ValueError(
                f"training.slice_tokens is {self.training.slice_tokens}, but must hold a block, and "
                f"drafter.block_size is {self.drafter.block_size}"
            )
        if self.training.evaluate_every and not (self.data.validation or self.data.validation_fraction):
            raise ValueError(
                f"training.evaluate_every is {self.training.evaluate_every}, but there is no validation data: give "
                "data.validation or data.validation_fraction"
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


def load_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings in a JSON file, with overrides "a.b=value" put in before anything is checked.

    Raises:
        UserError: the file cannot be read, or what it says does not hold; all problems in one sentence.
    """
    file = read_json(path)
    if not isinstance(file.get(BLOCK), dict):
        what = f"is {shown(file[BLOCK])}" if BLOCK in file else "is missing"
        raise UserError(
            f'{path}: the block "{BLOCK}" {what}, but must be an object with at least target and data'
        )
    for override in overrides:
        _apply_override(file, override)
    block = file.pop(BLOCK)
    keys = with_defaults(file)
    problems = _problems(DeepSpeedKeys, keys)
    if "deepspeed" in block:
        problems.append(
            f"{BLOCK}.deepspeed is not a setting: DeepSpeed's keys stand at the top level of the file"
        )
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
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite
    )


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
    return number if abs(number) != float("inf") else _refuse_constant(text)


def _apply_override(file: dict[str, Any], override: str) -> None:
    """Put "a.b=value" into the file: into our block if `a` is one of its keys, else among DeepSpeed's."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise UserError(
            f"--set {override}: not of the form section.name=value, for example training.num_epochs=3"
        )
    try:
        value = _parse_json(text)
    except json.JSONDecodeError:
        value = text
    except ValueError as error:
        raise UserError(f"--set {override}: {error}") from None
    place: Any = file[BLOCK] if parts[0] in BLOCK_KEYS else file
    for depth, part in enumerate(parts[:-1]):
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise UserError(
                f"--set {override}: {dotted(parts[: depth + 1])} is {shown(place)} and has no parts"
            )
    place[parts[-1]] = value
