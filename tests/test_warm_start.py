"""`drafter.init_from`: training goes on from a drafter with the loss that it had, whoever wrote its directory."""

import json
import shutil

import pytest
import tiny
import torch
from drafters import make_drafter
from safetensors.torch import save_file
from test_export_check import as_published

from ds_dflash.config import load_settings
from ds_dflash.drafter import DFlashDraftModel
from ds_dflash.errors import UserError
from ds_dflash.export import write_drafter
from ds_dflash.job import Job
from ds_dflash.target import Target
from ds_dflash.topology import Roles
from ds_dflash.trainer import initial_drafter, make_step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    tiny.write_target(directory / "target", rope_theta=1e6)
    tiny.write_chats(directory / "train.jsonl", 12)
    return directory


@pytest.fixture
def open_job(inputs, tmp_path):
    def open_job(**drafter) -> Job:
        content = tiny.settings(
            inputs / "target",
            inputs / "train.jsonl",
            tmp_path / "runs",
            drafter={name: value for name, value in drafter.items() if value is not None},
            data={"cache_dir": str(inputs / "cache")},
        )
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return Job.open(load_settings(path), Roles(1, 2, True, 1, 1))

    return open_job


@pytest.fixture
def trained(open_job):
    """A drafter with weights that are not those of the start, of the shape that the settings ask for."""
    return make_drafter(open_job().drafter_config, seed=7)


def first_loss(job: Job, drafter: DFlashDraftModel) -> float:
    """The summed loss of the first micro-batch, in fp32."""
    step = make_step(job, torch.float32, CPU)
    samples = job.heaviest()
    target = Target.load(job.target, job.settings.target, job.layer_ids, CPU, zero=None)
    blocks = step.blocks(job.dataset, samples, epoch=0)
    with torch.no_grad():
        features = target.capture(job.ids(samples))
        return sum(float(result.loss_sum) for _, result in step.results(drafter, features, blocks))


def rounded(drafter: DFlashDraftModel) -> DFlashDraftModel:
    copy = DFlashDraftModel(drafter.config)
    copy.load_state_dict({name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()})
    return copy


def start(job: Job) -> DFlashDraftModel:
    """The drafter that a run of this job starts from."""
    return initial_drafter(job.drafter_config, job.settings.training.seed, job.settings.drafter.init_from)


FORMS = ["as written", "speculators", "of transformers 5", "of transformers 4", "short", "with code", "shards", "links"]


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_starts_from_a_drafter_has_exactly_the_loss_of_its_rounded_weights(
    tmp_path, inputs, open_job, trained, form
):
    directory = tmp_path / "drafter"
    if form == "speculators":
        write_drafter(trained.state_dict(), trained.config, directory, open_job().target, str(inputs / "target"))
    else:
        write_drafter(trained.state_dict(), trained.config, directory)
        as_published(directory, form)
    job = open_job(init_from=str(directory))
    loss = first_loss(job, start(job))
    assert loss == first_loss(open_job(), rounded(trained))
    assert loss != first_loss(open_job(), start(open_job()))
    assert not (tmp_path / "it_ran").exists()


def test_unrounded_weights_give_exactly_the_loss_that_training_had(tmp_path, open_job, trained):
    directory = tmp_path / "drafter"
    write_drafter(trained.state_dict(), trained.config, directory)
    save_file(trained.state_dict(), directory / "model.safetensors")
    job = open_job(init_from=str(directory))
    assert first_loss(job, start(job)) == first_loss(open_job(), trained)


SETTINGS = {
    "block_size": (4, 6),
    "num_hidden_layers": (2, 3),
    "num_attention_heads": (4, 2),
    "num_key_value_heads": (2, 1),
    "head_dim": (8, 16),
    "intermediate_size": (64, 48),
    "rope_theta": (1e6, 5000.0),
    "mask_token_id": (3, 4),
}


@pytest.mark.parametrize(("name", "values"), SETTINGS.items(), ids=SETTINGS.keys())
def test_a_drafter_of_another_shape_is_refused_with_the_setting_to_change(tmp_path, open_job, trained, name, values):
    has, asked = values
    directory = tmp_path / "drafter"
    write_drafter(trained.state_dict(), trained.config, directory)
    with pytest.raises(UserError) as caught:
        open_job(init_from=str(directory), **{name: asked})
    assert f"{name} {has} where {asked} is asked for" in str(caught.value)
    assert f"drafter.{name} to {has}" in str(caught.value)
    open_job(init_from=str(directory), **{name: has})


def test_every_difference_is_in_the_one_sentence(tmp_path, open_job, trained):
    directory = tmp_path / "drafter"
    write_drafter(trained.state_dict(), trained.config, directory)
    with pytest.raises(UserError, match=r"set drafter\.block_size to 4 and drafter\.rope_theta to 1000000\.0\.$"):
        open_job(init_from=str(directory), block_size=6, rope_theta=5000.0)


def test_a_window_matters_only_where_a_layer_slides(tmp_path, open_job, trained):
    directory = tmp_path / "drafter"
    write_drafter(trained.state_dict(), trained.config, directory)
    open_job(init_from=str(directory), sliding_window=8)
    slides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    with pytest.raises(UserError, match=r"drafter\.layer_types to \[\"full_attention\", \"full_attention\"\]"):
        open_job(init_from=str(directory), **slides)
    sliding = open_job(**slides)
    write_drafter(start(sliding).state_dict(), sliding.drafter_config, tmp_path / "sliding")
    open_job(init_from=str(tmp_path / "sliding"), **slides)
    with pytest.raises(UserError, match=r"sliding_window 8 where 12 is asked for: set drafter\.sliding_window to 8\."):
        open_job(init_from=str(tmp_path / "sliding"), **(slides | {"sliding_window": 12}))


def test_a_drafters_own_norm_epsilon_is_kept(tmp_path, open_job, trained):
    """No setting names it and the target's may differ: with the target's the loss would jump in silence."""
    trained.config.rms_norm_eps = 0.1
    drafter = DFlashDraftModel(trained.config)
    drafter.load_state_dict(trained.state_dict())
    write_drafter(drafter.state_dict(), drafter.config, tmp_path / "drafter")
    job = open_job(init_from=str(tmp_path / "drafter"))
    assert first_loss(job, start(job)) == first_loss(open_job(), rounded(drafter))
    trained.config.rms_norm_eps = 1e-6
    assert first_loss(job, start(job)) != first_loss(open_job(), rounded(trained))


def test_a_drafter_with_numbers_that_are_not_finite_is_no_start(tmp_path, open_job, trained):
    directory = tmp_path / "drafter"
    trained.fc.weight.data[0, 0] = torch.nan
    write_drafter(trained.state_dict(), trained.config, directory)
    with pytest.raises(UserError, match=r"fc\.weight has 1 numbers that are not finite"):
        start(open_job(init_from=str(directory)))


def test_the_given_drafter_is_left_as_it_is(tmp_path, open_job, trained):
    directory = tmp_path / "drafter"
    write_drafter(trained.state_dict(), trained.config, directory)
    shutil.copytree(directory, tmp_path / "before")
    start(open_job(init_from=str(directory)))
    for file in directory.iterdir():
        assert file.read_bytes() == (tmp_path / "before" / file.name).read_bytes()
