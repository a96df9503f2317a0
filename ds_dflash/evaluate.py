"""Decoding held-out prompts with target and drafter: acceptance length, and whether the output is the target's own."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from ds_dflash.config import TargetSettings
from ds_dflash.data import load_tokenizer
from ds_dflash.data.rows import RowDroppedError, encodable, parse_messages, parse_tokens, parse_tools
from ds_dflash.data.template import RENDER_ERRORS
from ds_dflash.decode import Drafter, SpeculativeDecoder, compare, greedy
from ds_dflash.errors import UserError
from ds_dflash.export import load_drafter, read_drafter_config
from ds_dflash.target import TargetCheckpoint, load_whole, open_target, weights_dtype


@dataclass(frozen=True)
class PromptResult:
    """One prompt: committed tokens of each step, and "equal", "tie" or "different" against the target's own output."""

    acceptance_lengths: np.ndarray
    verdict: str
    new_tokens: int
    speculative_seconds: float
    greedy_seconds: float


def evaluate(target_path: str, drafter_path: Path, prompts: Path, max_new_tokens: int, dtype: str) -> dict[str, Any]:
    """Decode every prompt of a JSONL file, speculatively and plainly, greedily; figures as `summary` gives them.

    Raises UserError for input that does not fit together.
    """
    settings = TargetSettings(path=target_path, dtype=dtype)  # type: ignore[arg-type]
    checkpoint = open_target(settings)
    config = read_drafter_config(drafter_path)
    check_fits(config, checkpoint, drafter_path)
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=False)
    encoded = list(read_prompts(prompts, tokenizer, checkpoint.text.vocab_size))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_room(encoded, max_new_tokens, checkpoint)
    precision = weights_dtype(checkpoint, settings)
    drafter = load_drafter(drafter_path, precision, device)
    target = load_whole(checkpoint, settings, device)
    decoder = SpeculativeDecoder(target, Drafter(drafter, target))
    stop_ids = end_of_text_ids(target, tokenizer)
    results = [
        _evaluate_prompt(target, decoder, prompt.to(device), max_new_tokens, stop_ids, precision)
        for prompt in tqdm(encoded, desc="Decoding", unit="prompt", disable=None)
    ]
    return summary(results, config.block_size)


def check_room(prompts: Sequence[Tensor], max_new_tokens: int, target: TargetCheckpoint) -> None:
    """Raise UserError if a prompt with its answer does not fit the target's positions."""
    longest, positions = max(len(prompt) for prompt in prompts), target.text.max_position_embeddings
    if longest + max_new_tokens > positions:
        raise UserError(
            f"The longest prompt has {longest} tokens, and {longest} + {max_new_tokens} new ones are more than the"
            f" {positions} positions of the target {target.path}: lower --max-new-tokens or shorten the prompt."
        )


def _evaluate_prompt(
    target: PreTrainedModel,
    decoder: SpeculativeDecoder,
    prompt: Tensor,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    precision: torch.dtype,
) -> PromptResult:
    started = time.monotonic()
    output = decoder.generate(prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    between = time.monotonic()
    reference = greedy(target, prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    ended = time.monotonic()
    verdict = compare(output, reference, len(prompt), precision)
    new_tokens = len(output.output_ids) - len(prompt)
    return PromptResult(output.acceptance_lengths, verdict, new_tokens, between - started, ended - between)


def summary(results: Sequence[PromptResult], block_size: int) -> dict[str, Any]:
    """The figures of some prompts. acceptance_length: committed tokens a step, its mean over all steps."""
    steps = np.concatenate([result.acceptance_lengths for result in results])
    verdicts = Counter(result.verdict for result in results)
    speculative = sum(result.speculative_seconds for result in results)
    plain = sum(result.greedy_seconds for result in results)
    return {
        "prompts": len(results),
        "new_tokens": sum(result.new_tokens for result in results),
        "acceptance_length": float(steps.mean()) if len(steps) else None,
        "acceptance_histogram": np.bincount(steps, minlength=block_size + 1)[1:].tolist(),
        "equal": verdicts["equal"],
        "ties": verdicts["tie"],
        "different": verdicts["different"],
        "speculative_seconds": speculative,
        "greedy_seconds": plain,
        "speedup": plain / speculative,
    }


def describe(figures: dict[str, Any]) -> str:
    """`summary` for people."""
    acceptance = figures["acceptance_length"]
    return (
        f"acceptance length {acceptance:.3f} tokens a step, {figures['new_tokens']} tokens over"
        f" {figures['prompts']} prompts\n"
        f"equal to the target's greedy output: {figures['equal']} of {figures['prompts']};"
        f" first difference on a tie: {figures['ties']}; different: {figures['different']}\n"
        f"{figures['speedup']:.2f} times as fast as plain decoding"
        if acceptance is not None
        else "every answer ended with its first token: there was nothing to draft"
    )


def check_fits(config: Qwen3Config, target: TargetCheckpoint, drafter_path: Path) -> None:
    """Raise UserError if a drafter was not made for this target."""
    text, taps = target.text, config.dflash_config["target_layer_ids"]
    mask_token_id = config.dflash_config["mask_token_id"]
    if config.hidden_size != text.hidden_size:
        raise UserError(
            f"The drafter {drafter_path} has hidden size {config.hidden_size} and the target {target.path}"
            f" {text.hidden_size}: it was trained for another target."
        )
    if max(taps) >= text.num_hidden_layers:
        raise UserError(
            f"The drafter {drafter_path} taps layer {max(taps)} and the target {target.path} has"
            f" {text.num_hidden_layers} layers: it was trained for another target."
        )
    target.mask_token_id(mask_token_id, None)


def end_of_text_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a generation: of the generation config, the model's config and the tokenizer."""
    candidates = [
        getattr(target.generation_config, "eos_token_id", None),
        target.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ]
    ids = set()
    for candidate in candidates:
        ids.update(candidate if isinstance(candidate, list) else [] if candidate is None else [candidate])
    return tuple(sorted(ids))


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Iterator[Tensor]:
    """Prompts int64 [length] from JSON lines with `messages` (rendered for an answer), `prompt` (text) or `input_ids`.

    Assistant messages at the end of a conversation are left out: they are what is to be generated. Ids are below
    `vocabulary`. Raises UserError naming file and line.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a JSONL file of prompts.")
    found = 0
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            ids = _encode(json.loads(line), tokenizer)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}, column {error.colno}: not JSON ({error.msg}).") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 (byte {error.start}).") from None
        except RowDroppedError as error:
            raise UserError(f"{place}: {error.detail}.") from None
        outside = [token for token in ids if not 0 <= token < vocabulary]
        if outside:
            raise UserError(f"{place}: token id {outside[0]} is outside the target's vocabulary of {vocabulary}.")
        if not ids:
            raise UserError(f"{place}: the prompt has no tokens.")
        found += 1
        yield torch.tensor(ids, dtype=torch.int64)
    if not found:
        raise UserError(f"{path} holds no prompts.")


def _encode(row: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a line's prompt; raises RowDroppedError as reading training data does."""
    if not isinstance(row, dict) or not {"messages", "prompt", "input_ids"} & row.keys():
        raise RowDroppedError("empty", "a prompt is an object with messages, prompt or input_ids")
    if "input_ids" in row:
        return parse_tokens({"input_ids": row["input_ids"]}).input_ids.tolist()
    if "prompt" in row:
        return tokenizer(encodable(row["prompt"], "prompt"))["input_ids"]
    messages = parse_messages(row["messages"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise RowDroppedError("empty", "there is no message to answer")
    if tokenizer.chat_template is None:
        raise RowDroppedError("bad_messages", "messages need a chat template, and the target's tokenizer has none")
    tools: Any = parse_tools(row.get("tools"))
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, tools=tools)
    except RENDER_ERRORS as error:
        raise RowDroppedError("bad_messages", f"the chat template refuses the messages ({error})") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]
