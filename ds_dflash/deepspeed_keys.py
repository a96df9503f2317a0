"""The top-level keys of ds_config.json: DeepSpeed's own, and those of them that this trainer can honour.

DeepSpeed passes over a misspelt top-level key in silence, so its names are written down here (as of 0.19.8; a
test compares them with the installed one) and anything else is an error. The blocks that configure the
drafter's engine are checked value by value, the rest is handed on as it is. DeepSpeed itself is not imported:
that takes seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ds_dflash.setting_errors import nearest_or_all, shown

REFUSED_KEYS = {
    "train_batch_size": (
        "micro-batches vary in size: batching.token_budget and gradient_accumulation_steps take its place"
    ),
    "train_micro_batch_size_per_gpu": "micro-batches vary in size: batching.token_budget takes its place",
    "scheduler": (
        "its total number of steps is not known ahead: training.schedule, training.warmup_ratio and "
        "training.min_lr_ratio take its place"
    ),
    "managed_gradient_accumulation": "the trainer sets it itself, since micro-batch counts are uneven",
    "gradient_allreduce_op": "the loss is normalised for gradients that are averaged over the drafter ranks",
    "bfloat16": "it is the old name of bf16",
    "torch_autocast": "the drafter trains in bf16 with fp32 master weights, or in fp32: bf16 takes its place",
    "compile": "DeepCompile cannot accumulate gradients over uneven micro-batch counts",
    "autotuning": "it tunes train_micro_batch_size_per_gpu: set batching.token_budget by ds-dflash plan",
    "data_efficiency": "batches come from the epoch plan: the section batching takes its place",
    "curriculum_learning": "batches come from the epoch plan: the section batching takes its place",
    "dataloader_drop_last": "the epoch plan never drops a sample",
    "checkpoint": "checkpoints are written and read by the trainer, on any number of ranks",
    "datastates_ckpt": "checkpoints are written by the trainer: training.save_every takes its place",
    "pipeline": "the drafter is trained data-parallel only",
    "tensor_parallel": "the drafter is trained data-parallel only",
    "expert_parallel": "the drafter is trained data-parallel only",
    "use_data_before_expert_parallelism": "the drafter is trained data-parallel only",
    "hybrid_engine": "the drafter is only trained here, not served",
    "weight_quantization": "the drafter is only trained here, not served",
    **dict.fromkeys(
        (
            "amp",
            "compression_training",
            "eigenvalue",
            "elasticity",
            "graph_harvesting",
            "nebula",
            "progressive_layer_drop",
            "quantize_training",
            "sparse_attention",
            "sparse_gradients",
        ),
        "DeepSpeed has removed it",
    ),
}

DEEPSPEED_OPTIMIZERS = frozenset({"Adagrad", "Adam", "AdamW", "Lion", "MuAdam", "MuAdamW", "Muon", "MuSGD"})
TORCH_OPTIMIZERS = frozenset(
    {"ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)  # DeepSpeed looks other names up in torch.optim, and asks for zero_allow_untested_optimizer
ADAM_PARAMS = frozenset(
    {
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "amsgrad",
        "adam_w_mode",
        "torch_adam",
        "foreach",
        "fused",
        "maximize",
        "fp32_optimizer_states",
        "set_grad_none",
    }
)


Count = Annotated[int, Field(ge=0, strict=False)]  # DeepSpeed's sizes are often written as 5e8


class DeepSpeedBlock(BaseModel):
    """A JSON object whose names and kinds of value are DeepSpeed's.

    Only checked, never read: what is handed on is the object as the user wrote it, so defaults have no effect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class OptimizerBlock(DeepSpeedBlock):
    type: str = Field(description="optimizer of the drafter")
    params: dict[str, Any] = Field(description="arguments of the optimizer, of which lr is needed")
    legacy_fusion: bool = False

    @field_validator("type")
    @classmethod
    def _known_type(cls, name: str) -> str:
        if name.lower() == "lamb":
            raise ValueError("optimizer.type Lamb needs the loss scaling of fp16, which is not supported: use AdamW")
        if name.lower() not in map(str.lower, DEEPSPEED_OPTIMIZERS) and name not in TORCH_OPTIMIZERS:
            raise ValueError(
                f'optimizer.type is "{name}", which DeepSpeed does not know: '
                f"{nearest_or_all(name, DEEPSPEED_OPTIMIZERS | TORCH_OPTIMIZERS)}"
            )
        return name

    @field_validator("params")
    @classmethod
    def _learning_rate(cls, params: dict[str, Any]) -> dict[str, Any]:
        if "max_grad_norm" in params:
            raise ValueError("optimizer.params.max_grad_norm is not supported: gradient_clipping takes its place")
        if "lr" not in params:
            raise ValueError("optimizer.params.lr is missing: the learning rate at the end of the warmup")
        rate = params["lr"]
        if isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0:
            raise ValueError(f"optimizer.params.lr is {shown(rate)}, but must be a number above 0")
        return params


class Bf16Block(DeepSpeedBlock):
    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class Fp16Block(DeepSpeedBlock):
    enabled: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _off(cls, block: Any) -> Any:
        if isinstance(block, dict) and block.get("enabled"):
            raise ValueError(
                "fp16.enabled is true, but its loss scaling does not go with a loss normalised over an update: "
                "use bf16, or neither for fp32"
            )
        return {}  # its other settings have no effect while it is off


class WandbBlock(DeepSpeedBlock):
    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "ds_dflash"


class ZeroBlock(DeepSpeedBlock):
    """`stage` is the drafter engine's; the `stage3_*` keys tune the target's ZeRO-3."""

    stage: int = 1
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Count = 0
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Count = 0
    overlap_comm: bool = False
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: dict[str, Any] | None = None
    offload_optimizer: dict[str, Any] | None = None
    zenflow: dict[str, Any] | None = None
    sub_group_size: Count = 0
    stage3_prefetch_bucket_size: Count = 0
    stage3_param_persistence_threshold: Count = 0
    stage3_model_persistence_threshold: Count = 0
    stage3_max_live_parameters: Count = 0
    stage3_max_reuse_distance: Count = 0
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_module_granularity_threshold: Count = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: Count = 0
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _what_uneven_micro_batches_allow(self) -> "ZeroBlock":
        if self.stage == 0:
            raise ValueError(
                "zero_optimization.stage is 0, but must be 1: stage 0 has no fp32 masters under bf16 and takes steps "
                "whose gradient is not finite"
            )
        if self.stage != 1:
            raise ValueError(
                f"zero_optimization.stage is {self.stage}, but must be 1: from stage 2 on every backward reduces "
                "gradients, and drafter ranks have unequal numbers of them"
            )
        if self.overlap_comm:
            raise ValueError("zero_optimization.overlap_comm is true, but DeepSpeed offers it from stage 2 on only")
        if not self.compute_grad_norm:
            raise ValueError("zero_optimization.compute_grad_norm is false, but grad_norm is one of the metrics")
        return self


class DataTypesBlock(DeepSpeedBlock):
    grad_accum_dtype: Literal["fp32"] = "fp32"
    param_dtype: str | None = None
    buffer_dtype: str | None = None
    keep_in_fp32_modules: Any = "auto"  # DeepSpeed itself says in a sentence what it accepts


class DeepSpeedKeys(DeepSpeedBlock):
    """The keys that may stand at the top level of ds_config.json, beside `ds_dflash`."""

    optimizer: OptimizerBlock
    gradient_accumulation_steps: int = Field(
        default=1,
        ge=1,
        strict=True,
        description="micro-batches that each target rank contributes to an update",
    )
    gradient_clipping: float = Field(default=1.0, ge=0, description="largest gradient norm, 0: no limit")
    bf16: Bf16Block = Bf16Block()
    fp16: Fp16Block = Fp16Block()
    zero_optimization: ZeroBlock = ZeroBlock()
    wandb: WandbBlock = WandbBlock()
    data_types: DataTypesBlock = DataTypesBlock()
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = None
    seq_parallel_communication_data_type: Literal["fp16", "bf16", "fp32"] | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: float = Field(default=1.0, gt=0)
    disable_allgather: bool = False
    steps_per_print: int | None = Field(default=None, ge=1)
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_python_gc: bool = False
    log_level: str | None = None
    vocabulary_size: int | None = None
    activation_checkpointing: dict[str, Any] = {}
    aio: dict[str, Any] = {}
    comms_logger: dict[str, Any] = {}
    flops_profiler: dict[str, Any] = {}
    timers: dict[str, Any] = {}
    tensorboard: dict[str, Any] = {}
    csv_monitor: dict[str, Any] = {}
    comet: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _nothing_refused(cls, keys: dict[str, Any]) -> dict[str, Any]:
        problems = [f"{key} cannot be used: {REFUSED_KEYS[key]}" for key in keys if key in REFUSED_KEYS]
        problems += [
            f'{name} is "auto", which only Hugging Face\'s trainer resolves: give a value' for name in find_auto(keys)
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return keys

    @model_validator(mode="after")
    def _adam_takes_these_params(self) -> "DeepSpeedKeys":
        unknown = sorted(self.optimizer.params.keys() - ADAM_PARAMS)
        if unknown and self.optimizer.type.lower() in ("adam", "adamw"):
            raise ValueError(
                f"optimizer.params.{unknown[0]} is not a parameter of {self.optimizer.type}: "
                f"{nearest_or_all(unknown[0], ADAM_PARAMS)}"
            )
        return self


DEEPSPEED_KEYS = frozenset(DeepSpeedKeys.model_fields)


def with_defaults(keys: dict[str, Any]) -> dict[str, Any]:
    """A copy of the user's top-level keys with those filled in that should not be left to DeepSpeed.

    Its own defaults (no optimizer, no number of steps, ZeRO stage 0, a clipping that it does not tell) do not fit here.
    """
    zero = keys.get("zero_optimization", {})
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "weight_decay": 0.0}},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        **keys,
        "zero_optimization": {"stage": 1, **zero} if isinstance(zero, dict) else zero,
    }


def find_auto(value: Any, name: str = "") -> list[str]:
    """Dotted names of all values that are "auto", which only Hugging Face's trainer resolves."""
    if value == "auto" and name != "data_types.keep_in_fp32_modules":
        return [name]
    if not isinstance(value, dict):
        return []
    return [found for key, inner in value.items() for found in find_auto(inner, f"{name}.{key}".lstrip("."))]
