"""The figures of decoded prompts, for programs (`summary`) and for people (`describe`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_dflash.teacher_forcing import walked, within_answer

LISTED_PROMPTS = 20
"""Up to so many prompts are listed for people one by one."""


@dataclass(frozen=True, eq=False)
class PromptResult:
    """One prompt.

    acceptance_lengths: int64 [steps], committed tokens of each step.
    verdict: "equal", "tie" or "different" against the target's own output; None where it was sampled.
    forced: int64 [max(0, new - 1)], what training would count as accepted at each token of the answer; None as above.
    plain_new_tokens: of plain decoding, which ends elsewhere where it was sampled.
    speculative_seconds, plain_seconds: its batch's, divided by the prompts in the batch.
    """

    index: int
    new_tokens: int
    acceptance_lengths: np.ndarray
    verdict: str | None
    forced: np.ndarray | None
    plain_new_tokens: int
    speculative_seconds: float
    plain_seconds: float


def summary(results: Sequence[PromptResult], block_size: int) -> dict[str, Any]:
    """The figures of some prompts, JSON-able.

    All acceptance lengths are means over steps or anchors, not over prompts; null where there is none.
    acceptance_length: committed tokens a step. acceptance_histogram: steps that committed 1, 2, .. B tokens.
    accepted_share_slot: of slot 1, 2, .. B - 1 the share of steps in which it was accepted.
    acceptance_length_within_answer: proposals past the answer's end not counted, as in the next two.
    teacher_forced_acceptance_length_walked, teacher_forced_acceptance_length: what training would count, at the anchors
    of a walk through the answers by these counts alone, and at every token of the answers.
    equal, ties, different: prompts by verdict; null where they were sampled.
    speedup: of the seconds for a token, plain decoding's by speculative decoding's.
    """
    verdicts = Counter(result.verdict for result in results)
    is_sampled = None in verdicts
    speculative = sum(result.speculative_seconds for result in results)
    plain = sum(result.plain_seconds for result in results)
    acceptance = _acceptance(results, block_size)
    plain_tokens = sum(result.plain_new_tokens for result in results)
    return {
        "prompts": len(results),
        **acceptance,
        "plain_new_tokens": plain_tokens,
        "equal": None if is_sampled else verdicts["equal"],
        "ties": None if is_sampled else verdicts["tie"],
        "different": None if is_sampled else verdicts["different"],
        "speculative_seconds": speculative,
        "plain_seconds": plain,
        "speedup": (plain / plain_tokens) / (speculative / acceptance["new_tokens"]),
        "per_prompt": [_prompt(result, block_size) for result in results],
    }


def _prompt(result: PromptResult, block_size: int) -> dict[str, Any]:
    return {
        "prompt": result.index,
        **_acceptance([result], block_size),
        "plain_new_tokens": result.plain_new_tokens,
        "verdict": result.verdict,
        "speculative_seconds": result.speculative_seconds,
        "plain_seconds": result.plain_seconds,
    }


def _acceptance(results: Sequence[PromptResult], block_size: int) -> dict[str, Any]:
    lengths = _all(result.acceptance_lengths for result in results)
    within = _all(within_answer(result.acceptance_lengths, result.new_tokens) for result in results)
    forced = [result.forced for result in results if result.forced is not None]
    shares = [_mean(lengths > slot) for slot in range(1, block_size)]
    return {
        "new_tokens": sum(result.new_tokens for result in results),
        "steps": len(lengths),
        "acceptance_length": _mean(lengths),
        "acceptance_histogram": np.bincount(lengths, minlength=block_size + 1)[1:].tolist(),
        "accepted_share_slot": shares,
        "acceptance_length_within_answer": _mean(within),
        "teacher_forced_acceptance_length_walked": _mean(_all(map(walked, forced))),
        "teacher_forced_acceptance_length": _mean(_all(forced)),
    }


def _all(parts: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _mean(numbers: np.ndarray) -> float | None:
    return float(numbers.mean()) if len(numbers) else None


def describe(figures: dict[str, Any]) -> str:
    """What `summary` gave, for people."""
    if figures["acceptance_length"] is None:
        return "every answer ended with its first token: there was nothing to draft"
    lines = [
        f"acceptance length {figures['acceptance_length']:.3f} tokens a step: {figures['new_tokens']} tokens in"
        f" {figures['steps']} steps over {figures['prompts']} prompts",
        "steps in which a slot was accepted, slot 1 first: "
        + " ".join(f"{100 * share:.0f}%" for share in figures["accepted_share_slot"]),
        *_verdicts(figures),
        f"{figures['speedup']:.2f} times as fast as plain decoding in the same batches: {figures['new_tokens']} tokens"
        f" in {figures['speculative_seconds']:.1f} s against {figures['plain_new_tokens']} in"
        f" {figures['plain_seconds']:.1f} s",
    ]
    if figures["prompts"] <= LISTED_PROMPTS:
        lines += ["", *_table(figures["per_prompt"])]
    return "\n".join(lines)


def _verdicts(figures: dict[str, Any]) -> list[str]:
    """What only greedy outputs have."""
    if figures["equal"] is None:
        return ["sampled: there is no single right output to compare with"]
    return [
        f"acceptance length within the answers: decoded {figures['acceptance_length_within_answer']:.3f}, walking by"
        f" what training counts {figures['teacher_forced_acceptance_length_walked']:.3f}"
        f" (at every token of the answers {figures['teacher_forced_acceptance_length']:.3f})",
        f"equal to the target's greedy output: {figures['equal']} of {figures['prompts']};"
        f" first difference on a tie: {figures['ties']}; different: {figures['different']}",
    ]


def _table(prompts: Sequence[dict[str, Any]]) -> list[str]:
    """A line a prompt; the seconds are the prompt's share of its batch."""
    columns = {
        "prompt": [str(prompt["prompt"]) for prompt in prompts],
        "tokens": [str(prompt["new_tokens"]) for prompt in prompts],
        "steps": [str(prompt["steps"]) for prompt in prompts],
        "accepted": [_number(prompt["acceptance_length"]) for prompt in prompts],
        "as in training": [_number(prompt["teacher_forced_acceptance_length"]) for prompt in prompts],
        "verdict": [prompt["verdict"] for prompt in prompts],
        "seconds": [f"{prompt['speculative_seconds']:.2f}" for prompt in prompts],
        "plain": [f"{prompt['plain_seconds']:.2f}" for prompt in prompts],
    }
    if prompts[0]["verdict"] is None:
        del columns["as in training"], columns["verdict"]
    cells = [[head, *column] for head, column in columns.items()]
    padded = [[cell.rjust(max(map(len, column))) for cell in column] for column in cells]
    return ["  ".join(row) for row in zip(*padded, strict=True)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
