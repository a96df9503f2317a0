"""The settings: what a file and its overrides mean, and the sentence for everything that does not hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_dflash.config import (
    SECTIONS,
    Settings,
    changed_settings,
    describe_changes,
    load_settings,
)
from ds_dflash.deepspeed_keys import REFUSED_KEYS
from ds_dflash.errors import UserError

RECIPE = Path(__file__).parent.parent / "ds_config.json"
MINIMAL = {"ds_dflash": {"target": {"path": "some/target"}, "data": {"train": "train.jsonl"}}}


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, json.dumps(MINIMAL))


def write(directory: Path, text: str) -> Path:
    path = directory / "settings.json"
    path.write_text(text, encoding="utf-8")
    return path


def problem_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_settings(path, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence.removeprefix(f"{path}: ")


# --- what holds ---------------------------------------------------------------------------------------------------


def test_the_recipe_at_the_top_level_is_the_production_run() -> None:
    settings = load_settings(RECIPE)
    assert settings.target.path == "Qwen/Qwen3.6-27B"
    assert settings.target.sharding == "zero3"
    assert settings.drafter.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
    assert (settings.drafter.block_size, settings.drafter.mask_token_id) == (16, 248070)
    assert (settings.batching.token_budget, settings.data.max_length) == (49152, 8192)
    assert (settings.training.num_epochs, settings.training.num_anchors) == (6, 64)
    assert (settings.learning_rate, settings.gradient_accumulation_steps) == (6e-4, 4)
    assert settings.deepspeed["wandb"]["enabled"]


def test_a_minimal_file_names_only_the_target_and_the_data(minimal: Path) -> None:
    settings = load_settings(minimal)
    assert settings.training.num_anchors == 64
    assert settings.training.anchors_per_1000_tokens is None
    assert settings.deepspeed["zero_optimization"] == {"stage": 1}
    assert settings.deepspeed["optimizer"]["type"] == "AdamW"
    assert settings.gradient_accumulation_steps == 1
    assert settings.run_name == "run"
    assert settings.data.cache_dir == Path("~/.cache/ds_dflash").expanduser()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["batching.grouping=bucketed"],
        ["batching.grouping=bucketed", "batching.bucket_edges=[0,100,200]"],
        ["training.num_anchors=null", "training.anchors_per_1000_tokens=20"],
        ["data.cache_dir=~/prepared", "output_dir=~/runs", "data.train=~/train.jsonl", "zero_optimization={}"],
    ],
)
def test_the_resolved_settings_load_again_as_equal_settings(tmp_path: Path, overrides: list[str]) -> None:
    settings = load_settings(RECIPE, overrides)
    again = load_settings(write(tmp_path, json.dumps(settings.to_dict())))
    assert again == settings
    assert again.to_dict() == settings.to_dict()


def test_every_setting_says_what_it_is() -> None:
    fields = {name: field for model in SECTIONS.values() for name, field in model.model_fields.items()}
    fields |= {name: Settings.model_fields[name] for name in ("output_dir", "run_name")}
    assert [name for name, field in fields.items() if not field.description] == []


def test_settings_cannot_be_changed_after_loading(minimal: Path) -> None:
    settings = load_settings(minimal)
    with pytest.raises(ValueError, match="frozen"):
        settings.training.seed = 3  # type: ignore[misc]


def test_reading_the_settings_imports_neither_torch_nor_deepspeed() -> None:
    check = "import sys, ds_dflash.config; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    repository = RECIPE.parent
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60, cwd=repository)


# --- overrides ----------------------------------------------------------------------------------------------------


def test_an_override_goes_to_our_block_or_to_deepspeed_by_its_first_part() -> None:
    settings = load_settings(
        RECIPE,
        ["batching.token_budget=8192", "optimizer.params.lr=3e-4", "run_name=second", "wandb.group=a=b", "bf16={}"],
    )
    assert settings.batching.token_budget == 8192
    assert settings.learning_rate == 3e-4
    assert settings.deepspeed["optimizer"]["params"]["weight_decay"] == 0.0
    assert settings.run_name == "second"
    assert settings.deepspeed["wandb"]["group"] == "a=b"
    assert settings.deepspeed["bf16"] == {}


def test_the_last_override_of_a_setting_wins(minimal: Path) -> None:
    assert load_settings(minimal, ["training.seed=1", "training.seed=2"]).training.seed == 2


def test_an_override_may_supply_what_the_file_lacks(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, "{}"), ["target.path=t", "data.train=d"])
    assert (settings.target.path, settings.data.train) == ("t", "d")


@pytest.mark.parametrize("override", ["training.seed", "=3", "training..seed=3", ".seed=3", "training.=3", ""])
def test_a_malformed_override_is_refused(minimal: Path, override: str) -> None:
    assert problem_of(minimal, override).startswith(f"--set {override}: not of the form section.name=value")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.type.name=3", '--set optimizer.type.name=3: optimizer.type is "AdamW" and has no parts'),
        ("training.seed=NaN", "--set training.seed=NaN: NaN is not a number that a setting can have"),
        ("training.warmup_ratio=1e999", "--set training.warmup_ratio=1e999: 1e999 is not a number"),
        ('target={"path":"a","path":"b"}', 'the key "path" stands twice in one object'),
        ("ds_dflash=3", 'the block "ds_dflash" is 3, but must be an object'),
    ],
)
def test_an_override_that_cannot_be_put_in_is_refused(override: str, sentence: str) -> None:
    assert sentence in problem_of(RECIPE, override)


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"bf16": {},\n  "fp16" 3}', "line 2, column 10: not JSON: Expecting ':' delimiter"),
        ("", "line 1, column 1: not JSON: Expecting value"),
        ('{"a": 1,}', "column 9: not JSON"),
        ("[1, 2]", "the file holds [1, 2], but must hold a JSON object"),
        ("{}", 'the block "ds_dflash" is missing'),
        ('{"ds_dflash": []}', 'the block "ds_dflash" is [], but must be an object with target and data'),
        ('{"bf16": {}, "bf16": {}}', 'the key "bf16" stands twice in one object'),
        ('{"ds_dflash": {"training": {"warmup_ratio": NaN}}}', "NaN is not a number that a setting can have"),
        ('{"gradient_clipping": Infinity}', "Infinity is not a number that a setting can have"),
        ('{"gradient_clipping": 1e400}', "1e400 is not a number that a setting can have"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in problem_of(write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert problem_of(tmp_path / "none.json") == "there is no such file"
    assert problem_of(tmp_path) == "the file cannot be read: Is a directory"
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe4"}')
    assert problem_of(tmp_path / "latin.json") == "the file cannot be read: it is not UTF-8 text"


# --- our block ----------------------------------------------------------------------------------------------------

BAD_SETTINGS = [
    # unknown names
    ("batching.token_bugdet=5", "batching.token_bugdet is not a setting: did you mean batching.token_budget?"),
    ("data.token_budget=5", "data.token_budget is not a setting: did you mean batching.token_budget?"),
    ("token_budget=5", "token_budget is not a setting: did you mean batching.token_budget?"),
    ("batchin.token_budget=5", "batchin is not a setting: did you mean ds_dflash.batching?"),
    ("ds_dflash.optimizer={}", 'optimizer is not a setting: did you mean "optimizer" at the top level of the file?'),
    ("ds_dflash.deepspeed={}", "ds_dflash.deepspeed is not a setting: DeepSpeed's keys stand at the top level"),
    ("topology.xyzzy=1", "topology.xyzzy is not a setting: topology has mode, drafter_ranks, channel_depth"),
    ("xyzzy=1", "xyzzy is not a setting: no setting has a name like it"),
    # kinds of value
    ("target.path=7", "target.path is 7, but must be text"),
    ("target.path=", 'target.path is "", but must be text that is not empty'),
    ("target=7", "target is 7, but must be a JSON object"),
    ("output_dir=7", "output_dir is 7, but must be text that is not empty"),
    ("target.layer_ids=3", "target.layer_ids is 3, but must be a list"),
    ("target.trust_remote_code=1", "target.trust_remote_code is 1, but must be true or false"),
    ("training.num_epochs=1.5", "training.num_epochs is 1.5, but must be a whole number"),
    ("training.num_epochs=true", "training.num_epochs is true, but must be a whole number"),
    ("training.num_epochs=three", 'training.num_epochs is "three", but must be a whole number'),
    ("training.warmup_ratio=x", 'training.warmup_ratio is "x", but must be a number'),
    ("training.loss=mse", 'training.loss is "mse", but must be "dflash" or "dpace"'),
    ("target.dtype=int8", 'target.dtype is "int8", but must be "bfloat16", "float16", "float32" or "auto"'),
    # ranges
    ("training.num_epochs=0", "training.num_epochs is 0, but must be at least 1"),
    ("training.warmup_ratio=1", "training.warmup_ratio is 1, but must be below 1"),
    ("training.min_lr_ratio=1.1", "training.min_lr_ratio is 1.1, but must be at most 1"),
    ("training.anchors_per_1000_tokens=0", "training.anchors_per_1000_tokens is 0, but must be above 0"),
    ("training.keep_checkpoints=0", "training.keep_checkpoints is 0, but must be at least 1"),
    ("training.save_every=-1", "training.save_every is -1, but must be at least 0"),
    ("drafter.block_size=1", "drafter.block_size is 1, but must be at least 2"),
    ("drafter.head_dim=7", "drafter.head_dim is 7, but must be a multiple of 2"),
    ("topology.drafter_ranks=0", "topology.drafter_ranks is 0, but must be at least 1"),
    ("data.validation_fraction=1", "data.validation_fraction is 1, but must be below 1"),
    ("batching.bucket_edges=[]", "batching.bucket_edges is [], but must be a list of at least 1"),
    ("target.layer_ids=[-1, 3]", "target.layer_ids.0 is -1, but must be at least 0"),
    # settings that do not go together
    ("target.layer_ids=[3, 1]", "target.layer_ids must increase strictly, but 1 follows 3"),
    ("drafter.num_key_value_heads=5", "drafter.num_attention_heads is 32, which is not a multiple of "
     "drafter.num_key_value_heads, 5"),
    ("drafter.num_hidden_layers=3", "drafter.layer_types names 5 layers, but drafter.num_hidden_layers is 3"),
    ("drafter.sliding_window=8", "drafter.sliding_window is 8, but must be at least drafter.block_size, 16"),
    ("drafter.sliding_window=null", "drafter.sliding_window is missing: drafter.layer_types has sliding_attention"),
    ("training.anchors_per_1000_tokens=20", "training.num_anchors is 64 and training.anchors_per_1000_tokens is "
     "20.0, but only one of them can be given"),
    ("batching.num_buckets=4", 'batching.num_buckets is 4, but batching.grouping is "pooled" and only "bucketed"'),
    ("training.evaluate_every=100", "training.evaluate_every is 100, but there is no validation data"),
    ("training.slice_tokens=8", "training.slice_tokens is 8, but must hold a block, and drafter.block_size is 16"),
    ("run_name=a/b", 'run_name is "a/b", but must be the plain name of a directory in output_dir'),
    ("run_name=..", 'run_name is "..", but must be the plain name of a directory'),
]  # fmt: skip


@pytest.mark.parametrize(("override", "sentence"), BAD_SETTINGS)
def test_a_setting_that_does_not_hold_is_named_with_what_would_be_right(override: str, sentence: str) -> None:
    assert problem_of(RECIPE, override).startswith(sentence)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["batching.oversize=error", "batching.token_budget=4096"],
            "data.max_length is 8192 and batching.token_budget is 4096, but with batching.oversize",
        ),
        (
            ["data.validation=v.jsonl", "data.validation_fraction=0.1"],
            'data.validation is "v.jsonl" and data.validation_fraction is 0.1, but only one of them can be given',
        ),
        (
            ["batching.grouping=bucketed", "batching.num_buckets=4", "batching.bucket_edges=[0, 9]"],
            "batching.num_buckets is 4 and batching.bucket_edges is [0, 9], but only one of them can be given",
        ),
        (
            ["batching.grouping=bucketed", "batching.bucket_edges=[0, 9, 9]"],
            "batching.bucket_edges must increase strictly, but 9 follows 9",
        ),
        (
            ["training.loss=dpace", "training.loss_decay_gamma=7"],
            'training.loss_decay_gamma is 7.0, but training.loss is "dpace", which has no decay',
        ),
    ],
)
def test_two_settings_that_clash_are_named_with_both_values(overrides: list[str], sentence: str) -> None:
    assert problem_of(RECIPE, *overrides).startswith(sentence)


def test_all_problems_of_a_file_are_named_at_once() -> None:
    sentence = problem_of(RECIPE, "training.num_epochs=0", "data.max_length=x", "optimzer={}")
    for name in ("optimzer is not a setting", "training.num_epochs is 0", 'data.max_length is "x"'):
        assert name in sentence


def test_what_must_be_given_is_named_when_it_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, '{"ds_dflash": {"target": {}}}')
    assert problem_of(path) == "target.path is missing; data is missing"


# --- DeepSpeed's keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(REFUSED_KEYS))
def test_a_deepspeed_key_that_cannot_hold_is_refused_with_the_reason(key: str) -> None:
    assert problem_of(RECIPE, f"{key}=1") == f"{key} cannot be used: {REFUSED_KEYS[key]}"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimzer={}", "optimzer is not a setting: did you mean optimizer?"),
        ("gradient_cliping=1", "gradient_cliping is not a setting: did you mean gradient_clipping?"),
        ("zero_optimization.stag=1", "zero_optimization.stag is not a setting: did you mean zero_optimization.stage?"),
        (
            "zero_optimization.max_live_parameters=1",
            "zero_optimization.max_live_parameters is not a setting: did you mean "
            "zero_optimization.stage3_max_live_parameters?",
        ),
        ("wandb.name=x", "wandb.name is not a setting: wandb has enabled, group, team, project"),
        ("bf16.enable=true", "bf16.enable is not a setting: did you mean bf16.enabled?"),
        ("optimizer.parms={}", "optimizer.parms is not a setting: did you mean optimizer.params?"),
        ("bf16.enabled=auto", 'bf16.enabled is "auto", which only Hugging Face\'s trainer resolves: give a value'),
        ("gradient_clipping=auto", 'gradient_clipping is "auto", which only Hugging Face\'s trainer resolves'),
        ("bf16.enabled=1", "bf16.enabled is 1, but must be true or false"),
        ("bf16=true", "bf16 is true, but must be a JSON object"),
        ("zero_optimization=true", "zero_optimization is true, but must be a JSON object"),
        ("gradient_clipping=-1", "gradient_clipping is -1, but must be at least 0"),
        ("gradient_accumulation_steps=0", "gradient_accumulation_steps is 0, but must be at least 1"),
        ("gradient_accumulation_steps=1.5", "gradient_accumulation_steps is 1.5, but must be a whole number"),
        ("fp16.enabled=true", "fp16.enabled is true, but its loss scaling does not go with"),
        ("zero_optimization.stage=2", "zero_optimization.stage is 2, but must be 1: from stage 2"),
        ("zero_optimization.stage=3", "zero_optimization.stage is 3, but must be 1"),
        ("zero_optimization.stage=0", "zero_optimization.stage is 0, but must be 1: stage 0 has"),
        ("zero_optimization.overlap_comm=true", "zero_optimization.overlap_comm is true, but"),
        ("zero_optimization.compute_grad_norm=false", "zero_optimization.compute_grad_norm is false, but"),
        ("data_types.grad_accum_dtype=bf16", 'data_types.grad_accum_dtype is "bf16", but must be "fp32"'),
        ("optimizer={}", "optimizer.type is missing; optimizer.params is missing"),
        ("optimizer.params={}", "optimizer.params.lr is missing"),
        ("optimizer.params.lr=0", "optimizer.params.lr is 0, but must be a number above 0"),
        ("optimizer.params.weigth_decay=0", "optimizer.params.weigth_decay is not a parameter of AdamW: "
         "did you mean weight_decay?"),
        ("optimizer.params.max_grad_norm=1", "optimizer.params.max_grad_norm is not supported: gradient_clipping"),
        ("optimizer.type=AdmaW", 'optimizer.type is "AdmaW", which DeepSpeed does not know: did you mean AdamW?'),
        ("optimizer.type=Lamb", "optimizer.type Lamb needs the loss scaling of fp16"),
    ],
)  # fmt: skip
def test_a_deepspeed_value_that_does_not_hold_is_named(override: str, sentence: str) -> None:
    assert problem_of(RECIPE, override).startswith(sentence)


@pytest.mark.parametrize(
    "overrides",
    [
        ["zero_optimization.stage3_prefetch_bucket_size=5e7", "zero_optimization.reduce_bucket_size=500000000"],
        ["fp16.enabled=false", "fp16.loss_scale=0"],
        ["data_types.keep_in_fp32_modules=auto"],
        ["optimizer.type=adam", "optimizer.params.torch_adam=true", "optimizer.params.betas=[0.9, 0.95]"],
        ["optimizer.type=SGD", "optimizer.params.momentum=0.9", "zero_allow_untested_optimizer=true"],
        ["tensorboard.enabled=true", "steps_per_print=10", "flops_profiler.enabled=true"],
    ],
)
def test_deepspeed_keys_that_hold_are_handed_on_as_written(overrides: list[str]) -> None:
    settings = load_settings(RECIPE, overrides)
    for override in overrides:
        name, _, text = override.partition("=")
        value = settings.deepspeed
        for part in name.split("."):
            value = value[part]
        assert value == (json.loads(text) if text[0] in "[0123456789tf" else text)


# --- what a resume may change -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.num_epochs=9", "training.max_updates=10"],
        ["training.log_every=5", "training.save_every=5", "training.keep_checkpoints=5"],
        ["data.validation_fraction=null", "data.num_proc=3", "data.cache_dir=elsewhere", "output_dir=there"],
        ["topology.mode=split", "topology.drafter_ranks=2", "topology.timeout_seconds=9"],
        ["wandb.enabled=false", "wandb.group=g", "gradient_accumulation_steps=8"],
    ],
)
def test_a_resume_may_change_how_long_where_and_how_often(overrides: list[str]) -> None:
    old, new = load_settings(RECIPE).to_dict(), load_settings(RECIPE, overrides).to_dict()
    assert changed_settings(old, new) == []
    assert describe_changes(old, new) == ""


def test_a_resume_may_not_change_what_is_learnt() -> None:
    overrides = [
        "training.seed=1",
        "optimizer.params.lr=1e-3",
        "gradient_clipping=2.0",
        "batching.token_budget=9000",
        "target.path=x",
        "bf16.immediate_grad_update=true",
    ]
    old, new = load_settings(RECIPE).to_dict(), load_settings(RECIPE, overrides).to_dict()
    names = sorted(override.partition("=")[0] for override in overrides)
    assert changed_settings(old, new) == names
    assert changed_settings(new, old) == names


def test_a_refused_change_is_told_with_both_values() -> None:
    old = load_settings(RECIPE).to_dict()
    new = load_settings(RECIPE, ["training.seed=1", "target.layer_ids=[1, 2]"]).to_dict()
    assert describe_changes(old, new) == (
        "target.layer_ids was null and is now [1, 2]; training.seed was 0 and is now 1"
    )
