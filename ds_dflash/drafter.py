"""DFlashDraftModel: proposes a whole block of tokens in one forward (arXiv 2602.06036).

A small Qwen3-style decoder. The target's tapped hidden states are projected once to the *context*, which every layer
attends to unchanged; the block's input is the target's embedding of [anchor token, MASK x (B - 1)]. Names and shapes of
the tensors are a contract with serving engines: no `model.` prefix, no embedding, no head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from ds_dflash.attention import BlockLayout, attention_form, block_attention
from ds_dflash.config import DrafterSettings
from ds_dflash.errors import UserError
from ds_dflash.pieces import MLP, Linear, RMSNorm

LayerContext = tuple[Tensor, Tensor]
"""Keys (normed and rotated) and values of the context in one layer, each [tokens, kv_heads, head_dim]."""


class DraftAttention(nn.Module):
    """Attention of block slots over context and own block; `window` is None in a full layer."""

    def __init__(self, config: Qwen3Config, layer_index: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        layer_types = config.layer_types or []
        is_sliding = layer_types[layer_index] == "sliding_attention"
        self.window = config.sliding_window if is_sliding else None
        query_size = config.num_attention_heads * config.head_dim
        key_size = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size)
        self.k_proj = Linear(config.hidden_size, key_size)
        self.v_proj = Linear(config.hidden_size, key_size)
        self.o_proj = Linear(query_size, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> LayerContext:
        """Keys and values [..., kv_heads, head_dim] of context or block states [..., H]."""
        keys = self.k_norm(self._split_heads(self.k_proj(states)))
        return rotate(keys, rotary), self._split_heads(self.v_proj(states))

    def forward(
        self,
        states: Tensor,
        rotary: tuple[Tensor, Tensor],
        context: LayerContext,
        layout: BlockLayout,
        implementation: str,
    ) -> Tensor:
        query = rotate(self.q_norm(self._split_heads(self.q_proj(states))), rotary)
        keys, values = self.keys_values(states, rotary)
        attended = block_attention(query, *context, keys, values, layout, self.window, implementation)
        return self.o_proj(attended.flatten(-2))

    def _split_heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim))


class DraftLayer(nn.Module):
    """Pre-norm residual layer. The context gets no norm of the layer's own."""

    def __init__(self, config: Qwen3Config, layer_index: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, layer_index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, *attention_inputs: Any) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), *attention_inputs)
        return states + self.mlp(self.post_attention_layernorm(states))


class DFlashDraftModel(nn.Module):
    """The drafter without embedding and head, which are the target's.

    config: a Qwen3Config with `block_size` and `dflash_config` {mask_token_id, target_layer_ids} (`make_config`).
    attention: the form of `block_attention`; None: `attention_form` of the device.
    checkpoints_layers: whether each layer is computed again in the backward, so that only its input is kept.
    """

    def __init__(self, config: Qwen3Config, attention: str | None = None, checkpoints_layers: bool = False) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.checkpoints_layers = checkpoints_layers
        taps = len(config.dflash_config["target_layer_ids"])
        self.fc = Linear(taps * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        layers = [DraftLayer(config, index) for index in range(config.num_hidden_layers)]
        self.layers: Sequence[DraftLayer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def initialize(self, seed: int) -> None:
        """Draw all matrices from a normal distribution of `initializer_range`, the same on every machine."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=self.config.initializer_range, generator=generator)

    def describe(self) -> str:
        """One line for the log: layers, parameters, number format, form of attention."""
        weight, parameters = self.norm.weight, sum(parameter.numel() for parameter in self.parameters())
        dtype, form = str(weight.dtype).removeprefix("torch."), self.attention or attention_form(weight.device)
        text = f"{len(self.layers)} layers, {parameters / 1e6:,.1f} million parameters, {dtype}, attention {form}"
        return text + ", layers computed again in the backward" * self.checkpoints_layers

    def context(self, target_hidden: Tensor, positions: Tensor) -> list[LayerContext]:
        """What each layer keeps of the context tokens.

        target_hidden: [tokens, taps * H], the tapped layers' outputs in the order of `target_layer_ids`;
        positions: int64 [tokens], in their rows.
        """
        states = self.hidden_norm(self.fc(target_hidden))
        rotary = self._rotary(positions, states.dtype)
        return [layer.self_attn.keys_values(states, rotary) for layer in self.layers]

    def draft(self, block_embeddings: Tensor, context: Sequence[LayerContext], layout: BlockLayout) -> Tensor:
        """Hidden states [blocks, B, H] after the final norm of block inputs [blocks, B, H]."""
        rotary = self._rotary(layout.slot_positions, block_embeddings.dtype)
        implementation = self.attention or attention_form(block_embeddings.device)
        states = block_embeddings
        for layer, layer_context in zip(self.layers, context, strict=True):
            inputs = (states, rotary, layer_context, layout, implementation)
            keeps_little = self.checkpoints_layers and torch.is_grad_enabled()
            states = checkpoint(layer, *inputs, use_reentrant=False) if keeps_little else layer(*inputs)
        return self.norm(states)

    def forward(self, target_hidden: Tensor, block_embeddings: Tensor, layout: BlockLayout) -> Tensor:
        """`draft` on the context of packed `target_hidden` [tokens, taps * H]; returns [blocks, B, H]."""
        return self.draft(block_embeddings, self.context(target_hidden, layout.context_positions), layout)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., 1, head_dim] of plain 1-D rotary embedding over all head dimensions.

        The frequencies are computed anew, in fp32: kept as a buffer, an engine's cast to bf16 would round them.
        """
        frequencies, _ = Qwen3RotaryEmbedding.compute_default_rope_parameters(self.config)
        angles = positions[..., None].float() * frequencies.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of states [..., heads, head_dim]."""
    cosine, sine = rotary
    return states * cosine + rotate_half(states) * sine


def make_config(
    settings: DrafterSettings, target: PretrainedConfig, layer_ids: Sequence[int], mask_token_id: int
) -> Qwen3Config:
    """The drafter's configuration: `settings`, with what is null there taken from the target's text config.

    Raises UserError where the heads of the two do not go together.
    """
    layers = settings.num_hidden_layers
    layer_types = list(settings.layer_types or ["full_attention"] * layers)
    is_sliding = "sliding_attention" in layer_types
    target_rope = getattr(target, "rope_parameters", None) or {}
    heads, kv_heads, head_dim = _heads(settings, target)
    fields: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": settings.intermediate_size or target.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": settings.rope_theta or target_rope.get("rope_theta", 10_000.0),
        },
        "layer_types": layer_types,
        "use_sliding_window": is_sliding,
        "sliding_window": settings.sliding_window if is_sliding else None,
        "max_window_layers": layers,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        "block_size": settings.block_size,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(layer_ids)},
    }
    return Qwen3Config(**fields)


def _heads(settings: DrafterSettings, target: PretrainedConfig) -> tuple[int, int, int]:
    """Query heads, key and value heads, and their width."""
    heads = settings.num_attention_heads or target.num_attention_heads
    kv_heads = settings.num_key_value_heads or target.num_key_value_heads
    if heads % kv_heads:
        raise UserError(
            f"A drafter of {heads} query heads cannot share {kv_heads} key and value heads (what is null comes from the"
            " target): set drafter.num_attention_heads to a multiple of drafter.num_key_value_heads."
        )
    own_width = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    return heads, kv_heads, settings.head_dim or own_width
