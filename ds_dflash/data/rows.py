"""A row of a source becomes one of four kinds of example, by the columns that its source has.

| columns                      | example                                            | supervised                       |
|------------------------------|----------------------------------------------------|----------------------------------|
| `messages` (`tools`)         | `Chat`                                             | assistant turns                  |
| `conversations` (`tools`)    | `Chat`, from ShareGPT's `from` and `value`         | assistant turns                  |
| `prompt`, `response`         | `Completion`; `Chat` where the prompt is messages  | the response and its end         |
| `text`                       | `Text`                                             | everything                       |
| `input_ids` (`loss_mask`)    | `Tokens`                                           | what the mask says; all if absent|

Nothing is copied but what a change needs: keys that hold null are left out of messages, as transformers does.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_dflash.errors import UserError

Row = Mapping[str, Any]

FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/response": ("prompt", "response"),
    "text": ("text",),
    "input_ids": ("input_ids",),
}
OPTIONAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("tools",),
    "conversations": ("tools",),
    "prompt/response": ("tools",),
    "text": (),
    "input_ids": ("loss_mask",),
}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class RowDroppedError(Exception):
    """This row cannot be trained on; counted under `reason`, with `detail` for the first of its kind."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Chat:
    """Messages as a chat template reads them, and the tools offered to the assistant."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True)
class Completion:
    """Plain text in two parts; the second is supervised."""

    prompt: str
    response: str


@dataclass(frozen=True)
class Text:
    """Plain text, all of it supervised."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """`input_ids` int64 [length] and `loss_mask` bool [length]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


Example = Chat | Completion | Text | Tokens


def recognise_format(columns: Iterable[str], source: str) -> str:
    """The format, a key of `FORMATS`, of a source with these columns; raises UserError unless exactly one fits."""
    found = set(columns)
    fitting = [name for name, needed in FORMATS.items() if found.issuperset(needed)]
    if len(fitting) == 1:
        return fitting[0]
    accepted = "`messages`, `conversations`, `prompt` with `response`, `text` or `input_ids`"
    listed = ", ".join(f"`{name}`" for name in sorted(found)) or "none"
    if fitting:
        names = " and ".join(fitting)
        raise UserError(
            f"{source}: the columns found ({listed}) fit several formats ({names}); keep those of one: {accepted}."
        )
    raise UserError(f"{source}: the columns found ({listed}) fit no format; accepted are {accepted}.")


def columns_of(format_name: str) -> tuple[str, ...]:
    """The columns that `parse_row` reads."""
    return FORMATS[format_name] + OPTIONAL_COLUMNS[format_name]


def parse_row(format_name: str, row: Row) -> Example:
    """The example in a row of this format; raises RowDroppedError where there is none."""
    needed = FORMATS[format_name]
    for name in needed:
        if row.get(name) is None or (len(needed) == 1 and not row[name]):
            raise RowDroppedError("empty", f"`{name}` is empty")
    if format_name == "messages":
        return Chat(parse_messages(row["messages"]), parse_tools(row.get("tools")))
    if format_name == "conversations":
        return Chat(parse_messages(row["conversations"]), parse_tools(row.get("tools")))
    if format_name == "prompt/response":
        return parse_prompt(row)
    if format_name == "text":
        return Text(encodable(row["text"], "text"))
    return parse_tokens(row)


def parse_prompt(row: Row) -> Chat | Completion:
    prompt, response = row["prompt"], row["response"]
    if isinstance(prompt, str):
        return Completion(encodable(prompt, "prompt"), encodable(response, "response"))
    answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
    return Chat(parse_messages(prompt) + parse_messages(answer), parse_tools(row.get("tools")))


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Messages with `role`, from a list of dicts (OpenAI's or ShareGPT's keys) or a JSON string of one."""
    messages = from_json(value, "bad_messages")
    if not isinstance(messages, list):
        raise RowDroppedError("bad_messages", f"messages are {type(messages).__name__}, not a list")
    if not messages:
        raise RowDroppedError("empty", "there are no messages")
    return [parse_message(message) for message in messages]


def parse_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowDroppedError("bad_messages", f"a message is {type(message).__name__}, not an object")
    if "role" not in message and "from" in message:
        message = from_sharegpt(message)
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("role"), str) or not kept["role"]:
        raise RowDroppedError("bad_messages", f"a message has no role (it has {sorted(kept)})")
    content = kept.get("content", "")
    if isinstance(content, str):
        encodable(content, "content", "bad_messages")
    elif not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise RowDroppedError("bad_messages", f"the content of a message is {type(content).__name__}, not text")
    return kept


def from_sharegpt(message: Mapping[str, Any]) -> dict[str, Any]:
    role = SHAREGPT_ROLES.get(str(message["from"]).lower())
    if role is None:
        raise RowDroppedError("bad_messages", f"a message is from {message['from']!r}, which names no role")
    return {"role": role, "content": message.get("value")}


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools, from a list of JSON schemas or a JSON string of one; None where there are none."""
    tools = from_json(value, "bad_messages") if value else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowDroppedError("bad_messages", "`tools` is not a list of objects")
    return tools


def parse_tokens(row: Row) -> Tokens:
    input_ids = as_array(row["input_ids"])
    if input_ids.ndim != 1 or input_ids.dtype.kind not in "iu":
        raise RowDroppedError("bad_tokens", "`input_ids` is not a list of whole numbers")
    given = row.get("loss_mask")
    loss_mask = np.ones(len(input_ids), bool) if given is None else as_array(given)
    if loss_mask.dtype.kind not in "biu" or loss_mask.ndim != 1:
        raise RowDroppedError("bad_tokens", "`loss_mask` is not a list of 0 and 1")
    if len(loss_mask) != len(input_ids):
        raise RowDroppedError(
            "mask_length_differs", f"`loss_mask` has {len(loss_mask)} entries for {len(input_ids)} tokens"
        )
    return Tokens(input_ids.astype(np.int64), loss_mask.astype(bool))


def as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # lists of lists of several lengths
        return np.asarray(None)


def from_json(value: Any, reason: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise RowDroppedError(reason, f"a column holds text that is not JSON: {error}") from None


def encodable(value: Any, name: str, reason: str = "bad_text") -> str:
    """The text itself; half of a surrogate pair, which JSON can spell, has no UTF-8 and drops the row."""
    if not isinstance(value, str):
        raise RowDroppedError(reason, f"`{name}` is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowDroppedError(reason, f"`{name}` has half of a surrogate pair at character {error.start}") from None
    return value
