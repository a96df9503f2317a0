"""The drafter, its objective and speculative decoding once more, written from the definitions alone: one block at a
time, loops over slots, whole logits, no caches. Nothing of ds_dflash is used, so both can only agree by being right.

A drafter is a dict of tensors by their names in the serving contract and a config: hidden_size, num_hidden_layers,
num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, rope_theta, layer_types, sliding_window (None where no
layer slides), block_size, dflash_config {mask_token_id, target_layer_ids}.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * states / (states.square().mean(-1, keepdim=True) + epsilon).sqrt()


def rotated(states: Tensor, positions: list[int], theta: float) -> Tensor:
    """states [tokens, heads, d]: pair (i, i + d / 2) is turned by position * theta ** (-2 i / d)."""
    half = states.shape[-1] // 2
    angles = [[position * theta ** (-pair / half) for pair in range(half)] for position in positions]
    angle = torch.tensor(angles, dtype=torch.float64)[:, None]
    cosine, sine = angle.cos().to(states.dtype), angle.sin().to(states.dtype)
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def block_hidden(
    weights: dict[str, Tensor], config: dict, features: Tensor, embedding: Tensor, token: int, anchor: int
) -> Tensor:
    """Hidden states [B, H] after the final norm of the block of `token` at position `anchor`.

    features: [tokens >= anchor, taps * H] of the row; embedding: the target's, [V, H].
    """
    epsilon, size = config["rms_norm_eps"], config["block_size"]
    context = rms_norm(features[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"], epsilon)
    ids = [token] + [config["dflash_config"]["mask_token_id"]] * (size - 1)
    states = embedding[ids]
    for number, layer_type in enumerate(config["layer_types"]):
        layer = {
            name.removeprefix(f"layers.{number}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        window = config["sliding_window"] if layer_type == "sliding_attention" else None
        normed = rms_norm(states, layer["input_layernorm.weight"], epsilon)
        states = states + attention(layer, config, context, normed, anchor, window)
        normed = rms_norm(states, layer["post_attention_layernorm.weight"], epsilon)
        gate = torch.nn.functional.silu(normed @ layer["mlp.gate_proj.weight"].T)
        states = states + (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return rms_norm(states, weights["norm.weight"], epsilon)


def attention(
    layer: dict[str, Tensor], config: dict, context: Tensor, states: Tensor, anchor: int, window: int | None
) -> Tensor:
    """One layer's attention of the slots `states` [B, H] over `context` [anchor, H] and themselves."""
    width, theta, epsilon = config["head_dim"], config["rope_theta"], config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    inputs = torch.cat([context, states])
    places = list(range(anchor)) + [anchor + slot for slot in range(len(states))]
    query = (states @ layer["self_attn.q_proj.weight"].T).reshape(-1, heads, width)
    keys = (inputs @ layer["self_attn.k_proj.weight"].T).reshape(-1, kv_heads, width)
    values = (inputs @ layer["self_attn.v_proj.weight"].T).reshape(-1, kv_heads, width)
    query = rotated(rms_norm(query, layer["self_attn.q_norm.weight"], epsilon), places[anchor:], theta)
    keys = rotated(rms_norm(keys, layer["self_attn.k_norm.weight"], epsilon), places, theta)
    hidden = torch.tensor(
        [[not sees(slot, key, anchor, window) for key in range(len(places))] for slot in range(len(states))]
    )
    output = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = query[:, head] @ keys[:, group].T / math.sqrt(width)
        output.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ values[:, group])
    return torch.cat(output, -1) @ layer["self_attn.o_proj.weight"].T


def sees(slot: int, key: int, anchor: int, window: int | None) -> bool:
    """Whether a slot sees a key: context positions 0 .. anchor - 1 come first, then the block's own slots."""
    if window is None:
        return True
    if key >= anchor:
        return key - anchor <= slot
    return key >= anchor + slot - (window - 1)


@dataclass
class Row:
    """ids int64 [length], loss_mask bool [length], features [length, taps * H]; anchors in any order."""

    ids: list[int]
    loss_mask: list[bool]
    features: Tensor
    anchors: list[int]


@dataclass
class Result:
    """Of all blocks, row after row: hidden [blocks, B, H], top1 [blocks, B], and the sums over them."""

    hidden: Tensor
    top1: Tensor
    loss_sum: Tensor
    loss_weight: float
    dpace_loss_sum: Tensor
    dpace_loss_weight: int
    accuracy: float
    acceptance_length: float


def gamma_of(gamma: float | None, block_size: int) -> float:
    """7 / 5 / 4 for blocks of 16 / 10 / 8 and on straight lines between them where none is given."""
    if gamma is not None:
        return gamma
    if block_size <= 10:
        return 4 + (block_size - 8) / 2
    return 5 + (block_size - 10) / 3


def evaluate(
    weights: dict[str, Tensor], config: dict, embedding: Tensor, head: Tensor, rows: list[Row], gamma: float | None
) -> Result:
    """The objective over all blocks of `rows`; differentiable in `weights`."""
    gamma = gamma_of(gamma, config["block_size"])
    hidden, top1, accepted = [], [], []
    loss_sum, dpace_sum, loss_weight, right, counted = 0.0, 0.0, 0.0, 0, 0
    for row in rows:
        for anchor in row.anchors:
            states = block_hidden(weights, config, row.features, embedding, row.ids[anchor], anchor)
            log_p = (states @ head.T).log_softmax(-1)
            best = log_p.argmax(-1)
            slots = [k for k in range(1, len(states)) if anchor + k < len(row.ids) and row.loss_mask[anchor + k]]
            label = {slot: row.ids[anchor + slot] for slot in slots}
            for slot in slots:
                weight = math.exp(-(slot - 1) / gamma) if gamma else 1.0
                loss_sum = loss_sum - weight * log_p[slot, label[slot]]
                loss_weight += weight
            dpace_sum = dpace_sum + dpace({slot: log_p[slot, label[slot]] for slot in slots})
            is_right = [int(best[slot]) == label[slot] for slot in slots]
            right, counted = right + sum(is_right), counted + len(slots)
            accepted.append(1 + (is_right.index(False) if False in is_right else len(slots)))
            hidden.append(states)
            top1.append(best)
    return Result(
        torch.stack(hidden),
        torch.stack(top1),
        loss_sum,
        loss_weight,
        dpace_sum,
        sum(bool(row.anchors) for row in rows),
        right / counted,
        sum(accepted) / len(accepted),
    )


def dpace(log_p: dict[int, Tensor]) -> Tensor | float:
    """The sum of a block; log_p: log-probability of the label of every supervised slot, in their order."""
    confidence = {slot: 0.5 * math.exp(float(value.detach())) + 0.5 for slot, value in log_p.items()}
    total: Tensor | float = 0.0
    for slot in log_p:
        weight = 0.0
        for end in log_p:
            if end >= slot:
                weight += math.prod(confidence[before] for before in log_p if before <= end)
        total = total - weight * log_p[slot]
    return total


@torch.no_grad()
def speculative_greedy(target, weights, config, prompt: list[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
    """(prompt and `max_new_tokens` new ids, acceptance length of every step), by whole forwards of both models.

    target: a transformers language model; its layers' outputs are taken from its hidden states.
    """
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    taps, size = config["dflash_config"]["target_layer_ids"], config["block_size"]
    ids, lengths = [*prompt, own_next(target, prompt)[-1]], []
    while len(ids) < len(prompt) + max_new_tokens:
        before = ids[:-1]
        states = target(input_ids=torch.tensor([before]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1][0] for layer in taps], -1)
        block = block_hidden(weights, config, features, embedding, ids[-1], len(before))
        proposed = (block[1:] @ head.T).argmax(-1).tolist()
        own = own_next(target, ids + proposed)[len(before) :]
        count = 0
        while count < size - 1 and proposed[count] == own[count]:
            count += 1
        ids += own[: count + 1]
        lengths.append(count + 1)
    return ids[: len(prompt) + max_new_tokens], lengths


def own_next(target, ids: list[int]) -> list[int]:
    """The target's own choice after every token."""
    return target(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
