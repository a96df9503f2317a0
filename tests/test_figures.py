"""The figures of decoded prompts: means over steps, shares of slots, and what people read."""

import json

import numpy as np
import pytest

from ds_dflash.figures import LISTED_PROMPTS, PromptResult, describe, summary


def result(index, lengths, new_tokens, verdict="equal", forced=None, seconds=(1.0, 1.0), plain=None):
    """`plain`: new tokens of plain decoding, if not as many."""
    lengths = np.array(lengths, np.int64)
    forced = None if forced is None else np.array(forced)
    return PromptResult(index, new_tokens, lengths, verdict, forced, plain or new_tokens, *seconds)


def three_results():
    forced = [4, 1, 1, 1, 3, 2, 2, 2, 2]
    return [
        result(0, [4, 4, 3], 10, "equal", forced, seconds=(1.0, 3.0)),
        result(1, [2], 3, "tie", [2, 1], seconds=(1.0, 1.0)),
        result(2, [], 1, "different", np.zeros(0, np.int64), seconds=(2.0, 2.0)),
    ]


def test_the_acceptance_length_is_a_mean_over_steps_not_over_prompts():
    figures = summary(three_results(), block_size=4)
    assert figures["acceptance_length"] == pytest.approx(13 / 4)
    assert figures["acceptance_histogram"] == [0, 1, 1, 2]
    assert (figures["equal"], figures["ties"], figures["different"]) == (1, 1, 1)
    assert (figures["prompts"], figures["new_tokens"], figures["steps"]) == (3, 14, 4)
    assert figures["speedup"] == pytest.approx(1.5)


def test_the_share_of_a_slot_is_that_of_the_steps_that_accepted_it():
    assert summary(three_results(), block_size=4)["accepted_share_slot"] == [1.0, 0.75, 0.5]
    shares = summary([result(0, [1, 2, 2, 4], 10)], block_size=4)["accepted_share_slot"]
    assert shares == [0.75, 0.25, 0.25]


def test_what_training_counts_is_taken_on_a_walk_by_it_and_at_every_token():
    """The walk through the first answer starts at its tokens 0, 4 and 7; decoding's last proposal is past its end."""
    figures = summary(three_results(), block_size=4)
    assert figures["acceptance_length_within_answer"] == pytest.approx((4 + 4 + 2 + 2) / 4)
    assert figures["teacher_forced_acceptance_length_walked"] == pytest.approx((4 + 3 + 2 + 2) / 4)
    assert figures["teacher_forced_acceptance_length"] == pytest.approx(21 / 11)


def test_every_prompt_has_its_own_figures():
    prompts = summary(three_results(), block_size=4)["per_prompt"]
    assert [prompt["prompt"] for prompt in prompts] == [0, 1, 2]
    assert [prompt["verdict"] for prompt in prompts] == ["equal", "tie", "different"]
    assert [prompt["acceptance_length"] for prompt in prompts] == [pytest.approx(11 / 3), 2.0, None]
    assert [prompt["acceptance_histogram"] for prompt in prompts] == [[0, 0, 1, 2], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert [prompt["plain_seconds"] for prompt in prompts] == [3.0, 1.0, 2.0]
    assert [prompt["steps"] for prompt in prompts] == [3, 1, 0]


def test_sampled_prompts_have_no_verdict_and_nothing_to_force():
    figures = summary([result(0, [2, 1], 4, None)], block_size=4)
    assert figures["equal"] is figures["ties"] is figures["different"] is None
    assert figures["teacher_forced_acceptance_length"] is figures["teacher_forced_acceptance_length_walked"] is None
    assert "sampled" in describe(figures)
    assert not {"greedy", "verdict", "training"} & set(describe(figures).split())


def test_the_speedup_is_that_of_a_token_because_sampled_answers_end_elsewhere():
    figures = summary([result(0, [2, 1], 4, None, seconds=(1.0, 6.0), plain=8)], block_size=4)
    assert figures["speedup"] == pytest.approx((6 / 8) / (1 / 4))


def test_answers_of_one_token_have_no_acceptance_length():
    figures = summary([result(0, [], 1)], block_size=4)
    assert figures["acceptance_length"] is None
    assert figures["accepted_share_slot"] == [None] * 3
    assert "nothing to draft" in describe(figures)


def test_the_figures_are_json():
    figures = summary(three_results(), block_size=4)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_people_read_decoded_and_trained_side_by_side_the_shares_and_the_prompts():
    printed = describe(summary(three_results(), block_size=4))
    assert "acceptance length 3.250 tokens a step: 14 tokens in 4 steps over 3 prompts" in printed
    assert "slot 1 first: 100% 75% 50%" in printed
    assert "decoded 3.000, walking by what training counts 2.750 (at every token of the answers 1.909)" in printed
    assert "1.50 times as fast as plain decoding in the same batches: 14 tokens in 4.0 s against 14 in 6.0 s" in printed
    table = printed.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["prompt", "0", "1", "2"]
    assert len({len(line) for line in table}) == 1


def test_many_prompts_are_not_listed():
    few = [result(index, [2], 3, forced=[2, 1]) for index in range(LISTED_PROMPTS)]
    assert "verdict" in describe(summary(few, block_size=4))
    assert "verdict" not in describe(summary([*few, result(LISTED_PROMPTS, [2], 3, forced=[2, 1])], block_size=4))
