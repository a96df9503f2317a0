"""Which characters of a rendered conversation the target itself would have written.

`{% generation %}` tags in the template say it. Without them, for each assistant turn `i`:

1. growing prefixes: if the conversation before the turn with the generation prompt, and the conversation up to and
   including the turn, are both prefixes of the whole rendering, the turn is what lies between their ends;
2. where a template rewrites earlier turns, prefixes do not nest: `landmarks` finds the turn from character offsets;
3. if that cannot be verified, there is no answer, and the row is dropped.

A turn ends with its end-of-turn token: white space after it is the template's and the target never writes it.
Costs two renderings of the beginning of the conversation for each turn; the tokenizer is not involved.
"""

import json
from collections.abc import Mapping
from typing import Any

from ds_dflash.data.landmarks import Landmarks
from ds_dflash.data.rows import Chat, RowDroppedError
from ds_dflash.data.template import RENDER_ERRORS, ChatTemplate, Message, Span, generation_prompt


def render_chat(template: ChatTemplate, chat: Chat, supervise: str) -> tuple[str, list[Span] | None]:
    """The conversation as text and the spans of characters to supervise, in order; None means everything.

    `supervise` is "assistant" (every assistant turn), "last" (the last of them) or "all".
    Raises RowDroppedError: `bad_messages`, `no_supervised_tokens`, `mask_not_found`.
    """
    chat, text, tagged = _render_whole(template, chat)
    if supervise == "all":
        return text, None
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not turns:
        raise RowDroppedError("no_supervised_tokens", "no message has the role assistant")
    if template.has_generation_tags:
        return text, tagged if supervise == "assistant" else _last_tagged(template, chat, tagged, turns[-1])
    finder = TurnFinder(template, chat, text)
    return text, [finder.find(i) for i in (turns if supervise == "assistant" else turns[-1:])]


def _render_whole(template: ChatTemplate, chat: Chat) -> tuple[Chat, str, list[Span]]:
    """The chat as the template accepts it, its rendering and the spans inside generation tags."""
    refusal: Exception | None = None
    for arguments in (None, dict, str):
        try:
            accepted = chat if arguments is None else with_arguments(chat, arguments)
            if template.has_generation_tags:
                return accepted, *template.render_with_spans(accepted.messages, accepted.tools)
            return accepted, template.render(accepted.messages, accepted.tools), []
        except RENDER_ERRORS as error:
            refusal = refusal or error
    raise RowDroppedError("bad_messages", f"the chat template refuses them: {refusal}")


def with_arguments(chat: Chat, kind: type) -> Chat:
    """The same chat with the arguments of tool calls as objects (`dict`) or as JSON text (`str`, OpenAI's way).

    A template accepts one or the other, and datasets have both.
    """
    messages = []
    for message in chat.messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_arguments(call, kind) for call in calls]}
        messages.append(message)
    return Chat(messages, chat.tools)


def _with_arguments(call: Any, kind: type) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), kind):
        return call
    arguments = function.get("arguments")
    if kind is str:
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        arguments = json.loads(arguments)  # a ValueError, were it not JSON: the template would refuse it as well
    return {**call, "function": {**function, "arguments": arguments}}


def _last_tagged(template: ChatTemplate, chat: Chat, spans: list[Span], turn: int) -> list[Span]:
    """The spans of the last assistant turn: those beyond what the conversation before it has."""
    if turn == 0:
        return spans
    try:
        earlier = len(template.render_with_spans(chat.messages[:turn], chat.tools)[1])
    except RENDER_ERRORS:
        earlier = len(spans)
    if earlier >= len(spans):
        raise RowDroppedError("mask_not_found", f"the generation tags of message {turn + 1} are not found")
    return spans[earlier:]


class TurnFinder:
    """Finds assistant turns in one rendered conversation."""

    def __init__(self, template: ChatTemplate, chat: Chat, text: str) -> None:
        self._template = template
        self._chat = chat
        self._text = text
        self._landmarks: Landmarks | None = None

    def find(self, turn: int) -> Span:
        """The characters [start, end) of message `turn` that the target would write."""
        start = self._start_from_prefix(turn)
        end = self._end_from_prefix(turn) if start is not None else None
        if start is None:
            start = self.landmarks.written_from(turn)
        if end is None:
            end = self.landmarks.end(turn)
        if start is None or end is None or end < start:
            raise RowDroppedError(
                "mask_not_found",
                f"message {turn + 1} cannot be told apart in what the chat template prints; "
                "a template with {% generation %} tags would say where it is",
            )
        return start, start + len(self._text[start:end].rstrip())

    @property
    def landmarks(self) -> Landmarks:
        if self._landmarks is None:
            self._landmarks = Landmarks(self._template, self._chat.messages, self._chat.tools, self._text)
        return self._landmarks

    def _start_from_prefix(self, turn: int) -> int | None:
        header = generation_prompt(self._template)
        prompt = self._render(turn, True) if turn and header else None
        # A prompt that ends otherwise has no header: the turn's, which is the template's, would pass for the target's.
        if prompt is None or not prompt.endswith(header) or not self._text.startswith(prompt):
            return None
        return len(prompt)

    def _end_from_prefix(self, turn: int) -> int | None:
        if turn == len(self._chat.messages) - 1:
            return len(self._text)
        upto = self._render(turn + 1, False)
        return len(upto) if upto is not None and self._text.startswith(upto) else None

    def _render(self, count: int, add_generation_prompt: bool) -> str | None:
        messages: list[Message] = self._chat.messages[:count]
        try:
            return self._template.render(messages, self._chat.tools, add_generation_prompt=add_generation_prompt)
        except RENDER_ERRORS:
            return None
