"""Finds messages in a rendered conversation whose template rewrites earlier turns.

Two more renderings carry marks, characters of a private plane of Unicode that no template treats specially:

- the *marked* one has every message's content with marks around it (the assistant's only behind it: templates read
  thinking off its front). Without the marks it must be the real rendering, but for white space that the template
  strips from contents; so each mark has a place in the real rendering.
- the *skeleton* has a mark in place of every content. What lies between two marks there is the template's alone: the
  tail of one message and the header of the next, told apart by the skeleton of the conversation cut in between.

A message ends where tail and header of the skeleton are both found at its mark. A turn's part that the target writes
starts behind the generation prompt (with or without thinking, as the turn has it), or behind the header where a
template leaves a part of the prompt (an opened thinking block) out of earlier turns. All is compared with the real
rendering and nothing is assumed: what does not fit has no answer. Skeletons are remembered, as most conversations of a
dataset share few of them.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial

from ds_dflash.data.template import RENDER_ERRORS, ChatTemplate, Message, Tools

FIRST_MARK = 0xF0000
LAST_MARK = 0xFFFFD
MARKS = re.compile(f"([{chr(FIRST_MARK)}-{chr(LAST_MARK)}])")


def end_mark(index: int) -> str:
    return chr(FIRST_MARK + 2 * index)


def start_mark(index: int) -> str:
    return chr(FIRST_MARK + 2 * index + 1)


class Landmarks:
    """Places of messages in `text`, the rendering of `messages`; positions are characters, None is "not found"."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: Tools, text: str) -> None:
        self._messages = messages
        self._text = text
        self._places: dict[str, int] = {}
        self._skeleton: Skeleton | None = None
        if 2 * len(messages) > LAST_MARK - FIRST_MARK or max(text, default="") >= chr(FIRST_MARK):
            return  # the marks would not be unique
        try:
            self._places = self._place(template, tools, empty=True) or self._place(template, tools, empty=False)
            skeleton = json.dumps([_hollow(i, message) for i, message in enumerate(messages)])
            self._skeleton = _skeleton(template, skeleton, json.dumps(tools))
        except RENDER_ERRORS:
            return

    def _place(self, template: ChatTemplate, tools: Tools, *, empty: bool) -> dict[str, int]:
        marked = [_mark(i, message, empty=empty) for i, message in enumerate(self._messages)]
        return place_marks(template.render(marked, tools), self._text)

    def end(self, index: int) -> int | None:
        """Where message `index` ends, its end-of-turn token and the template's white space included."""
        if self._skeleton is None:
            return None
        if index == len(self._messages) - 1:
            return len(self._text) - len(self._footer(index))
        for candidate in (self._end_from_own_mark(index), self._end_from_next_mark(index)):
            if candidate is not None and self._behind_header(index + 1, candidate) is not None:
                return candidate
        return None

    def _footer(self, last: int) -> str:
        """What the template prints behind the last message, whoever wrote that: mostly nothing."""
        assert self._skeleton is not None
        footer = self._skeleton.footer(last) or ""
        return footer if self._text.endswith(footer) else ""

    def written_from(self, index: int) -> int | None:
        """Where in assistant turn `index` the target starts to write: behind the generation prompt."""
        if self._skeleton is None:
            return None
        begin = 0 if index == 0 else self.end(index - 1)
        return None if begin is None else self._behind_header(index, begin)

    def _end_from_own_mark(self, index: int) -> int | None:
        assert self._skeleton is not None
        place, tail = self._places.get(end_mark(index)), self._skeleton.tail(index)
        if place is None or tail is None or not self._text.startswith(tail, place):
            return None
        return place + len(tail)

    def _end_from_next_mark(self, index: int) -> int | None:
        assert self._skeleton is not None
        place, header = self._places.get(start_mark(index + 1)), self._skeleton.header(index + 1)
        if place is None or header is None or not self._text.endswith(header, 0, place):
            return None
        return place - len(header)

    def _behind_header(self, index: int, begin: int) -> int | None:
        assert self._skeleton is not None
        header = self._skeleton.header(index)
        if header is None:
            return None
        if self._messages[index]["role"] == "assistant":
            prompts = self._skeleton.generation_prompts(index)
            header = _assistant_header(header, prompts, self._text[begin:], first=index == 0)
        if header is None or not self._text.startswith(header, begin):
            return None
        return begin + len(header)


def _assistant_header(header: str, prompts: list[str], turn: str, *, first: bool) -> str | None:
    """The part of an assistant turn's beginning that is prompt.

    `header` is what the template puts before the content, for the `first` message with the beginning of the
    conversation in front. `prompts` are what a target may have been given, likeliest first.
    """
    if not prompts:
        return None
    if "" in prompts:
        return header if header.strip() else ""
    for prompt in prompts:
        if first and prompt in header:
            return header[: header.rindex(prompt) + len(prompt)]
        if turn.startswith(prompt):
            return prompt
    return header if any(prompt.startswith(header) for prompt in prompts) and not first else None


class Skeleton:
    """The template's own text around the contents of a conversation, each content being its end mark."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: Tools) -> None:
        self._template = template
        self._messages = messages
        self._tools = tools
        self._remembered: dict[tuple[str, int], str | None] = {}

    def tail(self, index: int) -> str | None:
        """What follows the content of message `index` and belongs to it."""
        return self._remember("tail", index, self._find_tail)

    def header(self, index: int) -> str | None:
        """What precedes the content of message `index` and belongs to it."""
        return self._remember("header", index, self._find_header)

    def footer(self, index: int) -> str | None:
        """What follows message `index` and belongs to none, if the conversation ends there."""
        return self._remember("footer", index, self._find_footer)

    def generation_prompts(self, index: int) -> list[str]:
        """What generation prompts add behind the messages before `index` (behind the first, for index 0).

        The template's own comes first, then those without and with thinking; empty if even the first is not found.
        """
        found = [
            self._remember(f"prompt {thinking}", max(index, 1), partial(self._find_prompt, thinking=thinking))
            for thinking in (None, False, True)
        ]
        if found[0] is None:
            return []
        footer, header = self.footer(max(index, 1) - 1) or "", self.header(index) or ""
        # The footer stands behind the prompt as well, if the template does not leave it out there.
        return [
            prompt if header.startswith(prompt) else prompt.removesuffix(footer)
            for prompt in found
            if prompt is not None
        ]

    def _remember(self, kind: str, index: int, find: Callable[[int], str | None]) -> str | None:
        if (kind, index) not in self._remembered:
            try:
                self._remembered[kind, index] = find(index)
            except RENDER_ERRORS:
                self._remembered[kind, index] = None
        return self._remembered[kind, index]

    def _find_tail(self, index: int) -> str | None:
        closing = self._closing(index)
        following = self._remember("between", index + 1, self._find_between)
        if closing is None or following is None:
            return closing if index == len(self._messages) - 1 else None
        return common_tail(closing, following)

    def _find_footer(self, index: int) -> str | None:
        closing, tail = self._closing(index), self.tail(index)
        return closing.removeprefix(tail) if closing is not None and tail is not None else None

    def _find_header(self, index: int) -> str | None:
        between = self._remember("between", index, self._find_between)
        tail = self.tail(index - 1) if index else ""
        return None if between is None or tail is None else between.removeprefix(tail)

    def _closing(self, index: int) -> str | None:
        """All that follows the content of message `index` if the conversation ends there: tail and footer."""
        return self._remember("closing", index, lambda i: self._behind_mark(i, self._render(i + 1)))

    def _find_between(self, index: int) -> str | None:
        """What lies between the contents of message `index` and the one before: tail and header.

        Behind the last message a question is imagined.
        """
        whole = self._remember("whole", len(self._messages), self._render)
        if index == len(self._messages):
            question = {"role": "user", "content": end_mark(index)}
            whole = self._template.render([*self._messages, question], self._tools)
        if whole is None or whole.count(end_mark(index)) != 1:
            return None
        before = whole[: whole.index(end_mark(index))]
        return self._behind_mark(index - 1, before) if index else before

    def _find_prompt(self, index: int, *, thinking: bool | None) -> str | None:
        prompted = self._render(index, add_generation_prompt=True, enable_thinking=thinking)
        closing, tail = self._behind_mark(index - 1, prompted), self.tail(index - 1)
        if closing is None or tail is None or not closing.startswith(tail):
            return None
        return closing.removeprefix(tail)

    def _render(self, count: int, **options: bool | None) -> str:
        return self._template.render(self._messages[:count], self._tools, **options)  # type: ignore[arg-type]

    @staticmethod
    def _behind_mark(index: int, text: str) -> str | None:
        _, mark, rest = text.partition(end_mark(index))
        return rest if mark and not MARKS.search(rest) else None


def common_tail(closing: str, following: str) -> str | None:
    """The tail in `closing` (tail and footer) and `following` (tail and header), or None.

    Where footer and header begin alike, the tail ends with the white space before them.
    """
    differ = (i for i, (one, other) in enumerate(zip(closing, following, strict=False)) if one != other)
    common = closing[: next(differ, min(len(closing), len(following)))]
    if len(common) == len(closing):
        return common
    tail = re.sub(r"\S+\Z", "", common)
    return tail if tail.strip() else None


@lru_cache(maxsize=256)
def _skeleton(template: ChatTemplate, messages: str, tools: str) -> Skeleton:
    return Skeleton(template, json.loads(messages), json.loads(tools))


def _hollow(index: int, message: Message) -> Message:
    mark = end_mark(index)
    parts = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": mark}] if parts else mark}


def _mark(index: int, message: Message, *, empty: bool) -> Message:
    """The message with marks around its content.

    A message without text stays unmarked, but that the user's or a tool's is marked if `empty`: most templates print
    it all the same, while an assistant's content may be empty next to tool calls.
    """
    before = "" if message["role"] == "assistant" else start_mark(index)
    content = message.get("content")
    if isinstance(content, str):
        marked = content or (empty and before)
        return {**message, "content": before + content + end_mark(index)} if marked else message
    texts = [i for i, part in enumerate(content or ()) if isinstance(part.get("text"), str)]
    if content is None or not texts:
        return message
    parts = [dict(part) for part in content]
    parts[texts[0]]["text"] = before + parts[texts[0]]["text"]
    parts[texts[-1]]["text"] += end_mark(index)
    return {**message, "content": parts}


def place_marks(marked: str, text: str) -> dict[str, int]:
    """Places in `text` of the marks in `marked`; empty unless the two are equal but for the marks, in one way only.

    Content next to its marks may have lost white space in `text`, which the mark shielded from being stripped.
    """
    pieces = MARKS.split(marked)
    frontier: dict[int, tuple[int, ...]] = {0: ()}  # characters of `text` used -> the marks' places so far
    for k in range(0, len(pieces), 2):
        left = pieces[k - 1] if k else ""
        right = pieces[k + 1] if k + 1 < len(pieces) else ""
        reached: dict[int, tuple[int, ...]] = {}
        for used, places in frontier.items():
            for piece in _readings(pieces[k], left, right):
                if text.startswith(piece, used):
                    if used + len(piece) in reached:
                        return {}
                    reached[used + len(piece)] = (*places, used + len(piece))
        frontier = reached
    marks = pieces[1::2]
    if len(text) not in frontier or len(set(marks)) != len(marks):
        return {}
    return dict(zip(marks, frontier[len(text)], strict=False))


def _readings(piece: str, left: str, right: str) -> set[str]:
    """The piece between two marks as it may stand in the real rendering."""
    readings = {piece}
    if right and _is_end(right):
        readings.add(piece.rstrip())
    if left and not _is_end(left):
        readings |= {reading.lstrip() for reading in readings}
    return readings


def _is_end(mark: str) -> bool:
    return (ord(mark) - FIRST_MARK) % 2 == 0
