"""Random targets of several architectures, as models and as checkpoints: small, with 6 layers and 60 ids."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 60

DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
HYBRID = DENSE | {
    "rms_norm_eps": 1e-3,  # norms inside linear attention blow up the rounding of the small numbers that are there
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.5,
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}


def qwen3(**fields) -> PreTrainedModel:
    return _finish(Qwen3ForCausalLM(Qwen3Config(**(DENSE | fields))))


def qwen3_tied(**fields) -> PreTrainedModel:
    return qwen3(**({"tie_word_embeddings": True} | fields))


def llama(**fields) -> PreTrainedModel:
    return _finish(LlamaForCausalLM(LlamaConfig(**(DENSE | fields))))


def llama_tied(**fields) -> PreTrainedModel:
    return llama(**({"tie_word_embeddings": True} | fields))


def moe(**fields) -> PreTrainedModel:
    return _finish(Qwen3MoeForCausalLM(Qwen3MoeConfig(**(DENSE | EXPERTS | {"norm_topk_prob": True} | fields))))


def hybrid(**fields) -> PreTrainedModel:
    """A multimodal model whose text model mixes linear and full attention."""
    config = Qwen3_5Config(text_config=HYBRID | fields, vision_config=VISION, tie_word_embeddings=False)
    return _finish(Qwen3_5ForConditionalGeneration(config))


def hybrid_moe(**fields) -> PreTrainedModel:
    """As `hybrid`, with experts."""
    text = HYBRID | EXPERTS | {"shared_expert_intermediate_size": 8} | fields
    config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    return _finish(Qwen3_5MoeForConditionalGeneration(config))


def _finish(model: PreTrainedModel) -> PreTrainedModel:
    return model.eval().requires_grad_(False)


KINDS = {make.__name__: make for make in (llama, llama_tied, qwen3, qwen3_tied, moe, hybrid, hybrid_moe)}
"""Every kind of target that is supported, by its name."""


def build(make, seed: int = 0, **fields) -> PreTrainedModel:
    """A model of `make` with weights that follow from `seed`."""
    torch.manual_seed(seed)
    return make(**fields)


def write(model: PreTrainedModel, directory: Path, **options) -> Path:
    model.save_pretrained(directory, **options)
    return directory
