"""Every golden case: small fp32 problems with the numbers that independent implementations of the method gave.

Cases are the files of tests/golden/, or of the directory that the environment variable DS_DFLASH_GOLDEN names; the
kind of a case is recognised by its tensors.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from ds_dflash.anchors import make_blocks
from ds_dflash.decode import Drafter, SpeculativeDecoder
from ds_dflash.drafter import DFlashDraftModel
from ds_dflash.loss import Objective, block_loss

DIRECTORY = Path(os.environ.get("DS_DFLASH_GOLDEN", Path(__file__).parent / "golden"))
CASES = sorted(DIRECTORY.glob("*.safetensors"))
TOLERANCE = 2e-4


def read(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["config"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def part(tensors, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def assert_close(got, expected, name):
    got, expected = got.detach().double(), expected.double()
    assert got.shape == expected.shape, name
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"


def make_drafter(config, tensors, attention="split"):
    config = dict(config)
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    window = config.get("sliding_window")
    model = DFlashDraftModel(
        Qwen3Config(**config, rope_parameters=rope, use_sliding_window=window is not None),
        attention=attention,
    )
    model.load_state_dict(tensors)
    return model


def pack(tensors, block_size):
    """The case's rows, anchors and features in packed form."""
    rows = [
        (ids.numpy(), mask.numpy().astype(bool))
        for ids, mask in zip(tensors["input_ids"], tensors["loss_mask"], strict=True)
    ]
    kept = tensors["anchor_mask"].bool()
    order = [torch.argsort(row[mask]) for row, mask in zip(tensors["anchors"], kept, strict=True)]
    anchors = [row[mask][index].numpy() for row, mask, index in zip(tensors["anchors"], kept, order, strict=True)]
    return make_blocks(rows, anchors, block_size), kept, order


def in_packed_order(expected, kept, order):
    return torch.cat([row[mask][index] for row, mask, index in zip(expected, kept, order, strict=True)])


def run_training_case(config, tensors, attention):
    gamma = config.pop("loss_decay_gamma")
    drafter = make_drafter(config, part(tensors, "drafter."), attention)
    blocks, kept, order = pack(tensors, config["block_size"])
    layout = blocks.layout(torch.device("cpu"))
    mask_id = config["dflash_config"]["mask_token_id"]
    inputs = torch.full((len(blocks.anchors), config["block_size"]), mask_id)
    inputs[:, 0] = torch.from_numpy(blocks.labels[:, 0])
    hidden = drafter(tensors["target_hidden"].flatten(0, 1), tensors["embed_tokens.weight"][inputs], layout)
    assert_close(hidden, in_packed_order(tensors["block_hidden"], kept, order), "block_hidden")

    arguments = (hidden, tensors["lm_head.weight"], torch.from_numpy(blocks.labels))
    arguments += (torch.from_numpy(blocks.supervised), torch.from_numpy(blocks.row_blocks))
    objective = Objective("dflash", config["block_size"], gamma)
    result = block_loss(*arguments, objective)
    weight = objective.weight(blocks.supervised, blocks.block_offsets)
    assert_close(result.loss_sum[None], tensors["loss_sum"], "loss_sum")
    assert_close(torch.tensor([weight]), tensors["loss_weight"], "loss_weight")
    loss = result.loss_sum / weight
    assert_close(loss[None], tensors["loss"], "loss")
    accuracy = result.correct.sum() / result.supervised.sum()
    assert_close(accuracy[None], tensors["accuracy"], "accuracy")
    assert_close(result.accepted.double().mean()[None], tensors["acceptance_length"], "acceptance_length")
    top1 = in_packed_order(tensors["top1"], kept, order)
    assert torch.equal(result.predicted[result.supervised], top1[result.supervised])
    assert torch.equal((hidden @ tensors["lm_head.weight"].T).argmax(-1), top1)

    loss.backward(retain_graph=True)
    for name, parameter in drafter.named_parameters():
        assert_close(parameter.grad, tensors[f"grad.{name}"], f"grad.{name}")
    paced = block_loss(*arguments, Objective("dpace", config["block_size"], 0.0))
    assert_close(paced.loss_sum[None], tensors["dpace_loss_sum"], "dpace_loss_sum")


def run_decoding_case(config, tensors):
    target_config, drafter_config = config["target"], dict(config["drafter"])
    theta = target_config.pop("rope_theta")
    target = Qwen3ForCausalLM(
        Qwen3Config(**target_config, rope_parameters={"rope_type": "default", "rope_theta": theta})
    ).eval()
    target.load_state_dict(part(tensors, "target."))
    taps = {name: drafter_config.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    shared = {name: target_config[name] for name in ("hidden_size", "vocab_size", "rms_norm_eps")}
    drafter = make_drafter(
        {**shared, "rope_theta": theta, **drafter_config, "dflash_config": taps}, part(tensors, "drafter.")
    )
    decoder = SpeculativeDecoder(target, Drafter(drafter, target))
    result = decoder.generate(tensors["prompt"][0], max_new_tokens=config["max_new_tokens"], stop_ids=())
    assert torch.equal(result.output_ids, tensors["output_ids"][0])
    assert np.array_equal(result.acceptance_lengths, tensors["acceptance_lengths"].numpy())


def test_there_are_cases():
    assert CASES, f"no *.safetensors in {DIRECTORY}"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_golden_case(path):
    config, tensors = read(path)
    if "block_hidden" in tensors:
        run_training_case(config, tensors, "split")
    else:
        assert "acceptance_lengths" in tensors, f"{path.name}: neither a training nor a decoding case"
        run_decoding_case(config, tensors)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_dense_attention_gives_the_same_numbers(path):
    config, tensors = read(path)
    if "block_hidden" in tensors:
        run_training_case(config, tensors, "dense")
