"""Which kernels the target's forward runs on: FlashAttention and flash-linear-attention where they are installed.

transformers takes flash-linear-attention and causal-conv1d by itself when it can import them, FlashAttention only when
asked to. Neither is verified on a GPU.
"""

import torch
from transformers import MODEL_MAPPING, PretrainedConfig
from transformers.utils import (
    is_causal_conv1d_available,
    is_flash_attn_2_available,
    is_flash_linear_attention_available,
)


def attention_kernel(asked: str | None, config: PretrainedConfig, dtype: torch.dtype) -> str | None:
    """transformers' name of the attention that a target is loaded with; None: its own choice.

    asked: target.attn_implementation. FlashAttention needs a GPU, two-byte numbers and a model that knows it.
    """
    if asked is not None or dtype not in (torch.bfloat16, torch.float16) or not is_flash_attn_2_available():
        return asked
    model = MODEL_MAPPING.get(type(config), None)
    return "flash_attention_2" if getattr(model, "_supports_flash_attn", False) else None


def describe_kernels(config: PretrainedConfig) -> str:
    """What a loaded target attends with, by its config, and what is missing if that is slow."""
    text = f"attention {config._attn_implementation}"
    if "linear_attention" not in (getattr(config, "layer_types", None) or []):
        return text
    if is_flash_linear_attention_available() and is_causal_conv1d_available():
        return f"{text}, linear attention by flash-linear-attention and causal-conv1d"
    return (
        f"{text}, linear attention in plain torch, which is exact but slow: on GPUs install flash-linear-attention and"
        " causal-conv1d"
    )
