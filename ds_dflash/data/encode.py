"""Examples to `input_ids` and `loss_mask`.

A batch of texts is tokenised by one call, each conversation once and whole, and spans of characters become tokens
through the tokenizer's offsets: a token is supervised that overlaps a span, as in transformers' own mask. Tokenizers
without offsets get the mask from token prefixes: the text cut at a span's edge must tokenise to a prefix of the whole.
Rows longer than `max_length` are cut on the right. A row is kept if it holds an anchor that can be learned from: two
neighbouring supervised tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_dflash.data.rows import Chat, Completion, Row, RowDroppedError, Text, Tokens, parse_row
from ds_dflash.data.template import Span, Templates
from ds_dflash.data.turns import render_chat


@dataclass(frozen=True)
class EncodedRow:
    """`input_ids` int32 [length], `loss_mask` bool [length], and how many tokens were cut off on the right."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    tokens_cut: int


@dataclass(frozen=True)
class Rendered:
    """Text to tokenise whole, and its supervised spans of characters (None: all of it)."""

    text: str
    spans: list[Span] | None


@dataclass(frozen=True)
class EncodeSettings:
    """What turns rows into tokens; `chat_template` is the template's text, None the tokenizer's own."""

    max_length: int
    supervise: str
    chat_template: str | None
    vocab_size: int | None


Result = Tokens | RowDroppedError


class RowEncoder:
    """Encodes rows of one format; can be sent to other processes."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        format_name: str,
        settings: EncodeSettings,
        tokenizer_path: Path,
    ) -> None:
        self._tokenizer = tokenizer
        self._format_name = format_name
        self._settings = settings
        self._tokenizer_path = tokenizer_path
        self._templates: Templates | None = None
        if format_name in ("messages", "conversations"):
            self._templates = self._load_templates()

    def _load_templates(self) -> Templates:
        return Templates(self._tokenizer, self._settings.chat_template, self._tokenizer_path)

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow | RowDroppedError]:
        """One result a row, in order."""
        examples = [self._parse(row) for row in rows]
        results: list[EncodedRow | RowDroppedError] = [RowDroppedError("", "")] * len(rows)
        for kind, tokenise in self._kinds():
            chosen = [i for i, example in enumerate(examples) if isinstance(example, kind)]
            for i, tokens in zip(chosen, tokenise([examples[i] for i in chosen]) if chosen else (), strict=True):
                results[i] = self._finish(tokens)
        return results

    def _kinds(self) -> list[tuple[type, Callable[[list[Any]], Sequence[Result]]]]:
        return [
            (Rendered, self._tokenise_rendered),
            (Completion, self._tokenise_completions),
            (Text, self._tokenise_texts),
            (Tokens, list),
            (RowDroppedError, list),
        ]

    def _parse(self, row: Row) -> Rendered | Completion | Text | Tokens | RowDroppedError:
        try:
            example = parse_row(self._format_name, row)
            return self._render(example) if isinstance(example, Chat) else example
        except RowDroppedError as dropped:
            return dropped

    def _render(self, chat: Chat) -> Rendered:
        if self._templates is None:  # a prompt that is a list of messages
            self._templates = self._load_templates()
        template = self._templates.for_tools(chat.tools)
        return Rendered(*render_chat(template, chat, self._settings.supervise))

    def _tokenise_rendered(self, items: list[Rendered]) -> list[Result]:
        if not self._tokenizer.is_fast:
            return [self._tokenise_without_offsets(item) for item in items]
        encoded = self._call([item.text for item in items], add_special_tokens=False, return_offsets_mapping=True)
        return [
            Tokens(np.asarray(input_ids, np.int64), mask_from_offsets(offsets, item.spans))
            for item, input_ids, offsets in zip(items, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def _tokenise_without_offsets(self, item: Rendered) -> Result:
        input_ids = self._tokenise(item.text)
        loss_mask = np.full(len(input_ids), item.spans is None)
        for span in item.spans or ():
            first, last = (self._count_tokens(item.text[:edge], input_ids) for edge in span)
            if first is None or last is None:
                return RowDroppedError("mask_not_found", "the tokenizer has no offsets, and a token lies over an edge")
            loss_mask[first:last] = True
        return Tokens(input_ids, loss_mask)

    def _count_tokens(self, prefix: str, input_ids: np.ndarray) -> int | None:
        """How many tokens the beginning of a text has, if they are the first of the whole text's."""
        tokens = self._tokenise(prefix)
        return len(tokens) if np.array_equal(tokens, input_ids[: len(tokens)]) else None

    def _tokenise(self, text: str) -> np.ndarray:
        return np.asarray(self._call([text], add_special_tokens=False)["input_ids"][0], np.int64)

    def _tokenise_completions(self, items: list[Completion]) -> list[Result]:
        prompts = self._call([item.prompt for item in items])["input_ids"]
        responses = self._call([item.response for item in items], add_special_tokens=False)["input_ids"]
        results: list[Result] = []
        for item, prompt, response in zip(items, prompts, responses, strict=True):
            if self._added_end(item.prompt, prompt):
                prompt = prompt[:-1]
            input_ids = np.asarray(prompt + self._with_end(response), np.int64)
            supervised = np.arange(len(input_ids)) >= (0 if self._settings.supervise == "all" else len(prompt))
            results.append(Tokens(input_ids, supervised))
        return results

    def _tokenise_texts(self, items: list[Text]) -> list[Result]:
        encoded = self._call([item.text for item in items])["input_ids"]
        arrays = [np.asarray(self._with_end(input_ids), np.int64) for input_ids in encoded]
        return [Tokens(input_ids, np.ones(len(input_ids), bool)) for input_ids in arrays]

    def _with_end(self, input_ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return input_ids if end is None or input_ids[-1:] == [end] else [*input_ids, end]

    def _added_end(self, text: str, input_ids: list[int]) -> bool:
        """Whether the tokenizer itself ended the prompt, as those do that put an end behind any text."""
        end = self._tokenizer.eos_token
        return end is not None and input_ids[-1:] == [self._tokenizer.eos_token_id] and not text.endswith(str(end))

    def _call(self, texts: list[str], **options: bool) -> Any:
        # verbose: a text longer than the model's context is no news here, max_length cuts it.
        return self._tokenizer(
            texts, return_attention_mask=False, return_token_type_ids=False, verbose=False, **options
        )

    def _finish(self, tokens: Result) -> EncodedRow | RowDroppedError:
        if isinstance(tokens, RowDroppedError):
            return tokens
        try:
            return finish(tokens, self._settings.max_length, self._settings.vocab_size)
        except RowDroppedError as dropped:
            return dropped


def mask_from_offsets(offsets: Sequence[tuple[int, int]], spans: list[Span] | None) -> np.ndarray:
    """Bool [length]: the tokens, at character `offsets` [length, 2] in order, that overlap one of the spans."""
    if spans is None:
        return np.ones(len(offsets), bool)
    start, end = np.fromiter(chain.from_iterable(offsets), np.int64).reshape(-1, 2).T
    loss_mask = np.zeros(len(offsets), bool)
    for first, last in spans:
        loss_mask |= (end > first) & (start < last)
    return loss_mask


def has_anchor(loss_mask: np.ndarray) -> bool:
    """Whether two neighbours are supervised: an anchor and at least one token for it to predict."""
    return bool((loss_mask[:-1] & loss_mask[1:]).any())


def finish(tokens: Tokens, max_length: int, vocab_size: int | None) -> EncodedRow:
    """Checks and cuts one row; raises RowDroppedError under the reason for which nothing can be learned from it."""
    input_ids, loss_mask = tokens.input_ids, tokens.loss_mask
    if not len(input_ids):
        raise RowDroppedError("empty", "there are no tokens")
    if not loss_mask.any():
        raise RowDroppedError("no_supervised_tokens", f"none of {len(input_ids)} tokens is supervised")
    if not has_anchor(loss_mask):
        raise RowDroppedError("too_short", "no two neighbouring tokens are supervised")
    if not has_anchor(loss_mask[:max_length]):
        first = int(np.flatnonzero(loss_mask)[0])
        raise RowDroppedError(
            "truncated_away", f"the first supervised token is at {first}, and max_length is {max_length}"
        )
    input_ids, loss_mask = input_ids[:max_length], loss_mask[:max_length]
    if input_ids.min() < 0 or (vocab_size is not None and input_ids.max() >= vocab_size):
        worst = int(input_ids.min() if input_ids.min() < 0 else input_ids.max())
        raise RowDroppedError("outside_vocabulary", f"token id {worst} in a vocabulary of {vocab_size}")
    return EncodedRow(input_ids.astype(np.int32), loss_mask, len(tokens.input_ids) - len(input_ids))
