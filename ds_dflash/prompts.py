"""Prompts to decode, from JSON lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ds_dflash.data.rows import RowDroppedError, encodable, parse_messages, parse_tokens, parse_tools
from ds_dflash.data.template import RENDER_ERRORS
from ds_dflash.errors import UserError


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Iterator[Tensor]:
    """Prompts int64 [length] from JSON lines with `messages` (rendered for an answer), `prompt` (text) or `input_ids`.

    Assistant messages at the end of a conversation are left out: they are what is to be generated. Ids are below
    `vocabulary`. Raises UserError naming file and line.
    """
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {state}: give a JSONL file of prompts.")
    found = 0
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            ids = _encode(json.loads(line), tokenizer)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}, column {error.colno}: not JSON ({error.msg}).") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 (byte {error.start}).") from None
        except RowDroppedError as error:
            raise UserError(f"{place}: {error.detail}.") from None
        except (ValueError, RecursionError) as error:  # a number with thousands of digits, thousands of brackets
            raise UserError(f"{place}: not JSON that can be read ({error}).") from None
        outside = [token for token in ids if not 0 <= token < vocabulary]
        if outside:
            raise UserError(f"{place}: token id {outside[0]} is outside the target's vocabulary of {vocabulary}.")
        if not ids:
            raise UserError(f"{place}: the prompt has no tokens.")
        found += 1
        yield torch.tensor(ids, dtype=torch.int64)
    if not found:
        raise UserError(f"{path} holds no prompts.")


def _encode(row: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a line's prompt; raises RowDroppedError as reading training data does."""
    if not isinstance(row, dict) or not {"messages", "prompt", "input_ids"} & row.keys():
        raise RowDroppedError("empty", "a prompt is an object with messages, prompt or input_ids")
    if "input_ids" in row:
        return parse_tokens({"input_ids": row["input_ids"]}).input_ids.tolist()
    if "prompt" in row:
        return tokenizer(encodable(row["prompt"], "prompt"))["input_ids"]
    messages = parse_messages(row["messages"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise RowDroppedError("empty", "there is no message to answer")
    if tokenizer.chat_template is None:
        raise RowDroppedError("bad_messages", "messages need a chat template, and the target's tokenizer has none")
    tools: Any = parse_tools(row.get("tools"))
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, tools=tools)
    except RENDER_ERRORS as error:
        raise RowDroppedError("bad_messages", f"the chat template refuses the messages ({error})") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]
