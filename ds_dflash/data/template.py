"""A tokenizer's chat template: which one counts, and rendering with it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ds_dflash.errors import UserError

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]

# What a template may raise over a conversation that it cannot render; anything else is a bug of ours.
RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError)
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def read_template_setting(chat_template: str | None) -> str | None:
    """Template text from a setting that is text, a file's path or None (the tokenizer's own)."""
    if chat_template is None or "{%" in chat_template or "{{" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise UserError(f"data.chat_template: {chat_template!r} is neither a file nor the text of a template.")
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class ChatTemplate:
    """One template's text with the special tokens it may print; hashable, so that renderings can be remembered."""

    text: str
    special_tokens: tuple[tuple[str, str], ...]

    @property
    def has_generation_tags(self) -> bool:
        return GENERATION_TAG.search(self.text) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
    ) -> str:
        """The conversation as text; raises one of `RENDER_ERRORS` where the template refuses it.

        `enable_thinking` is what templates of reasoning models call their switch; None leaves it to the template.
        """
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        return self._render(messages, tools, {"add_generation_prompt": add_generation_prompt, **switches})[0][0]

    def render_with_spans(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The conversation as text and the character spans inside the template's `{% generation %}` tags."""
        rendered, spans = self._render(messages, tools, {"return_assistant_tokens_mask": True})
        return rendered[0], [(start, end) for start, end in spans[0]]

    def _render(
        self, messages: Sequence[Message], tools: Tools, options: dict[str, Any]
    ) -> tuple[list[str], list[list[Span]]]:
        return render_jinja_template(  # type: ignore[return-value]
            conversations=[list(messages)],
            tools=tools,  # type: ignore[arg-type]
            chat_template=self.text,
            **dict(self.special_tokens),  # type: ignore[arg-type]
            **options,
        )


@lru_cache
def generation_prompt(template: ChatTemplate) -> str:
    """What the generation prompt adds behind a question; "" where a template has none or does not only add."""
    question = [{"role": "user", "content": "a"}]
    try:
        bare = template.render(question, None)
        prompted = template.render(question, None, add_generation_prompt=True)
    except RENDER_ERRORS:
        return ""
    return prompted.removeprefix(bare) if prompted.startswith(bare) else ""


class Templates:
    """The template for conversations with and without tools; a tokenizer may have one for each.

    Raises UserError where the tokenizer has no template and the setting gives none, or where it does not compile.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_text: str | None, tokenizer_path: Path) -> None:
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        try:
            plain = tokenizer.get_chat_template(template_text, None)
            with_tools = tokenizer.get_chat_template(template_text, [{}])
        except ValueError:
            raise UserError(
                f"{tokenizer_path}: the tokenizer has no chat template, which rows of messages need; give one in "
                "data.chat_template (a file or its text)."
            ) from None
        self._plain, self._with_tools = (ChatTemplate(text, tuple(special.items())) for text in (plain, with_tools))
        for template in (self._plain, self._with_tools):
            _check_syntax(template, tokenizer_path)

    def for_tools(self, tools: Tools) -> ChatTemplate:
        return self._with_tools if tools else self._plain


def _check_syntax(template: ChatTemplate, tokenizer_path: Path) -> None:
    try:
        template.render([{"role": "user", "content": "a"}], None)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"{tokenizer_path}: the chat template does not compile: {error.message} at line {error.lineno}."
        ) from None
    except RENDER_ERRORS:
        return  # refusing this one conversation is the template's right
