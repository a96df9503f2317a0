"""Decoding held-out prompts: which ids end an answer, and the figures of whole runs."""

import json
from types import SimpleNamespace

import pytest
import tiny
from drafters import drafter_config, make_drafter

from ds_dflash import cli
from ds_dflash.errors import UserError
from ds_dflash.evaluate import DecodingOptions, end_of_text_ids, evaluate
from ds_dflash.export import write_drafter

TEXTS = ("a cat", "the dog sees a small bird near the red house and the tree", "not", "very big", "or")


def test_every_known_end_of_text_ends_an_answer():
    def ids(generation, config, tokenizer):
        model_config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(eos_token_id=config))
        target = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation), config=model_config)
        return end_of_text_ids(target, SimpleNamespace(eos_token_id=tokenizer))

    assert ids([7, 5], 5, 2) == (2, 5, 7)
    assert ids(None, 0, None) == (0,)
    assert ids(None, None, None) == ()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write_target(tmp_path_factory.mktemp("target"))


def write_drafter_for(directory, **fields):
    shape = {"vocab_size": 320, "hidden_size": 32} | fields
    config = drafter_config(**shape)
    write_drafter(make_drafter(config).state_dict(), config, directory)
    return directory


@pytest.fixture(scope="module")
def inputs(target, tmp_path_factory):
    """The arguments of `evaluate` that name files."""
    directory = tmp_path_factory.mktemp("inputs")
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return str(target), write_drafter_for(directory / "drafter"), prompts, "float32"


def without_seconds(figures):
    timed = ("speculative_seconds", "plain_seconds", "speedup")
    kept = {name: value for name, value in figures.items() if name not in timed}
    return kept | {"per_prompt": [without_seconds(prompt) for prompt in figures.get("per_prompt", [])]}


def test_every_answer_is_the_targets_own_in_batches_of_any_size(inputs):
    alone = evaluate(*inputs, DecodingOptions(max_new_tokens=7))
    assert alone["prompts"] == 5
    assert alone["equal"] + alone["ties"] == 5
    assert [prompt["prompt"] for prompt in alone["per_prompt"]] == [0, 1, 2, 3, 4]
    assert 1 <= alone["acceptance_length"] <= 4
    assert alone["teacher_forced_acceptance_length_walked"] == alone["acceptance_length_within_answer"]
    for size in (2, 16):  # 2: the last batch has one prompt; 16: more than there are prompts
        together = evaluate(*inputs, DecodingOptions(max_new_tokens=7, batch_size=size))
        assert without_seconds(together) == without_seconds(alone)


def test_sampled_answers_follow_from_the_seed_in_batches_of_any_size_and_have_no_verdict(inputs):
    def sampled(**options):
        return without_seconds(evaluate(*inputs, DecodingOptions(max_new_tokens=6, temperature=3.0, **options)))

    figures = sampled(seed=1)
    assert figures["equal"] is figures["ties"] is figures["different"] is None
    assert figures["teacher_forced_acceptance_length"] is None
    assert {prompt["verdict"] for prompt in figures["per_prompt"]} == {None}
    assert sampled(seed=1, batch_size=3) == figures
    assert sampled(seed=2) != figures  # at temperature 3 a random drafter is accepted now and then


def run(inputs, *options):
    target, drafter, prompts, _ = inputs
    files = ["--target", target, "--drafter", str(drafter), "--prompts", str(prompts), "--max-new-tokens", "5"]
    return cli.main(["evaluate", *files, *options])


def test_the_command_prints_one_json_object_or_a_table_of_prompts(inputs, capsys):
    assert run(inputs, "--json", "--temperature", "0.7", "--seed", "3", "--batch-size", "2") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["temperature"], figures["prompts"], len(figures["per_prompt"])) == (0.7, 5, 5)
    assert run(inputs) == 0
    printed = capsys.readouterr().out
    assert "equal to the target's greedy output: 5 of 5" in printed
    assert len(printed.split("\n\n")[1].strip().splitlines()) == 6


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "-0.5", "-0.5 is neither 0 (greedy) nor a positive finite number"),
        ("--temperature", "nan", "nan is neither"),
        ("--temperature", "inf", "inf is neither"),
        ("--temperature", "warm", "invalid temperature value: 'warm'"),
        ("--batch-size", "0", "0 is not at least 1"),
        ("--seed", "-1", "-1 is not at least 0"),
        ("--max-new-tokens", "0", "0 is not at least 1"),
    ],
)
def test_an_impossible_option_is_named_with_what_would_be_right(inputs, capsys, option, value, message):
    with pytest.raises(SystemExit, match="2"):
        run(inputs, f"{option}={value}")
    assert f"argument {option}: {message}" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit_the_targets_positions_is_refused_with_both_numbers(inputs):
    with pytest.raises(UserError, match=r"1020 new ones are more than the 1024 positions.*--max-new-tokens"):
        evaluate(*inputs, DecodingOptions(max_new_tokens=1020))


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
        evaluate(str(target), drafter, tmp_path / "unread.jsonl", "float32", DecodingOptions())
