"""What the drafter's numbers depend on, and what they do not."""

import pytest
import torch
from drafters import drafter_config, make_drafter
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from ds_dflash.attention import BlockLayout
from ds_dflash.drafter import DFlashDraftModel, rotate
from ds_dflash.pieces import MLP, Linear, RMSNorm


def test_first_weights_follow_from_the_seed_alone():
    def initial(seed, noise):
        torch.manual_seed(noise)
        drafter = DFlashDraftModel(drafter_config())
        drafter.initialize(seed)
        return drafter.state_dict()

    first, same, other = initial(3, noise=0), initial(3, noise=1), initial(4, noise=0)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert first["fc.weight"].std() == pytest.approx(0.2, rel=0.1)  # the config's initializer_range
    assert all((tensor == 1).all() for tensor in first.values() if tensor.dim() == 1)


def test_positions_turn_pairs_of_numbers_by_angles_that_fall_with_the_pair():
    """Slot i and i + head_dim / 2 are a pair, its angle is position * theta ** (-2 i / head_dim)."""
    drafter, states = make_drafter(), torch.randn(2, 1, 8)
    positions = torch.tensor([3, 200_000])
    rotated = rotate(states, drafter._rotary(positions, torch.float32))
    for row, position in enumerate(positions.tolist()):
        for pair in range(4):
            angle = torch.tensor(position * 10_000.0 ** (-2 * pair / 8))
            x, y = states[row, 0, pair], states[row, 0, pair + 4]
            expected = torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()])
            torch.testing.assert_close(rotated[row, 0, [pair, pair + 4]], expected, rtol=1e-2, atol=2e-2)


def test_a_cast_to_bf16_leaves_the_angles_exact():
    drafter, positions = make_drafter(), torch.arange(0, 100_000, 997)
    expected = drafter._rotary(positions, torch.float32)
    for found, exact in zip(drafter.bfloat16()._rotary(positions, torch.bfloat16), expected, strict=True):
        assert torch.equal(found, exact.bfloat16())


def test_the_context_is_normed_once_so_the_scale_of_features_does_not_matter():
    drafter, generator = make_drafter(), torch.Generator().manual_seed(0)
    layout = BlockLayout((0, 10), (0, 2), torch.tensor([4, 9]), 4)
    features, embeddings = torch.randn(10, 32, generator=generator), torch.randn(2, 4, 16, generator=generator)
    before = drafter(features, embeddings, layout)
    torch.testing.assert_close(drafter(50 * features, embeddings, layout), before, rtol=1e-3, atol=1e-4)
    drafter.hidden_norm.weight.data.mul_(2.0)
    assert not torch.allclose(drafter(features, embeddings, layout), before, rtol=1e-2)


def test_without_tokens_the_context_is_empty():
    keys, values = make_drafter().context(torch.zeros(0, 32), torch.zeros(0, dtype=torch.int64))[0]
    assert keys.shape == values.shape == (0, 2, 8)


def gradients(drafter):
    generator = torch.Generator().manual_seed(0)
    layout = BlockLayout((0, 10), (0, 2), torch.tensor([4, 9]), 4)
    features, embeddings = torch.randn(10, 32, generator=generator), torch.randn(2, 4, 16, generator=generator)
    drafter(features, embeddings, layout).square().sum().backward()
    return {name: parameter.grad for name, parameter in drafter.named_parameters()}


def test_layers_that_are_computed_again_give_the_same_gradients_and_keep_less():
    kept: list[int] = []

    def count(tensor):
        kept[-1] += tensor.numel()
        return tensor

    found = []
    for checkpoints in (False, True):
        drafter = make_drafter()
        drafter.checkpoints_layers = checkpoints
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            found.append(gradients(drafter))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert kept[1] < kept[0] / 2


def test_norm_and_mlp_are_those_of_qwen3_with_their_gradients():
    torch.manual_seed(0)
    config, states = drafter_config(), torch.randn(3, 5, 16, dtype=torch.float64)
    pairs = [
        (RMSNorm(16, eps=1e-3), Qwen3RMSNorm(16, eps=1e-3)),
        (MLP(config), Qwen3MLP(config)),
    ]
    for own, stock in pairs:
        own.load_state_dict({name: torch.randn_like(tensor) for name, tensor in own.state_dict().items()})
        stock.load_state_dict(own.state_dict())
        results = []
        for module in (own.double(), stock.double()):
            inputs = states.clone().requires_grad_()
            output = module(inputs)
            output.sin().sum().backward()
            results.append([output, inputs.grad, *(parameter.grad for parameter in module.parameters())])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # norms compute in fp32


def test_bf16_matrices_are_multiplied_exactly_and_rounded_once_on_any_cpu():
    torch.manual_seed(0)
    linear = Linear(512, 8).bfloat16()
    states = torch.randn(3, 5, 512).bfloat16().requires_grad_()
    grad = torch.randn(3, 5, 8).bfloat16()
    linear(states).backward(grad)
    exact_states, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (states, linear.weight))
    output = exact_states @ exact_weight.T
    output.backward(grad.double())
    for found, exact in (
        (linear(states), output),
        (states.grad, exact_states.grad),
        (linear.weight.grad, exact_weight.grad),
    ):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
