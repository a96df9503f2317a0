"""Drafter, objective and decoding against the independent implementations of `reference.py`, on problems of all shapes:
sizes, heads, windows, taps, rotary bases, holes in the supervision, rows of any length, anchors anywhere.
"""

import json
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import reference
import test_golden
import torch
from drafters import drafter_config
from reference import Row
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from world import world_of_one

from ds_dflash.anchors import make_blocks
from ds_dflash.drafter import DFlashDraftModel
from ds_dflash.loss import Objective, block_loss, resolve_gamma
from ds_dflash.metrics import MetricSums
from ds_dflash.sections import TrainingSettings
from ds_dflash.step import DrafterStep

CPU = torch.device("cpu")
SEEDS = range(24)
TOLERANCE = 2e-5  # of fp32 against the reference in float64, relative to the largest number of a tensor
BLOCK_SIZES = [2, 3, 4, 5, 7, 8, 10, 13, 16]
HEADS = [(1, 1), (4, 4), (4, 1), (4, 2), (6, 2), (3, 3), (8, 2)]
TAPS = [[0], [2], [1, 4], [0, 2, 3], [1, 2, 3, 5]]


@dataclass
class Problem:
    """One drafter, its target's embedding and head, and rows with anchors; all in fp32."""

    config: dict
    weights: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    rows: list[Row]
    gamma: float | None

    @property
    def block_size(self) -> int:
        return self.config["block_size"]


def draw(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    size = int(rng.choice(BLOCK_SIZES))
    heads, kv_heads = HEADS[rng.integers(len(HEADS))]
    taps, vocabulary, hidden = TAPS[rng.integers(len(TAPS))], int(rng.integers(5, 90)), int(rng.integers(5, 33))
    layers = int(rng.integers(1, 4))
    types = [["full_attention", "sliding_attention"][int(rng.integers(2))] for _ in range(layers)]
    config = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([2, 4, 6, 8, 10, 16])),
        "intermediate_size": int(rng.integers(4, 40)),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-2])),
        "rope_theta": float(rng.choice([1e2, 1e4, 1e6, 1e7])),
        "layer_types": types,
        "sliding_window": size + int(rng.integers(0, 9)) if "sliding_attention" in types else None,
        "block_size": size,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": int(rng.integers(vocabulary)), "target_layer_ids": taps},
    }
    model = DFlashDraftModel(product_config(config))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = {name: 0.25 * torch.randn(shape) + (1.0 if len(shape) == 1 else 0.0) for name, shape in shapes.items()}
    embedding = torch.randn(vocabulary, hidden)
    head = embedding if rng.random() < 0.3 else torch.randn(vocabulary, hidden)
    lengths = [1, *rng.choice([2, size + 1, 17, 40], 3)]
    rows = [draw_row(rng, int(length), vocabulary, len(taps) * hidden) for length in lengths]
    rows[1].anchors = sorted({0, len(rows[1].ids) - 1, *rows[1].anchors})  # both ends, whatever was drawn
    rows[int(rng.integers(2, 4))].anchors = []
    return Problem(config, weights, embedding, head, rows, [None, 0.0, 0.7, 4.0][int(rng.integers(4))])


def draw_row(rng: np.random.Generator, length: int, vocabulary: int, width: int) -> Row:
    share = rng.choice([0.5, 0.9, 1.0])
    anchors = np.flatnonzero(rng.random(length) < min(1.0, 5 / length)).tolist()
    return Row(
        rng.integers(0, vocabulary, length).tolist(),
        (rng.random(length) < share).tolist(),
        float(rng.choice([0.3, 1.0, 20.0])) * torch.randn(length, width),
        anchors,
    )


def product_config(config: dict) -> Qwen3Config:
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    fields = {name: value for name, value in config.items() if name != "rope_theta"}
    return drafter_config(**fields, rope_parameters=rope, use_sliding_window=config["sliding_window"] is not None)


def drafter_of(problem: Problem, attention: str) -> DFlashDraftModel:
    model = DFlashDraftModel(product_config(problem.config), attention)
    model.load_state_dict(problem.weights)
    return model


@cache
def problem_of(seed: int) -> Problem:
    """Defined wherever some slot is supervised, and for `gamma` None from the smallest block with a given gamma on."""
    problem = draw(seed)
    if problem.gamma is None and problem.block_size < 8:
        problem.gamma = 3.0
    problem.rows[1].loss_mask[1] = True  # slot 1 of the anchor at 0
    make_some_right(problem, np.random.default_rng(seed))
    return problem


def make_some_right(problem: Problem, rng: np.random.Generator) -> None:
    """Write what is predicted into the rows, up to a random slot of each block: random ones would be right nowhere."""
    for row in problem.rows:
        for anchor in row.anchors:
            arguments = (problem.weights, problem.config, row.features, problem.embedding, row.ids[anchor], anchor)
            best = (reference.block_hidden(*arguments) @ problem.head.T).argmax(-1).tolist()
            end = min(int(rng.integers(1, problem.block_size + 1)), len(row.ids) - anchor)
            row.ids[anchor + 1 : anchor + end] = best[1:end]


@dataclass
class Truth:
    result: reference.Result
    gradients: dict[str, dict[str, Tensor]]  # of the two loss sums, by kind


@cache
def truth_of(seed: int) -> Truth:
    """The reference's numbers, in float64."""
    problem = problem_of(seed)
    weights = {name: tensor.double().requires_grad_() for name, tensor in problem.weights.items()}
    rows = [Row(row.ids, row.loss_mask, row.features.double(), row.anchors) for row in problem.rows]
    arguments = (problem.embedding.double(), problem.head.double(), rows, problem.gamma)
    result = reference.evaluate(weights, problem.config, *arguments)
    gradients = {}
    for kind, loss in (("dflash", result.loss_sum), ("dpace", result.dpace_loss_sum)):
        found = torch.autograd.grad(loss, weights.values(), retain_graph=True, materialize_grads=True)
        gradients[kind] = dict(zip(weights, found, strict=True))
    result.loss_sum, result.dpace_loss_sum = result.loss_sum.detach(), result.dpace_loss_sum.detach()
    return Truth(result, gradients)


def blocks_of(problem: Problem):
    rows = [(np.array(row.ids), np.array(row.loss_mask)) for row in problem.rows]
    return make_blocks(rows, [np.array(row.anchors, np.int64) for row in problem.rows], problem.block_size)


def objective_of(problem: Problem, kind: str) -> Objective:
    return Objective(kind, problem.block_size, resolve_gamma(problem.gamma, problem.block_size))


def inputs_of(problem: Problem, blocks) -> tuple[Tensor, Tensor]:
    """Packed features and block embeddings."""
    ids = torch.full(blocks.labels.shape, problem.config["dflash_config"]["mask_token_id"])
    ids[:, 0] = torch.from_numpy(blocks.labels[:, 0])
    return torch.cat([row.features for row in problem.rows]), problem.embedding[ids]


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, name
    error, size = (found - expected).abs().max(), expected.abs().max()
    assert error <= TOLERANCE * size + 1e-12, f"{name}: {float(error / size):.1e}"


def assert_gradients(drafter: DFlashDraftModel, expected: dict[str, Tensor]) -> None:
    for name, parameter in drafter.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(found, expected[name], f"gradient of {name}")


def test_the_problems_are_of_all_shapes():
    problems = [problem_of(seed) for seed in SEEDS]
    configs = [problem.config for problem in problems]
    assert {config["block_size"] for config in configs} == set(BLOCK_SIZES)
    assert {len(config["dflash_config"]["target_layer_ids"]) for config in configs} == {1, 2, 3, 4}
    kinds = {frozenset(config["layer_types"]) for config in configs}
    assert kinds >= {frozenset([one]) for one in ("full_attention", "sliding_attention")}
    assert frozenset(["full_attention", "sliding_attention"]) in kinds
    assert any(config["sliding_window"] == config["block_size"] for config in configs)
    assert {config["num_key_value_heads"] for config in configs} >= {1, 2, 4}
    assert {config["rope_theta"] for config in configs} == {1e2, 1e4, 1e6, 1e7}
    assert {problem.gamma for problem in problems} >= {None, 0.0, 0.7, 4.0}
    assert any(not row.anchors for problem in problems for row in problem.rows)
    assert any(len(row.ids) == 1 and row.anchors for problem in problems for row in problem.rows)
    results = [truth_of(seed).result for seed in SEEDS]
    assert sum(0.1 < result.accuracy < 0.9 for result in results) > len(results) / 2
    assert sum(result.acceptance_length > 1.5 for result in results) > len(results) / 2


@pytest.mark.parametrize("attention", ["split", "dense"])
@pytest.mark.parametrize("seed", SEEDS)
def test_hidden_states_losses_metrics_and_gradients_equal_the_reference(seed, attention):
    problem, truth = problem_of(seed), truth_of(seed)
    drafter, blocks = drafter_of(problem, attention), blocks_of(problem)
    hidden = drafter(*inputs_of(problem, blocks), blocks.layout(CPU))
    assert_close(hidden, truth.result.hidden, "hidden")
    supervised = torch.from_numpy(blocks.supervised)
    expected = {"dflash": truth.result.loss_sum, "dpace": truth.result.dpace_loss_sum}
    weights = {"dflash": truth.result.loss_weight, "dpace": truth.result.dpace_loss_weight}
    for kind in ("dflash", "dpace"):
        objective = objective_of(problem, kind)
        labels, row_blocks = torch.from_numpy(blocks.labels), torch.from_numpy(blocks.row_blocks)
        result = block_loss(hidden, problem.head, labels, supervised, row_blocks, objective)
        assert_close(result.loss_sum, expected[kind], f"{kind} loss_sum")
        assert objective.weight(blocks.supervised, blocks.block_offsets) == pytest.approx(weights[kind], rel=1e-12)
        assert torch.equal(result.predicted[supervised], truth.result.top1[supervised])
        assert int(result.correct.sum()) / int(supervised.sum()) == truth.result.accuracy
        assert float(result.accepted.double().mean()) == pytest.approx(truth.result.acceptance_length)
        drafter.zero_grad()
        result.loss_sum.backward(retain_graph=True)
        assert_gradients(drafter, truth.gradients[kind])


@pytest.mark.parametrize("kind", ["dflash", "dpace"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drafters_step_in_slices_sums_up_to_the_reference(seed, kind):
    problem, truth = problem_of(seed), truth_of(seed)
    drafter, blocks, objective = drafter_of(problem, "split"), blocks_of(problem), objective_of(problem, kind)
    mask_token_id = problem.config["dflash_config"]["mask_token_id"]
    training = TrainingSettings(slice_tokens=(1 + seed % 3) * problem.block_size)
    step = DrafterStep(problem.embedding, problem.head, mask_token_id, objective, training)
    weight = objective.weight(blocks.supervised, blocks.block_offsets)
    sums = MetricSums(problem.block_size, CPU)
    for part, result in step.results(drafter, inputs_of(problem, blocks)[0], blocks):
        (result.loss_sum / weight).backward()
        sums.add(part.block_lengths, result)
    loss = truth.result.loss_sum / truth.result.loss_weight
    if kind == "dpace":
        loss = truth.result.dpace_loss_sum / truth.result.dpace_loss_weight
    with world_of_one():
        figures = sums.figures()
    assert figures["loss"] == pytest.approx(float(loss), rel=TOLERANCE)
    assert figures["loss_weight"] == pytest.approx(weight, rel=1e-6)
    assert figures["accuracy"] == pytest.approx(truth.result.accuracy)
    assert figures["acceptance_length"] == pytest.approx(truth.result.acceptance_length)
    assert_gradients(drafter, {name: gradient / weight for name, gradient in truth.gradients[kind].items()})


# ------------------------------------------------------------------------------------------ golden files of our own


def write_training_case(seed: int, path) -> None:
    """A problem with its truth as a golden file: rows padded to one length, anchors shuffled among missing ones."""
    problem, truth = problem_of(seed), truth_of(seed)
    rng = np.random.default_rng(seed)
    rows, width = problem.rows, problem.rows[0].features.shape[1]
    length, count = max(len(row.ids) for row in rows), 2 + max(len(row.anchors) for row in rows)
    size, hidden = problem.block_size, problem.config["hidden_size"]
    tensors = {
        "input_ids": torch.randint(problem.config["vocab_size"], (len(rows), length)),
        "loss_mask": torch.zeros(len(rows), length),
        "target_hidden": torch.randn(len(rows), length, width),
        "anchors": torch.randint(length, (len(rows), count)),
        "anchor_mask": torch.zeros(len(rows), count, dtype=torch.bool),
        "block_hidden": torch.full((len(rows), count, size, hidden), 7.0),
        "top1": torch.zeros(len(rows), count, size, dtype=torch.int64),
    }
    block = 0
    for number, row in enumerate(rows):
        own = len(row.ids)
        tensors["input_ids"][number, :own] = torch.tensor(row.ids)
        tensors["loss_mask"][number, :own] = torch.tensor(row.loss_mask).float()
        tensors["target_hidden"][number, :own] = row.features
        for place, anchor in zip(rng.permutation(count), row.anchors, strict=False):
            tensors["anchors"][number, place], tensors["anchor_mask"][number, place] = anchor, True
            tensors["block_hidden"][number, place] = truth.result.hidden[block].float()
            tensors["top1"][number, place] = truth.result.top1[block]
            block += 1
    result = truth.result
    scalars = {
        "loss": result.loss_sum / result.loss_weight,
        "loss_sum": result.loss_sum,
        "loss_weight": result.loss_weight,
        "accuracy": result.accuracy,
        "acceptance_length": result.acceptance_length,
        "dpace_loss_sum": result.dpace_loss_sum,
    }
    tensors |= {name: torch.tensor([float(value)]) for name, value in scalars.items()}
    tensors |= {"embed_tokens.weight": problem.embedding, "lm_head.weight": problem.head.clone()}
    tensors |= {f"drafter.{name}": tensor for name, tensor in problem.weights.items()}
    for name, gradient in truth.gradients["dflash"].items():
        tensors[f"grad.{name}"] = (gradient / result.loss_weight).float()
    gamma = reference.gamma_of(problem.gamma, size)
    save(tensors, problem.config | {"loss_decay_gamma": gamma}, path)


def save(tensors: dict[str, Tensor], config: dict, path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"config": json.dumps(config)})


@pytest.mark.parametrize("attention", ["split", "dense"])
@pytest.mark.parametrize("seed", SEEDS[::4])
def test_golden_files_of_other_shapes_pass(tmp_path, seed, attention):
    write_training_case(seed, tmp_path / "case.safetensors")
    test_golden.run_training_case(*test_golden.read(tmp_path / "case.safetensors"), attention)


# Seeds with which a random drafter is right now and then.
DECODING_CASES = {
    "block_2": {"block_size": 2, "taps": [2], "seed": 0},
    "block_16": {"block_size": 16, "taps": [0, 1, 3], "drafter_layers": 3, "seed": 4},
    "one_head": {"heads": (1, 1), "head_dim": 12, "layers": 4, "taps": [0, 2], "seed": 3},
    "grouped": {"heads": (6, 2), "head_dim": 4, "theta": 1e2, "vocabulary": 7, "seed": 1},
    "prompt_of_one": {"prompt": 1, "vocabulary": 5, "theta": 1e7, "seed": 2},
    "many_tokens": {"new": 60, "block_size": 4, "vocabulary": 4, "epsilon": 1e-3, "seed": 1},
}


def write_decoding_case(
    path,
    block_size=5,
    taps=(1, 3),
    drafter_layers=2,
    heads=(4, 2),
    head_dim=8,
    layers=6,
    theta=1e4,
    vocabulary=12,
    prompt=9,
    new=25,
    epsilon=1e-6,
    seed=0,
) -> None:
    """A random Qwen3 target and drafter of few ids, so that proposals are sometimes right, with the loop's output."""
    attention = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    shape = {"hidden_size": 24, "vocab_size": vocabulary, "rms_norm_eps": epsilon}
    target_config = {
        **shape,
        **attention,
        "num_hidden_layers": layers,
        "intermediate_size": 40,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": theta}
    target = Qwen3ForCausalLM(Qwen3Config(**target_config, rope_parameters=rope, initializer_range=0.3)).eval()
    own = {
        "num_hidden_layers": drafter_layers,
        "block_size": block_size,
        **attention,
        "intermediate_size": 20,
    }
    special = {"mask_token_id": vocabulary - 1, "target_layer_ids": list(taps)}
    config = {
        **shape,
        **own,
        "rope_theta": theta,
        "layer_types": ["full_attention"] * drafter_layers,
        "sliding_window": None,
        "dflash_config": special,
    }
    shapes = {name: tensor.shape for name, tensor in DFlashDraftModel(product_config(config)).state_dict().items()}
    weights = {name: 0.4 * torch.randn(shape) + (1.0 if len(shape) == 1 else 0.0) for name, shape in shapes.items()}
    start = torch.randint(vocabulary, (prompt,)).tolist()
    ids, lengths = reference.speculative_greedy(target, weights, config, start, new)
    tensors = {"prompt": torch.tensor([start]), "output_ids": torch.tensor([ids])}
    tensors["acceptance_lengths"] = torch.tensor(lengths)
    tensors |= {f"target.{name}": tensor for name, tensor in target.state_dict().items()}
    tensors |= {f"drafter.{name}": tensor for name, tensor in weights.items()}
    content = {
        "target": target_config | {"rope_theta": theta},
        "drafter": own | special,
        "max_new_tokens": new,
    }
    save(tensors, content, path)


@pytest.mark.parametrize("fields", DECODING_CASES.values(), ids=DECODING_CASES.keys())
def test_decoding_of_other_sizes_accepts_what_the_loop_accepts(tmp_path, fields):
    write_decoding_case(tmp_path / "case.safetensors", **fields)
    config, tensors = test_golden.read(tmp_path / "case.safetensors")
    lengths = tensors["acceptance_lengths"].tolist()
    assert len(set(lengths)) > 1, "a case in which nothing is accepted shows nothing"
    test_golden.run_decoding_case(config, tensors)
