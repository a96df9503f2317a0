"""Which tokens of a conversation are supervised, for templates of every kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import (
    CHATML,
    CHATML_SYSTEM,
    CHATML_TAGGED,
    CHATML_UNPROMPTED,
    END,
    FORGETFUL,
    INST,
    THINKING,
    THINKING_UNOPENED,
    chat,
    make_tokenizer,
    supervised_texts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ds_dflash.data.encode import EncodedRow, EncodeSettings, RowEncoder
from ds_dflash.data.rows import RowDroppedError

MARKERS = "<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nNobody"
NOWHERE = Path("tokenizer")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "two"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), None))


def encode(
    tokenizer: PreTrainedTokenizerBase, template: str, row: dict[str, Any], supervise: str = "assistant"
) -> EncodedRow | RowDroppedError:
    encoder = RowEncoder(tokenizer, "messages", EncodeSettings(4096, supervise, template, None), NOWHERE)
    return encoder.encode([row])[0]


def supervised(
    tokenizer: PreTrainedTokenizerBase, template: str, row: dict[str, Any], supervise: str = "assistant"
) -> list[str]:
    result = encode(tokenizer, template, row, supervise)
    assert isinstance(result, EncodedRow), result
    assert result.input_ids.dtype == np.int32
    return supervised_texts(result.input_ids, result.loss_mask, tokenizer)


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED, CHATML_SYSTEM, CHATML_UNPROMPTED])
def test_each_assistant_turn_is_supervised_with_its_end_and_nothing_else(
    tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    answers = ["The answer is four.", f"He said {MARKERS}", "🎉 é\n\n  ", "assistant"]
    row = chat("hi", answers[0], "and?", answers[1], "", answers[2], "user", answers[3])
    assert supervised(tokenizer, template, row) == [answer + END for answer in answers]


def test_a_template_with_tags_has_the_mask_of_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat("hi", "The answer is four.", "and?", f"He said {MARKERS}")
    result = encode(tokenizer, CHATML_TAGGED, row)
    expected = tokenizer.apply_chat_template(
        row["messages"], chat_template=CHATML_TAGGED, return_assistant_tokens_mask=True, return_dict=True
    )
    assert isinstance(result, EncodedRow)
    assert result.input_ids.tolist() == expected["input_ids"]
    assert result.loss_mask.astype(int).tolist() == expected["assistant_masks"]


def test_a_template_without_tags_does_not_supervise_everything(tokenizer: PreTrainedTokenizerBase) -> None:
    result = encode(tokenizer, CHATML, chat("What is the capital of France?", "Paris"))
    assert isinstance(result, EncodedRow)
    assert 0 < result.loss_mask.sum() < len(result.loss_mask) / 2


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED, CHATML_UNPROMPTED, THINKING])
def test_last_supervises_only_the_last_assistant_turn(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    row = chat("hi", "first", "and?", "second", "more?", "third", "unanswered")
    assert supervised(tokenizer, template, row, "last") == ["third" + END]


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED])
def test_all_supervises_every_token_without_an_assistant_too(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    result = encode(tokenizer, template, chat("only a question"), "all")
    assert isinstance(result, EncodedRow)
    assert result.loss_mask.all()


def test_an_opened_thinking_block_is_prompt_and_earlier_thinking_is_gone(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat(
        "hi", "<think>\nlong\n</think>\n\nfirst", "and?", f"second {MARKERS}", "so?", "<think>\nhm\n</think>\n\nyes"
    )
    expected = ["first" + END, f"second {MARKERS}" + END, "hm\n</think>\n\nyes" + END]
    assert supervised(tokenizer, THINKING, row) == expected
    expected[-1] = "<think>\nhm\n</think>\n\nyes" + END
    assert supervised(tokenizer, THINKING_UNOPENED, row) == expected


def test_reasoning_content_is_supervised_where_the_template_prints_it(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat("hi", "first", "so?", "yes")
    for message in row["messages"][1::2]:
        message["reasoning_content"] = "I see"
    assert supervised(tokenizer, THINKING, row) == ["first" + END, "I see\n</think>\n\nyes" + END]


def test_an_empty_thinking_block_starts_where_the_generation_prompt_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat("hi", "first", "so?", "<b>yes</b>")
    assert supervised(tokenizer, THINKING_UNOPENED, row) == [
        "first" + END,
        "<think>\n\n</think>\n\n<b>yes</b>" + END,
    ]
    *_, last = supervised(tokenizer, THINKING, row)
    assert last.lstrip() == "</think>\n\n<b>yes</b>" + END


def test_an_answer_that_looks_like_the_opened_block_is_not_taken_for_it(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat("hi", "<tag> first", "so?", "< second", "and?", "third")
    assert supervised(tokenizer, THINKING, row)[:2] == ["<tag> first" + END, "< second" + END]


def test_a_prompt_without_thinking_is_found_where_the_template_prints_that(tokenizer: PreTrainedTokenizerBase) -> None:
    template = CHATML.replace(
        "message.role + '\\n' +", "message.role + '\\n' + ('<think></think>' if message.role == 'assistant' else '') +"
    )
    template = template.replace(
        "assistant\\n' }}{%- endif",
        "assistant\\n' + ('<think></think>' if enable_thinking is false else '<think>\\n') }}{%- endif",
    )
    assert supervised(tokenizer, template, chat("hi", "first", "so?", "second")) == ["first" + END, "second" + END]


@pytest.mark.parametrize("encode_arguments", [False, True])
def test_tool_calls_are_supervised_and_tool_results_are_not(
    tokenizer: PreTrainedTokenizerBase, encode_arguments: bool
) -> None:
    call = (
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "two"}'}}
        if encode_arguments
        else CALL
    )
    row = {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "two and two"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": f"4 {MARKERS}"},
            {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]},
            {"role": "tool", "content": "4"},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "The answer is four."},
            {"role": "user", "content": "thanks"},
            {"role": "assistant", "content": "Goodbye."},
        ],
    }
    printed = '<tool_call>\nadd\na=2\nb="two"\n</tool_call>'
    *earlier, last = supervised(tokenizer, THINKING, row)
    assert earlier == [printed + END, f"Wait.\n{printed}\n{printed}" + END, "The answer is four." + END]
    assert last.lstrip() == "</think>\n\nGoodbye." + END


def test_the_first_message_may_be_the_assistants(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "assistant", "content": "Hello."}, *chat("hi", "first")["messages"]]
    for template in (CHATML, CHATML_TAGGED, CHATML_SYSTEM):
        assert supervised(tokenizer, template, {"messages": messages}) == ["Hello." + END, "first" + END]


def test_an_end_of_turn_token_that_is_also_the_padding_stays_supervised(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path, CHATML, pad=END))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert supervised(tokenizer, CHATML, chat("hi", "first", "so?", "second")) == ["first" + END, "second" + END]


def test_white_space_behind_a_turn_without_an_end_token_is_not_supervised(tokenizer: PreTrainedTokenizerBase) -> None:
    template = (
        "{% for message in messages %}{{ message.role | upper + ': ' + message.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )
    texts = supervised(tokenizer, template, chat("hi", "The answer is four.", "so?", "That is all"))
    assert texts == [" The answer is four.", " That is all"]


def test_a_template_without_a_header_starts_at_the_end_of_the_question(tokenizer: PreTrainedTokenizerBase) -> None:
    assert supervised(tokenizer, INST, chat("hi", "first", "so?", "second")) == [" first" + END, " second" + END]


@pytest.mark.parametrize("footer", [" ", "\n\n\n", "x", "<|endoftext|>"])
@pytest.mark.parametrize("template", [CHATML, CHATML_SYSTEM, CHATML_UNPROMPTED, THINKING])
def test_what_the_template_prints_behind_every_conversation_is_not_supervised(
    tokenizer: PreTrainedTokenizerBase, template: str, footer: str
) -> None:
    row = chat("hi", "first", "so?", f"second {MARKERS}", "and?", "xx third")
    printed = template + "{{ '" + footer.replace("\n", "\\n") + "' }}"
    assert supervised(tokenizer, printed, row) == supervised(tokenizer, template, row)
    assert supervised(tokenizer, printed, chat("hi", "first")) == supervised(tokenizer, template, chat("hi", "first"))


def test_an_end_of_text_behind_the_last_turn_is_no_part_of_the_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    template = CHATML + "{%- if not add_generation_prompt %}{{- eos_token.replace('im_end', 'endoftext') }}{%- endif %}"
    texts = supervised(tokenizer, template, chat("hi", "first", "so?", "second"))
    assert texts[0] == "first" + END
    assert texts[1].startswith("second" + END)


def test_a_turn_that_cannot_be_told_apart_drops_the_row(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat("hi", "The answer is four.", "and?", "That is all.")
    dropped = encode(tokenizer, FORGETFUL, row)
    assert isinstance(dropped, RowDroppedError)
    assert dropped.reason == "mask_not_found"
    assert supervised(tokenizer, FORGETFUL, row, "last") == ["That is all." + END]


def test_text_that_holds_a_mark_is_not_guessed_at(tokenizer: PreTrainedTokenizerBase) -> None:
    dropped = encode(tokenizer, THINKING, chat("hi", "first \U000f0000", "so?", "second"))
    assert isinstance(dropped, RowDroppedError)
    assert dropped.reason == "mask_not_found"


def test_a_conversation_that_the_template_refuses_is_bad_messages(tokenizer: PreTrainedTokenizerBase) -> None:
    dropped = encode(tokenizer, INST, {"messages": [{"role": "system", "content": "no"}, *chat("a", "b")["messages"]]})
    assert isinstance(dropped, RowDroppedError)
    assert (dropped.reason, "only user and assistant" in dropped.detail) == ("bad_messages", True)


def test_content_in_parts_is_supervised(tokenizer: PreTrainedTokenizerBase) -> None:
    template = THINKING.replace(
        "{%- set content = message.content or '' %}", "{%- set content = message.content[0].text %}"
    ).replace("message.content | trim", "message.content[0].text | trim")
    row = chat("hi", "<think>x</think>first", "so?", "second")
    for message in row["messages"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    assert supervised(tokenizer, template, row)[0] == "first" + END


def test_a_token_that_is_part_of_a_character_is_supervised_with_the_character() -> None:
    tokenizer = byte_fallback_tokenizer()
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    texts = supervised(tokenizer, template, chat("🎉é", "🎉é", "é", "é🎉"))
    assert texts == ["🎉é</s>", "é🎉</s>"]


def byte_fallback_tokenizer() -> PreTrainedTokenizerBase:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_a_tokenizer_without_offsets_gets_its_mask_from_token_prefixes() -> None:
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    template = CHATML.replace("<|im_end|>", "</s>")
    texts = supervised(tokenizer, template, chat("hi", "🎉 first", "so?", "second"))
    assert texts == ["🎉 first</s>", "second</s>"]


WORDS = st.sampled_from(["four", " ", "\n", "🎉", "é", END, "<|im_start|>", "user\n", "assistant\n", "<b>", ":"])
ANSWERS = st.lists(WORDS, min_size=1, max_size=6).map(lambda words: "x" + "".join(words) + "y")


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED, CHATML_UNPROMPTED, THINKING])
@settings(max_examples=40, deadline=None)
@given(contents=st.lists(ANSWERS, min_size=2, max_size=6).filter(lambda contents: len(contents) % 2 == 0))
def test_the_supervised_text_is_the_answers_whatever_they_say(
    tokenizer: PreTrainedTokenizerBase, template: str, contents: list[str]
) -> None:
    texts = supervised(tokenizer, template, chat(*contents))
    texts[-1] = texts[-1].lstrip().removeprefix("</think>\n\n")
    assert texts == [answer + END for answer in contents[1::2]]
