"""Tiny tokenizers and chat templates for the tests of `ds_dflash.data`, built here and saved to a directory."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

CHATML_TAGGED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

CHATML_SYSTEM = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}" + CHATML
)

# The generation prompt opens a thinking block, which turns before the last user message lose. Tools and calls.
THINKING = """{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content or '' %}
{%- set reasoning = message.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + reasoning.strip() + '\\n</think>\\n\\n' }}{%- endif %}
{{- content.strip() }}
{%- for call in message.tool_calls or [] %}
{%- if loop.first and content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' + call.function.name + '\\n' }}
{%- for name, value in call.function.arguments | items %}{{- name + '=' + (value | tojson) + '\\n' }}{%- endfor %}
{{- '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

# As THINKING, but the prompt leaves the thinking block to the target (Qwen3).
THINKING_UNOPENED = THINKING.replace("assistant\\n<think>\\n' }}{%- endif %}", "assistant\\n' }}{%- endif %}")

INST = """{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- else %}{{- raise_exception('only user and assistant') }}{%- endif %}{%- endfor %}"""

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? The capital of France is Paris.",
    "Please add two and two: the answer is four.\nThat is all.\n\nGoodbye.",
    "<|im_start|>user\nassistant\nsystem\ntool<|im_end|>",
]


def make_tokenizer(directory: Path, chat_template: str | None, *, pad: str = "<|pad|>", vocab_size: int = 400) -> Path:
    """Saves a byte-level tokenizer of ChatML's special tokens; its end of text is `<|im_end|>`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token=pad
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(*contents: str) -> dict[str, Any]:
    """A row of messages: user, assistant, user, ..."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}
