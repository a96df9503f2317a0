"""Decoding held-out prompts with target and drafter, and with the target alone in the same batches.

At temperature 0 every output is compared with the target's own, and the drafter is run on it in training form as well
(`teacher_forcing`). Sampled outputs have no single right answer: there the figures are acceptance and speed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ds_dflash.config import TargetSettings
from ds_dflash.data import load_tokenizer
from ds_dflash.decode import Drafter, Generation, SpeculativeDecoder, compare, plain
from ds_dflash.errors import UserError
from ds_dflash.export import check_fits, load_drafter, read_drafter_config
from ds_dflash.figures import PromptResult, summary
from ds_dflash.prompts import read_prompts
from ds_dflash.sampling import Chooser, make_chooser
from ds_dflash.target import TargetCheckpoint, load_whole, open_target, weights_dtype
from ds_dflash.teacher_forcing import TeacherForcing


@dataclass(frozen=True)
class DecodingOptions:
    """How prompts are decoded. temperature: 0 is greedy; seed: of sampling, together with the prompt's index."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 1


def evaluate(
    target_path: str, drafter_path: Path, prompts: Path, dtype: str, options: DecodingOptions
) -> dict[str, Any]:
    """Decode every prompt of a JSONL file, speculatively and plainly; figures as `summary` gives them.

    Raises UserError for input that does not fit together.
    """
    settings = TargetSettings(path=target_path, dtype=dtype)  # type: ignore[arg-type]
    checkpoint = open_target(settings)
    config = read_drafter_config(drafter_path)
    check_fits(config, checkpoint, drafter_path)
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=False)
    encoded = list(read_prompts(prompts, tokenizer, checkpoint.text.vocab_size))
    check_room(encoded, options.max_new_tokens, checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter = load_drafter(drafter_path, weights_dtype(checkpoint, settings), device)
    target = load_whole(checkpoint, settings, device)
    evaluation = Evaluation(target, Drafter(drafter, target), end_of_text_ids(target, tokenizer), options)
    results = evaluation.run([prompt.to(device) for prompt in encoded])
    return {"temperature": options.temperature, **summary(results, config.block_size)}


class Evaluation:
    """Decodes prompts in batches, both ways."""

    def __init__(
        self, target: PreTrainedModel, drafter: Drafter, stop_ids: Sequence[int], options: DecodingOptions
    ) -> None:
        self.target = target
        self.stop_ids = stop_ids
        self.options = options
        self.decoder = SpeculativeDecoder(target, drafter)
        self.forcing = TeacherForcing(target, drafter)

    def run(self, prompts: Sequence[Tensor]) -> list[PromptResult]:
        """The result of every prompt (int64 [length]), in their order; batches are taken in that order too."""
        size, results = self.options.batch_size, []
        self._decode(prompts[:1], 0, max_new_tokens=2)  # the first forwards set things up and would count as decoding
        with tqdm(total=len(prompts), desc="Decoding", unit="prompt", disable=None) as progress:
            for start in range(0, len(prompts), size):
                batch = prompts[start : start + size]
                results += self._evaluate(batch, start)
                progress.update(len(batch))
        return results

    def _evaluate(self, prompts: Sequence[Tensor], start: int) -> list[PromptResult]:
        """The results of a batch, whose first prompt has the index `start`."""
        outputs, references, speculative, alone = self._decode(prompts, start, self.options.max_new_tokens)
        verdicts: list[str | None] = [None] * len(prompts)
        forced: list[Any] = [None] * len(prompts)
        if not self.options.temperature:
            verdicts = [
                compare(output, reference, len(prompt), self.target.dtype)
                for output, reference, prompt in zip(outputs, references, prompts, strict=True)
            ]
            forced = self.forcing.accepted([output.output_ids for output in outputs], [len(ids) for ids in prompts])
        return [
            PromptResult(
                index=start + row,
                new_tokens=len(output.output_ids) - len(prompts[row]),
                acceptance_lengths=output.acceptance_lengths,
                verdict=verdicts[row],
                forced=forced[row],
                plain_new_tokens=len(references[row].output_ids) - len(prompts[row]),
                speculative_seconds=speculative / len(prompts),
                plain_seconds=alone / len(prompts),
            )
            for row, output in enumerate(outputs)
        ]

    def _decode(
        self, prompts: Sequence[Tensor], start: int, max_new_tokens: int
    ) -> tuple[list[Generation], list[Generation], float, float]:
        """What the drafter's and the target's own decoding give, and the seconds that each took."""
        started = time.monotonic()
        outputs = self.decoder.generate_batch(
            prompts, max_new_tokens=max_new_tokens, stop_ids=self.stop_ids, choosers=self._choosers(prompts, start)
        )
        between = time.monotonic()
        references = plain(
            self.target,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=self.stop_ids,
            choosers=self._choosers(prompts, start),
        )
        return outputs, references, between - started, time.monotonic() - between

    def _choosers(self, prompts: Sequence[Tensor], start: int) -> list[Chooser]:
        options = self.options
        return [make_chooser(options.temperature, options.seed, start + row) for row in range(len(prompts))]


def check_room(prompts: Sequence[Tensor], max_new_tokens: int, target: TargetCheckpoint) -> None:
    """Raise UserError if a prompt with its answer does not fit the target's positions."""
    longest, positions = max(len(prompt) for prompt in prompts), target.text.max_position_embeddings
    if longest + max_new_tokens > positions:
        raise UserError(
            f"The longest prompt has {longest} tokens, and {longest} + {max_new_tokens} new ones are more than the"
            f" {positions} positions of the target {target.path}: lower --max-new-tokens or shorten the prompt."
        )


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
