"""The sections of the block `ds_dflash` in ds_config.json: each setting's name, unit and default, and what must hold
within a section.

A validator raises `ValueError` with the whole clause that the user reads: what was given and what would be right.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ds_dflash.setting_errors import shown

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(lambda text: str(Path(text).expanduser()) if text[0] == "~" else text)]
Directory = Annotated[
    Path,
    BeforeValidator(lambda path: Path(path).expanduser() if path and isinstance(path, str | Path) else path),
]
LayerType = Literal["full_attention", "sliding_attention"]


def check_increasing(name: str, numbers: list[int] | None) -> None:
    for before, after in zip(numbers or [], (numbers or [])[1:], strict=False):
        if after <= before:
            raise ValueError(f"{name} must increase strictly, but {after} follows {before}")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


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
        min_length=1,
        description="tapped decoder layers, counted from 0, increasing; null: spread over the target's depth",
    )
    attn_implementation: Text | None = Field(
        default=None,
        description="attention kernel, as transformers names it; null: FlashAttention 2 if installed, else sdpa",
    )
    trust_remote_code: bool = Field(default=False, description="whether code that comes with the target may run")

    @model_validator(mode="after")
    def _layers_increase(self) -> Self:
        check_increasing("target.layer_ids", self.layer_ids)
        return self


class DrafterSettings(Section):
    """The shape of the drafter; what is null comes from the target."""

    num_hidden_layers: PositiveInt = Field(default=5, description="layers of the drafter")
    block_size: int = Field(default=16, ge=2, description="tokens in a block: the anchor and those drafted at once")
    mask_token_id: NonNegativeInt | None = Field(
        default=None, description="token id that stands for a drafted slot; null: from the target's tokenizer"
    )
    num_attention_heads: PositiveInt | None = Field(default=None, description="query heads; null: as the target")
    num_key_value_heads: PositiveInt | None = Field(
        default=None, description="key and value heads, a divisor of the query heads; null: as the target"
    )
    head_dim: int | None = Field(
        default=None, ge=2, multiple_of=2, description="width of a head, even; null: as the target"
    )
    intermediate_size: PositiveInt | None = Field(default=None, description="width of the MLP; null: as the target")
    layer_types: list[LayerType] | None = Field(
        default=None,
        description="full_attention or sliding_attention, one for each layer; null: all full_attention",
    )
    sliding_window: PositiveInt | None = Field(
        default=None, description="tokens that a sliding_attention layer sees back, at least block_size"
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
            raise ValueError("drafter.sliding_window is missing: drafter.layer_types has sliding_attention layers")
        if self.sliding_window < self.block_size:
            raise ValueError(
                f"drafter.sliding_window is {self.sliding_window}, but must be at least drafter.block_size, "
                f"{self.block_size}"
            )
        return self


class DataSettings(Section):
    """What is trained on."""

    train: PathText = Field(
        description="training data: a JSONL, JSON, Parquet or Arrow file, a directory, or a name on the hub"
    )
    validation: PathText | None = Field(default=None, description="validation data, as train; null: none of its own")
    validation_fraction: float | None = Field(
        default=None, gt=0, lt=1, description="share of the training rows held out for validation; null: none"
    )
    max_length: int = Field(default=4096, ge=2, description="tokens that are kept of a sample, from its start")
    supervise: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="tokens that are learnt: of all assistant turns, of the last one only, or all of them",
    )
    chat_template: Text | None = Field(default=None, description="chat template to use in place of the target's own")
    cache_dir: Directory = Field(default=Path("~/.cache/ds_dflash"), description="directory of the prepared datasets")
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
        min_length=1,
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
        check_increasing("batching.bucket_edges", self.bucket_edges)
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
    activation_checkpointing: bool = Field(
        default=False,
        description="whether the drafter's layers are computed again in the backward: a third of the memory",
    )
    loss: Literal["dflash", "dpace"] = Field(
        default="dflash",
        description="objective: dflash weighs slots by their place, dpace by how likely they are reached",
    )
    loss_decay_gamma: float | None = Field(
        default=None,
        ge=0,
        description="slots in which a slot's weight falls to 1/e (loss dflash); 0: no decay; null: by block_size",
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
    evaluate_every: NonNegativeInt = Field(default=0, description="updates from one validation to the next; 0: never")
    max_hours: float | None = Field(
        default=None, gt=0, description="hours after which the job saves and stops, to be gone on with; null: no limit"
    )
    max_skipped_updates: PositiveInt = Field(
        default=10, description="updates in a row without a finite gradient, each of them skipped, that end the run"
    )
    profile: bool = Field(default=False, description="whether each rank writes where its time goes: table and trace")

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
    drafter_ranks: PositiveInt = Field(default=1, description="ranks of each node that train the drafter, when split")
    channel_depth: PositiveInt = Field(
        default=2, description="micro-batches that a target rank may be ahead of the drafter"
    )
    transport: Literal["gloo", "nccl"] = Field(default="gloo", description="what carries the hidden states")
    timeout_seconds: PositiveInt = Field(
        default=1800,
        description="seconds after which a silent rank counts as dead; more than any load or save takes",
    )
