"""RMSNorm and SwiGLU with the numbers of transformers' Qwen3 and less kept for the backward; linear maps in bf16.

Autograd keeps every intermediate of these formulas; here a norm keeps its input and one number a vector, and the
product of the MLP keeps its two factors. A drafter's step has about a third less to hold for it.

A CPU without AVX-512 multiplies bf16 matrices ten to a hundred times slower than fp32 ones, so there they
are multiplied in fp32 and the product is rounded, as a GPU does it inside.
"""

from functools import cache

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


class RMSNorm(Qwen3RMSNorm):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, the mean in fp32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, epsilon):
        exact = states.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True).add_(epsilon))
        ctx.save_for_backward(states, weight, scale)
        return weight * (exact * scale).to(states.dtype)

    @staticmethod
    def backward(ctx, grad):
        states, weight, scale = ctx.saved_tensors
        normed, grad = states.float() * scale, grad.float()
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight.float()
        along = (grad * normed).mean(-1, keepdim=True)
        return (grad.sub_(normed.mul_(along)).mul_(scale)).to(states.dtype), grad_weight, None


@cache
def multiplies_in_fp32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether matrices of `dtype` are multiplied faster as fp32 ones."""
    return device_type == "cpu" and dtype == torch.bfloat16 and "AVX512" not in torch.backends.cpu.get_cpu_capability()


class Linear(nn.Linear):
    """x @ weight.T, no bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        if multiplies_in_fp32(input.device.type, input.dtype):
            return _LinearInFp32.apply(input, self.weight)
        return super().forward(input)


class _LinearInFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight):
        ctx.save_for_backward(states, weight)
        return nn.functional.linear(states.float(), weight.float()).to(states.dtype)

    @staticmethod
    def backward(ctx, grad):
        states, weight = ctx.saved_tensors
        exact = grad.float().flatten(0, -2)
        grad_weight = exact.T @ states.float().flatten(0, -2)
        return (grad.float() @ weight.float()).to(states.dtype), grad_weight.to(weight.dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_SiluProduct.apply(self.gate_proj(x), self.up_proj(x)))


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        slope = sigmoid + silu * (1 - sigmoid)
        return slope.mul_(up).mul_(grad), silu.mul_(grad)
