"""Reports of users of such trainers that are about fidelity, each by its scenario; about runs: test_reports_runs.py.

15  masters and step counter       here
16  high accuracy, no acceptance   here
17  leaks through other anchors    test_train_serve.py, test_nothing_at_or_after_an_anchor_reaches_its_block_...
18  partial rotary embedding       here
19  tapped layers off by one       here; the default formula in test_target.py
20  captures that differ           test_target_kinds.py, ..._have_the_features_they_have_alone, test_a_second_...
21  mask id outside the embedding  here; where the id comes from in test_target.py
22  empty parameters under ZeRO-3  test_target_kinds.py, test_a_drafter_built_beside_a_zero3_target_is_whole_and_learns
"""

import json
from dataclasses import dataclass, replace
from functools import cache

import learning
import numpy as np
import pytest
import reference
import small_targets
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from drafters import make_drafter
from learning import CPU, engine_of, engine_world, random_rows

from ds_dflash.attention import BlockLayout
from ds_dflash.checkpoint import Progress, load_checkpoint, save_checkpoint
from ds_dflash.decode import Drafter, SpeculativeDecoder, greedy
from ds_dflash.errors import UserError
from ds_dflash.export import load_drafter, read_drafter, write_drafter
from ds_dflash.metrics import MetricSums
from ds_dflash.target import Target, load_whole, open_target

# ------------------------------------------------------------------------------------------ 15: masters, step counter


def norms_of_one():
    """A drafter with norms of 1 whose matrices are exact in bf16, as an engine's first masters are."""
    drafter = make_drafter()
    for parameter in drafter.parameters():
        parameter.data = torch.ones_like(parameter) if parameter.dim() == 1 else parameter.bfloat16().float()
    return drafter


def gradient_of(number):
    """Of every weight in an update: exact in bf16, and another one each time."""
    return [1.0, -0.5, 2.0, 0.25][number % 4]


def update(engine, number):
    total = sum(parameter.float().sum() for parameter in engine.drafter.parameters())
    engine.backward(total * gradient_of(number), 1.0)
    engine.step(engine.base_learning_rate)


def updated_in_fp32(drafter, updates):
    """The weights, and both moments of `norm.weight`, after torch's own AdamW in fp32."""
    optimizer = torch.optim.AdamW(drafter.parameters(), 1e-4, weight_decay=0.0)
    for number in range(updates):
        for parameter in drafter.parameters():
            parameter.grad = torch.full_like(parameter, gradient_of(number))
        optimizer.step()
    state = optimizer.state[drafter.norm.weight]
    return drafter.state_dict(), [state["exp_avg"], state["exp_avg_sq"]]


def masters(engine):
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in engine.drafter.named_parameters()}


def moments(engine):
    parameter = engine.drafter.norm.weight
    return [safe_get_full_optimizer_state(parameter, name).clone() for name in ("exp_avg", "exp_avg_sq")]


def step_counters(engine):
    return [state["step"] for state in engine.engine.optimizer.optimizer.state.values()]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


BF16 = {"bf16": {"enabled": True}}


def test_15_bf16_weights_at_1_move_at_a_learning_rate_of_1e_4():
    """bf16 weights at 1.0 stalled at lr 1e-4: a step there is 0.004, so only fp32 masters can add up smaller ones."""
    with engine_world():
        engine = engine_of(norms_of_one(), 1e-4, **BF16)
        norm = engine.drafter.norm.weight
        assert norm.dtype == torch.bfloat16
        moved = []
        for _ in range(60):
            engine.backward(norm.float().sum(), 1.0)
            engine.step(1e-4)
            moved.append((1 - safe_get_full_fp32_param(norm)).mean())
        torch.testing.assert_close(torch.stack(moved), 1e-4 * torch.arange(1, 61), rtol=2e-2, atol=0)
        assert (norm < 1).all()
        assert torch.equal(norm, safe_get_full_fp32_param(norm).bfloat16())


def test_15_masters_moments_and_a_step_counter_past_256_are_those_of_fp32_and_survive_a_resume(tmp_path):
    """In bf16 a counter stays at 256, and with it the correction of the moments' bias."""
    with engine_world():
        engine = engine_of(norms_of_one(), 1e-4, **BF16)
        for number in range(290):
            update(engine, number)
        checkpoint = save_checkpoint(engine.engine, tmp_path, Progress(update=290, position={"epoch": 0}), keep=1)
        resumed = engine_of(make_drafter(seed=7), 1e-4, **BF16)
        load_checkpoint(resumed.engine, checkpoint)
        assert same(masters(resumed), masters(engine))
        assert same(resumed.drafter.state_dict(), engine.drafter.state_dict())
        for number in range(290, 300):
            update(engine, number)
            update(resumed, number)
        expected, expected_moments = updated_in_fp32(norms_of_one(), 300)
        for each in (engine, resumed):
            assert {tensor.dtype for tensor in masters(each).values()} == {torch.float32}
            assert [float(counter) for counter in step_counters(each)] == [300.0]
            torch.testing.assert_close(moments(each), expected_moments, rtol=1e-5, atol=0)
            torch.testing.assert_close(masters(each), dict(expected), rtol=0, atol=1e-5)
        assert same(masters(resumed), masters(engine))


# ------------------------------------------------------------------------------------------ 16: accuracy, acceptance

PROMPT, ANSWER, BLOCK_SIZE, TAPS = 6, 20, 4, [1, 4]


@dataclass
class Outcome:
    """What training says of its blocks, and what decoding accepts."""

    accuracy: float
    acceptance_length: float
    served: float


class ShiftedStep(learning.DrafterStep):
    """Whose labels are one token late."""

    def blocks(self, dataset, samples, epoch):
        blocks = super().blocks(dataset, samples, epoch)
        late = np.roll(blocks.labels, -1, axis=1)
        late[:, 0] = blocks.labels[:, 0]  # the anchor's token is an input
        return replace(blocks, labels=late)


@pytest.fixture(scope="module")
def written_by_target(tmp_path_factory):
    """kind -> (checkpoint, capturing target, whole target, rows of a prompt and the target's own answer)."""
    root = tmp_path_factory.mktemp("targets")

    @cache
    def make(kind):
        model = small_targets.build(small_targets.KINDS[kind])
        settings = learning.target_settings(small_targets.write(model, root / kind, max_shard_size="20KB"))
        checkpoint = open_target(settings)
        whole = load_whole(checkpoint, settings, CPU)
        prompts = [torch.from_numpy(ids) for ids in random_rows(*[PROMPT] * 3)]
        rows = [greedy(whole, ids, max_new_tokens=ANSWER, stop_ids=()).output_ids.numpy() for ids in prompts]
        return checkpoint, Target.load(checkpoint, settings, TAPS, CPU, zero=None), whole, rows

    return make


def train_and_serve(checkpoint, capturing, whole, rows, fault=None) -> Outcome:
    config = learning.config_for(checkpoint, TAPS, block_size=BLOCK_SIZE, num_hidden_layers=1, intermediate_size=96)
    step, drafter = (
        learning.step_for(checkpoint, config, num_anchors=20, slice_tokens=1000),
        learning.new_drafter(config),
    )
    is_answer = np.arange(PROMPT + ANSWER) >= PROMPT
    data = learning.Samples(rows, [~is_answer if fault == "mask" else is_answer] * len(rows))
    if fault == "head":
        step = replace(step, head=torch.randn(step.head.shape, generator=torch.Generator().manual_seed(0)))
    if fault == "labels":
        step = ShiftedStep(**vars(step))
    features = capturing.capture(rows)
    learning.learn(drafter, step, data, features, updates=110, rate=2e-2)
    sums, blocks = MetricSums(BLOCK_SIZE, CPU), step.blocks(data, np.arange(len(rows)), epoch=0)
    with torch.no_grad(), learning.world_of_one():
        for part, result in step.results(drafter, features, blocks):
            sums.add(part.block_lengths, result)
        figures = sums.figures()
    decoder = SpeculativeDecoder(whole, Drafter(drafter, whole))
    options = {"max_new_tokens": ANSWER - BLOCK_SIZE, "stop_ids": ()}
    answers = [decoder.generate(torch.from_numpy(ids[:PROMPT]), **options) for ids in rows]
    served = np.concatenate([answer.acceptance_lengths for answer in answers]).mean()
    return Outcome(figures["accuracy"], figures["acceptance_length"], float(served))


@pytest.mark.parametrize("kind", ["qwen3", "llama_tied"])
def test_16_a_drafter_of_high_accuracy_is_accepted_as_training_says(written_by_target, kind):
    """Train accuracy 70 %, acceptance 1.02 when served: wrong mask, untied random head, label shift."""
    outcome = train_and_serve(*written_by_target(kind))
    assert outcome.accuracy > 0.9
    assert outcome.served > 0.9 * outcome.acceptance_length


@pytest.mark.parametrize("fault", ["mask", "head", "labels"])
def test_16_each_cause_of_the_report_would_be_noticed(written_by_target, fault):
    outcome = train_and_serve(*written_by_target("qwen3"), fault)
    assert outcome.accuracy > 0.7  # training looks as well as in the report
    assert outcome.served < 0.6 * outcome.acceptance_length


# ------------------------------------------------------------------------------------------ 18: partial rotary


@torch.no_grad()
@pytest.mark.parametrize("kind", ["hybrid", "hybrid_moe"])
def test_18_a_partial_rotary_factor_of_the_target_is_neither_trained_nor_served(tmp_path, kind):
    """A partial rotary factor copied from the target's config: trained one way, served another."""
    directory = small_targets.write(small_targets.build(small_targets.KINDS[kind]), tmp_path / "target")
    checkpoint = open_target(learning.target_settings(directory))
    theta = checkpoint.text.rope_parameters["rope_theta"]
    assert checkpoint.text.rope_parameters["partial_rotary_factor"] == 0.5
    config = learning.config_for(checkpoint, TAPS)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": theta}
    drafter = learning.new_drafter(config)
    write_drafter(drafter.state_dict(), config, tmp_path / "drafter")
    fields = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert fields["rope_parameters"] == {"rope_type": "default", "rope_theta": theta}
    assert (fields["rope_theta"], fields["rope_scaling"]) == (theta, None)
    assert "partial" not in json.dumps(fields)
    assert "mrope" not in json.dumps(fields)

    served = load_drafter(tmp_path / "drafter", torch.float32, CPU)
    drafter.load_state_dict(served.state_dict())  # rounded to bf16, as exported
    layout = BlockLayout((0, 30), (0, 1), torch.tensor([30]), config.block_size)
    features, embedding = torch.randn(30, 32), torch.randn(60, 16)
    inputs = features, embedding[torch.tensor([[7, *[learning.MASK_TOKEN_ID] * 3]])], layout
    assert torch.equal(drafter(*inputs), served(*inputs))
    plain = {**config.to_dict(), "rope_theta": theta}
    expected = reference.block_hidden(served.state_dict(), plain, features, embedding, 7, 30)
    torch.testing.assert_close(served(*inputs)[0], expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------ 19: tapped layers


def test_19_feature_i_is_the_output_of_layer_i_also_where_no_layers_are_named(tmp_path):
    """Tapped layers guessed when missing, off by one."""
    model = small_targets.build(small_targets.qwen3)
    settings = learning.target_settings(small_targets.write(model, tmp_path / "target"))
    checkpoint = open_target(settings)
    layer_ids = checkpoint.layer_ids(None, drafter_layers=3)
    assert layer_ids == [1, 2, 3]
    outputs, (ids,) = {}, random_rows(9)
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, __, output, number=number: outputs.update({number: output[0]}))
    model(input_ids=torch.from_numpy(ids)[None])
    features = Target.load(checkpoint, settings, layer_ids, CPU, zero=None).capture([ids]).split(16, dim=-1)
    for layer_id, feature in zip(layer_ids, features, strict=True):
        nearest = min(outputs, key=lambda number: float((outputs[number] - feature).abs().max()))
        assert nearest == layer_id
        torch.testing.assert_close(feature, outputs[layer_id])


def test_19_a_drafter_that_does_not_name_its_layers_is_refused(tmp_path):
    drafter = make_drafter()
    write_drafter(drafter.state_dict(), drafter.config, tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dflash_config": {"mask_token_id": 3}}))
    with pytest.raises(UserError, match="target_layer_ids"):
        read_drafter(tmp_path / "drafter")


# ------------------------------------------------------------------------------------------ 21: the mask token


@pytest.mark.parametrize("kind", small_targets.KINDS)
def test_21_a_mask_outside_the_embedding_is_refused_and_the_last_row_is_taken(tmp_path, kind):
    """Mask id outside the embedding."""
    directory = small_targets.write(small_targets.build(small_targets.KINDS[kind]), tmp_path / "target")
    checkpoint = open_target(learning.target_settings(directory))
    assert checkpoint.mask_token_id(59, None) == 59
    with pytest.raises(UserError, match=r"60 is outside the target's embedding of 60 rows"):
        checkpoint.mask_token_id(60, None)
