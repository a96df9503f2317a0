"""Decoding held-out prompts: what a line of the file becomes, which ids end an answer, and the figures."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from drafters import drafter_config, make_drafter

from ds_dflash.data import load_tokenizer
from ds_dflash.errors import UserError
from ds_dflash.evaluate import PromptResult, describe, end_of_text_ids, evaluate, read_prompts, summary
from ds_dflash.export import write_drafter


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


def test_every_known_end_of_text_ends_an_answer():
    def ids(generation, config, tokenizer):
        model_config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(eos_token_id=config))
        target = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation), config=model_config)
        return end_of_text_ids(target, SimpleNamespace(eos_token_id=tokenizer))

    assert ids([7, 5], 5, 2) == (2, 5, 7)
    assert ids(None, 0, None) == (0,)
    assert ids(None, None, None) == ()


def test_the_acceptance_length_is_a_mean_over_steps_not_over_prompts():
    results = [
        PromptResult(np.array([4, 4, 1]), "equal", 10, 1.0, 3.0),
        PromptResult(np.array([2]), "tie", 3, 1.0, 1.0),
        PromptResult(np.zeros(0, np.int64), "different", 1, 2.0, 2.0),
    ]
    figures = summary(results, block_size=4)
    assert figures["acceptance_length"] == pytest.approx(11 / 4)
    assert figures["acceptance_histogram"] == [1, 1, 0, 2]
    assert (figures["equal"], figures["ties"], figures["different"]) == (1, 1, 1)
    assert (figures["prompts"], figures["new_tokens"]) == (3, 14)
    assert figures["speedup"] == pytest.approx(1.5)
    assert "acceptance length 2.750" in describe(figures)


def test_answers_of_one_token_have_no_acceptance_length():
    figures = summary([PromptResult(np.zeros(0, np.int64), "equal", 1, 1.0, 1.0)], block_size=4)
    assert figures["acceptance_length"] is None
    assert "nothing to draft" in describe(figures)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write_target(tmp_path_factory.mktemp("target"))


def write_drafter_for(directory, **fields):
    shape = {"vocab_size": 320, "hidden_size": 32} | fields
    config = drafter_config(**shape)
    write_drafter(make_drafter(config).state_dict(), config, directory)
    return directory


def test_every_answer_is_the_targets_own(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a cat", "the dog sees", "not")))
    figures = evaluate(
        str(target), write_drafter_for(tmp_path / "drafter"), prompts, max_new_tokens=12, dtype="float32"
    )
    assert figures["prompts"] == 3
    assert figures["equal"] + figures["ties"] == 3
    assert 1 <= figures["acceptance_length"] <= 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 16}, r"hidden size 16 and the target .* 32"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 6]}, "num_target_layers": 8},
            r"taps layer 6 and the target .* 6 layers",
        ),
        ({"vocab_size": 400}, r"vocabulary of 400 and the target .* of 320"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_numbers(target, tmp_path, fields, message):
    drafter = write_drafter_for(tmp_path / "drafter", **fields)
    with pytest.raises(UserError, match=message):
        evaluate(str(target), drafter, tmp_path / "unread.jsonl", max_new_tokens=4, dtype="float32")
