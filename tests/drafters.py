"""Small drafters with random weights, for tests."""

import torch
from transformers import Qwen3Config

from ds_dflash.drafter import DFlashDraftModel


def drafter_config(**fields) -> Qwen3Config:
    """A drafter of two layers, hidden size 16 and blocks of 4 unless `fields` say otherwise."""
    defaults = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "block_size": 4,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]},
    }
    return Qwen3Config(**(defaults | fields))


def sliding(window: int, layers: int = 2) -> dict:
    """The fields of a drafter whose layers slide, but for the last one."""
    types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    return {"num_hidden_layers": layers, "layer_types": types, "sliding_window": window, "use_sliding_window": True}


def make_drafter(config: Qwen3Config | None = None, attention: str | None = None, seed: int = 0) -> DFlashDraftModel:
    drafter = DFlashDraftModel(config or drafter_config(), attention)
    drafter.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:  # norms that are all ones would hide a norm that is left out
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    return drafter
