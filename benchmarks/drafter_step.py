"""The drafter's step against the usual way: seconds and memory of forward, loss and backward, in one run.

    python benchmarks/drafter_step.py [--dtype float32 bfloat16] [--shapes 4x512x64 ...] [--repeats 5]

The usual way: transformers' RMSNorm and MLP, one `scaled_dot_product_attention` with a dense mask over the context and
all blocks, and a cross-entropy over chunks of 4096 slots that are recomputed in the backward. Ours: `DFlashDraftModel`
with split attention and the two-pass head (`ds_dflash.attention`, `ds_dflash.head`). Both have the same weights and
inputs; in fp32 their loss and gradients have to be equal to 1e-5. Seconds: both ways in turn, medians. Memory: the peak
of a process that makes one step, above what it holds before.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from peak_memory import peak_megabytes
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ds_dflash.anchors import Blocks, make_blocks
from ds_dflash.drafter import DFlashDraftModel, rotate
from ds_dflash.loss import Objective, block_loss

HIDDEN, HEAD_DIM, VOCABULARY, BLOCK, TAPS, GAMMA, MASK = 576, 64, 49_152, 16, 5, 7.0, 16
CHUNK = 4096  # slots whose logits exist at once, in the usual way
SHAPES = ["4x512x64", "2x1024x128", "1x2048x512", "1x4096x256"]


@dataclass
class Problem:
    """One micro-batch: `rows` rows of `length` tokens with `anchors` anchors each, all of them supervised."""

    drafter: DFlashDraftModel
    head: Tensor
    embedding: Tensor
    features: Tensor  # [rows, length, TAPS * HIDDEN]
    blocks: Blocks
    rows: int

    @classmethod
    def make(cls, shape: str, dtype: torch.dtype) -> "Problem":
        rows, length, anchors = map(int, shape.split("x"))
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=1536,
            num_hidden_layers=5,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=HEAD_DIM,
            block_size=BLOCK,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5},
            dflash_config={"mask_token_id": MASK, "target_layer_ids": list(range(TAPS))},
        )
        drafter = DFlashDraftModel(config, attention="split")
        drafter.initialize(seed=0)
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        data = [(rng.integers(0, VOCABULARY, length), np.ones(length, bool)) for _ in range(rows)]
        chosen = [np.sort(rng.choice(length - 1, anchors, replace=False)) for _ in range(rows)]
        head, embedding = (torch.randn(VOCABULARY, HIDDEN, generator=generator) * scale for scale in (0.05, 1.0))
        features = torch.randn(rows, length, TAPS * HIDDEN, generator=generator)
        blocks = make_blocks(data, chosen, BLOCK)
        tensors = (tensor.to(dtype) for tensor in (head, embedding, features))
        return cls(drafter.to(dtype), *tensors, blocks, rows)

    @property
    def block_embeddings(self) -> Tensor:
        ids = torch.full(self.blocks.labels.shape, MASK)
        ids[:, 0] = torch.from_numpy(self.blocks.labels[:, 0])
        return self.embedding[ids]


def ours(problem: Problem) -> Tensor:
    blocks = problem.blocks
    hidden = problem.drafter(
        problem.features.flatten(0, 1), problem.block_embeddings, blocks.layout(problem.head.device)
    )
    objective = Objective("dflash", BLOCK, GAMMA)
    labels, supervised, row_blocks = map(torch.from_numpy, (blocks.labels, blocks.supervised, blocks.row_blocks))
    result = block_loss(hidden, problem.head, labels, supervised, row_blocks, objective)
    return result.loss_sum / objective.weight(blocks.supervised, blocks.block_offsets)


def usual(problem: Problem) -> Tensor:
    blocks, rows = problem.blocks, problem.rows
    anchors = torch.from_numpy(blocks.anchors).view(rows, -1)
    hidden = usual_hidden(problem.drafter, problem.features, problem.block_embeddings, anchors).flatten(0, 1)
    labels = torch.from_numpy(blocks.labels).flatten()
    weights = torch.from_numpy(blocks.supervised * Objective("dflash", BLOCK, GAMMA).slot_weights).flatten().float()
    total = torch.zeros(())
    for start in range(0, len(labels), CHUNK):
        part = slice(start, start + CHUNK)
        total = total + checkpoint(
            usual_loss, hidden[part], problem.head, labels[part], weights[part], use_reentrant=False
        )
    return total / weights.double().sum().float()


def usual_hidden(drafter: DFlashDraftModel, features: Tensor, embeddings: Tensor, anchors: Tensor) -> Tensor:
    """Hidden states [rows, anchors * B, H], every query against every key [length + anchors * B] of its row."""
    rows, count = anchors.shape
    length = features.shape[1]
    slots = (anchors[:, :, None] + torch.arange(BLOCK)).flatten(1)
    own = torch.arange(count).repeat_interleave(BLOCK)
    sees_context = torch.arange(length) < anchors.repeat_interleave(BLOCK, dim=1)[:, :, None]
    sees_own = (own[:, None] == own).expand(rows, -1, -1)
    mask = torch.cat([sees_context, sees_own], dim=-1)[:, None]
    context = norm(drafter.hidden_norm, linear(drafter.fc, features))
    states = embeddings.view(rows, count * BLOCK, HIDDEN)
    context_rotary = drafter._rotary(torch.arange(length).expand(rows, -1), states.dtype)
    rotary = drafter._rotary(slots, states.dtype)
    for layer in drafter.layers:
        attention, normed = layer.self_attn, norm(layer.input_layernorm, states)
        query = rotate(norm(attention.q_norm, heads(linear(attention.q_proj, normed))), rotary)
        both, both_rotary = [context, normed], [context_rotary, rotary]
        keys = [norm(attention.k_norm, heads(linear(attention.k_proj, part))) for part in both]
        keys = [rotate(part, its_rotary) for part, its_rotary in zip(keys, both_rotary, strict=True)]
        values = [heads(linear(attention.v_proj, part)) for part in both]
        heads_first = (tensor.transpose(1, 2) for tensor in (query, torch.cat(keys, 1), torch.cat(values, 1)))
        attended = functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
        states = states + linear(attention.o_proj, attended.transpose(1, 2).flatten(-2))
        normed, mlp = norm(layer.post_attention_layernorm, states), layer.mlp
        inner = functional.silu(linear(mlp.gate_proj, normed)) * linear(mlp.up_proj, normed)
        states = states + linear(mlp.down_proj, inner)
    return norm(drafter.norm, states)


def norm(weights: Qwen3RMSNorm, states: Tensor) -> Tensor:
    return Qwen3RMSNorm.forward(weights, states)


def linear(weights: torch.nn.Linear, states: Tensor) -> Tensor:
    return functional.linear(states, weights.weight)


def heads(states: Tensor) -> Tensor:
    return states.unflatten(-1, (-1, HEAD_DIM))


def usual_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (functional.cross_entropy((hidden @ head.T).float(), labels, reduction="none") * weights).sum()


WAYS: dict[str, Callable[[Problem], Tensor]] = {"usual": usual, "ours": ours}


def step(problem: Problem, way: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients."""
    problem.drafter.zero_grad()
    loss = WAYS[way](problem)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in problem.drafter.named_parameters()}


def seconds(problem: Problem, repeats: int) -> dict[str, float]:
    """Median seconds of each way, in turn."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            started = time.perf_counter()
            step(problem, way)
            times[way].append(time.perf_counter() - started)
    return {way: statistics.median(values) for way, values in times.items()}


def difference(problem: Problem) -> float:
    """The largest of |a - b| / max|b| over the loss and every gradient."""
    (loss, gradients), (expected_loss, expected) = step(problem, "ours"), step(problem, "usual")
    errors = [abs(loss - expected_loss) / abs(expected_loss)]
    errors += [float((gradients[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected]
    return max(errors)


def measure_memory(shape: str, dtype: str, way: str) -> int:
    """Peak megabytes of one step above what the process holds before, in a process of its own."""
    command = [sys.executable, __file__, "--step", way, "--shapes", shape, "--dtype", dtype]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def step_memory(shape: str, dtype: str, way: str) -> int:
    problem = Problem.make(shape, getattr(torch, dtype))
    for parameter in problem.drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)  # counted neither way
    return peak_megabytes(lambda: WAYS[way](problem).backward())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxLENGTHxANCHORS")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(step_memory(options.shapes[0], options.dtype[0], options.step))
        return
    print(f"{'':20}{'seconds':>18}{'':8}{'step memory, MB':>18}{'':8}{'largest':>10}")
    print(f"{'rows x len x anchors':20}" + f"{'usual':>9}{'ours':>9}{'ratio':>8}" * 2 + f"{'error':>10}")
    for dtype in options.dtype:
        print(dtype)
        for shape in options.shapes:
            problem = Problem.make(shape, getattr(torch, dtype))
            error = difference(problem)  # warms both up
            taken = seconds(problem, options.repeats)
            held = {way: measure_memory(shape, dtype, way) for way in WAYS}
            columns = [f"{shape:20}"]
            for figures, form, better in ((taken, "9.2f", "usual"), (held, "9.0f", "ours")):
                ratio = figures[better] / figures["ours" if better == "usual" else "usual"]
                columns.append(f"{figures['usual']:{form}}{figures['ours']:{form}}{ratio:8.2f}")
            print("".join(columns) + f"{error:10.1e}", flush=True)
            if dtype == "float32" and not error <= 1e-5:
                sys.exit(f"error: loss or gradients differ by {error:.1e}")


if __name__ == "__main__":
    main()
