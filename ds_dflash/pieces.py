"""RMSNorm and SwiGLU with the numbers of transformers' Qwen3 and less kept for the backward.

Autograd keeps every intermediate of these formulas; here a norm keeps its input and one number a vector, and the
product of the MLP keeps its two factors. A drafter's step has about a third less to hold for it.
"""

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm


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


class MLP(Qwen3MLP):
    """down(silu(gate(x)) * up(x))"""

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
