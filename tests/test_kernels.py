"""Which kernels a target is loaded with, on a machine that has them. Not verified: what they compute."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, Qwen3Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Model

from ds_dflash import kernels


@pytest.fixture
def has_flash_attention(monkeypatch):
    monkeypatch.setattr(kernels, "is_flash_attn_2_available", lambda: True)


def loaded(**config):
    return SimpleNamespace(_attn_implementation="sdpa", **config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_is_used_where_it_is_installed(has_flash_attention, dtype):
    assert kernels.attention_kernel(None, Qwen3Config(), dtype) == "flash_attention_2"


def test_the_settings_have_the_last_word(has_flash_attention):
    assert kernels.attention_kernel("eager", Qwen3Config(), torch.bfloat16) == "eager"


def test_flash_attention_is_not_asked_of_what_it_cannot_do(has_flash_attention, monkeypatch):
    assert kernels.attention_kernel(None, Qwen3Config(), torch.float32) is None
    monkeypatch.setattr(GPT2Model, "_supports_flash_attn", False)
    assert kernels.attention_kernel(None, GPT2Config(), torch.bfloat16) is None


def test_without_flash_attention_the_choice_is_left_to_transformers(monkeypatch):
    monkeypatch.setattr(kernels, "is_flash_attn_2_available", lambda: False)
    assert kernels.attention_kernel(None, Qwen3Config(), torch.bfloat16) is None


@pytest.mark.parametrize("is_there", [True, False])
def test_the_log_names_the_kernels_of_linear_attention_where_there_is_some(monkeypatch, is_there):
    monkeypatch.setattr(kernels, "is_flash_linear_attention_available", lambda: is_there)
    monkeypatch.setattr(kernels, "is_causal_conv1d_available", lambda: is_there)
    said = kernels.describe_kernels(loaded(layer_types=["linear_attention", "full_attention"]))
    assert ("plain torch" in said, "on GPUs install" in said) == (not is_there, not is_there)
    assert kernels.describe_kernels(loaded(layer_types=["full_attention"])) == "attention sdpa"
    assert kernels.describe_kernels(loaded()) == "attention sdpa"
