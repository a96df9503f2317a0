"""What a line of a file of prompts becomes."""

import json

import pytest
import tiny

from ds_dflash.data import load_tokenizer
from ds_dflash.errors import UserError
from ds_dflash.prompts import read_prompts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(directory)
    return load_tokenizer(directory, trust_remote_code=False)


def read(tmp_path, tokenizer, *lines):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return [prompt.tolist() for prompt in read_prompts(file, tokenizer, len(tokenizer))]


def test_the_three_kinds_of_prompts_are_read_in_order_and_empty_lines_passed_over(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "a cat"}]
    prompts = read(tmp_path, tokenizer, {"messages": messages}, b"", {"prompt": "the dog"}, {"input_ids": [5, 6]}, b" ")
    assert tokenizer.decode(prompts[0]) == "<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompts[1]) == "the dog"
    assert prompts[2] == [5, 6]


def test_answers_at_the_end_of_a_conversation_are_left_out(tmp_path, tokenizer):
    question, answer = {"role": "user", "content": "a cat"}, {"role": "assistant", "content": "near"}
    alone, answered, again = read(
        tmp_path,
        tokenizer,
        {"messages": [question]},
        {"messages": [question, answer, answer]},
        {"messages": [question, answer, question]},
    )
    assert answered == alone
    assert again[: len(alone)] == alone
    assert len(again) > len(alone)


def test_a_line_ends_where_json_says_it_does(tmp_path, tokenizer):
    text = "a\u2028cat\x85dog"
    prompts = read(tmp_path, tokenizer, json.dumps({"prompt": text}, ensure_ascii=False).encode())
    assert tokenizer.decode(prompts[0]) == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', r"line 2, column 15: not JSON"),
        (b"[" * 100_000, r"line 2: not JSON that can be read"),
        (b'{"input_ids": [' + b"1" * 5000 + b"]}", r"line 2: not JSON that can be read"),
        (b'{"prompt": "\xff"}', r"line 2: not UTF-8"),
        ([], r"line 2: a prompt is an object with messages, prompt or input_ids"),
        ({"text": "a"}, r"line 2: a prompt is an object with messages, prompt or input_ids"),
        ({"prompt": 3}, r"line 2: `prompt` is int, not text"),
        ({"prompt": ""}, r"line 2: the prompt has no tokens"),
        ({"input_ids": ["a"]}, r"line 2: `input_ids` is not a list of whole numbers"),
        ({"input_ids": [5, 320]}, r"line 2: token id 320 is outside the target's vocabulary of 320"),
        ({"input_ids": [-1]}, r"line 2: token id -1 is outside"),
        ({"messages": "a"}, r"line 2: a column holds text that is not JSON"),
        ({"messages": [{"content": "a"}]}, r"line 2: a message has no role"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, r"line 2: there is no message to answer"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, tokenizer, line, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, tokenizer, {"prompt": "a"}, line)


def test_a_file_without_prompts_is_refused(tmp_path, tokenizer):
    with pytest.raises(UserError, match="holds no prompts"):
        read(tmp_path, tokenizer, b"", b"  ")
    with pytest.raises(UserError, match="does not exist"):
        list(read_prompts(tmp_path / "missing.jsonl", tokenizer, 320))
