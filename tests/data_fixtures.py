"""Tiny tokenizers and chat templates for the tests of `ds_dflash.data`, built here and saved to a directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ds_dflash.data import PreparedDataset, prepare
from ds_dflash.errors import UserError

END = "<|im_end|>"

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

# No generation prompt at all: what an assistant turn begins with is known from the template alone.
CHATML_UNPROMPTED = CHATML.split("{%- if add_generation_prompt")[0]

# Earlier answers are cut short, so that nothing tells where they end.
FORGETFUL = CHATML.replace("message.content +", "(message.content if loop.last else message.content[:4]) +")

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


def supervised_texts(input_ids: np.ndarray, loss_mask: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of every run of supervised tokens."""
    padded = np.concatenate([[False], loss_mask, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)
    return [str(tokenizer.decode(input_ids[first:last], clean_up_tokenization_spaces=False)) for first, last in edges]


class Preparer:
    """`prepare` with a cache and a tokenizer of its own."""

    def __init__(self, directory: Path, tokenizer_path: Path) -> None:
        self.directory = directory
        self.cache = directory / "cache"
        self.tokenizer_path = tokenizer_path
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)

    def __call__(self, source: Path | str, **changes: Any) -> PreparedDataset:
        settings: dict[str, Any] = {
            "tokenizer_path": self.tokenizer_path,
            "max_length": 256,
            "supervise": "assistant",
            "chat_template": None,
            "cache_dir": self.cache,
            "num_proc": None,
        }
        return prepare(str(source), **{**settings, **changes})

    def rows(self, rows: list[dict[str, Any]], **changes: Any) -> PreparedDataset:
        return self(write_jsonl(self.directory / "rows.jsonl", rows), **changes)

    def texts(self, prepared: PreparedDataset) -> list[tuple[str, list[str]]]:
        """Of every row: its text, and the texts of its supervised runs."""
        return [
            (str(self.tokenizer.decode(ids)), supervised_texts(ids, mask, self.tokenizer))
            for ids, mask in prepared.rows(range(len(prepared)))
        ]

    def refusal(self, source: Path | str, **changes: Any) -> str:
        """The one sentence that says why there is no such dataset; nothing is left that looks like one."""
        with pytest.raises(UserError) as caught:
            self(source, **changes)
        left = list(self.cache.glob("*"))
        assert all(path.is_file() for path in left)
        sentence = str(caught.value)
        assert "\n" not in sentence
        assert sentence.endswith(".")
        return sentence


def assert_every_row_is_accounted_for(prepared: PreparedDataset, rows_in: int) -> None:
    accounting = prepared.accounting
    assert accounting["rows_in"] == rows_in
    assert rows_in == len(prepared) + sum(accounting["dropped"].values())
    assert accounting["rows_kept"] == len(prepared) == len(prepared.lengths)
