"""A tiny random target with a tokenizer, chats for it and settings: enough for whole runs within seconds."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "the a cat dog bird sees likes hears small big red blue house tree and or near with very not".split()  # noqa: SIM905


def write_tokenizer(directory: Path) -> int:
    """A byte-level tokenizer with a ChatML template; returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return len(fast)


def write_target(directory: Path, layers: int = 6, hidden_size: int = 32, **config) -> Path:
    """A random Qwen3 target in fp32."""
    vocab_size = write_tokenizer(directory)
    torch.manual_seed(0)
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**(fields | config)))
    model.save_pretrained(directory)
    return directory


def write_chats(path: Path, rows: int = 48, seed: int = 0) -> Path:
    """JSON lines of one-turn chats of 5 to 60 words."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            question, answer = (" ".join(rng.choices(WORDS, k=rng.randint(5, 30))) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def settings(target: Path, train: Path, output_dir: Path, **sections) -> dict:
    """ds_config.json's content for a small fp32 run; `sections` update those of the block `ds_dflash`."""
    block = {
        "target": {"path": str(target), "dtype": "float32", "layer_ids": [1, 3]},
        "drafter": {"num_hidden_layers": 2, "block_size": 4},
        "data": {"train": str(train), "max_length": 256, "cache_dir": str(output_dir / "cache"), "num_proc": 1},
        "batching": {"token_budget": 512},
        "training": {"num_epochs": 2, "num_anchors": 8, "save_every": 3, "loss_decay_gamma": 4.0},
        "topology": {"timeout_seconds": 120},
    }
    for name, values in sections.items():
        block.setdefault(name, {}).update(values)
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "ds_dflash": {**block, "output_dir": str(output_dir)},
    }
