"""Speculative decoding with target and drafter, and the target's own greedy decoding to compare with.

Greedy: prefill the target; its argmax is the first token. Then again and again: the drafter proposes the B - 1 tokens
after the last committed one in one forward; the target forwards that block; the leading proposals that equal the
target's argmax are accepted and the target's own next token is committed after them; the caches go back to what is
committed, and the features of the newly committed tokens join the drafter's context. The acceptance length of a step is
1 + accepted.

A cache that cannot be cropped (recurrent state of linear attention) is snapshot before the block and the accepted
tokens are replayed.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ds_dflash.attention import BlockLayout
from ds_dflash.drafter import DFlashDraftModel, LayerContext
from ds_dflash.target import TapRecorder, decoder_layers


@dataclass(frozen=True)
class Generation:
    """One decoded prompt.

    output_ids: int64 [prompt + new], acceptance_lengths: int64 [steps] (empty in plain decoding).
    tie_margins: float64 [new], (top - second) / |top| of the logits that chose each new token (plain decoding only).
    """

    output_ids: Tensor
    acceptance_lengths: np.ndarray
    tie_margins: np.ndarray


class Drafter:
    """A drafter with the target's embedding and head, as serving engines run it."""

    def __init__(self, model: DFlashDraftModel, target: PreTrainedModel) -> None:
        self.model = model
        self.embedding: Tensor = target.get_input_embeddings().weight  # type: ignore[assignment]
        self.head: Tensor = target.get_output_embeddings().weight  # type: ignore[assignment]
        self.block_size = model.config.block_size
        self.mask_token_id = model.config.dflash_config["mask_token_id"]

    def logits(self, anchor_token: Tensor, position: int, context: Sequence[LayerContext]) -> Tensor:
        """Logits [B - 1, V] of the tokens after `anchor_token` (int64 scalar) at `position`.

        context: that of the `position` tokens before it.
        """
        block = torch.full((1, self.block_size), self.mask_token_id, device=anchor_token.device)
        block[0, 0] = anchor_token
        anchors = torch.tensor([position], device=anchor_token.device)
        layout = BlockLayout((0, position), (0, 1), anchors, self.block_size)
        embeddings = self.embedding[block].to(self.model.norm.weight.dtype)
        hidden = self.model.draft(embeddings, context, layout)
        return hidden[0, 1:].to(self.head.dtype) @ self.head.T


@dataclass
class _Context:
    """The drafter's cache: keys and values of the committed context tokens only, never of block slots."""

    model: DFlashDraftModel
    layers: list[LayerContext] = field(default_factory=list)
    length: int = 0

    def append(self, features: Tensor) -> None:
        """Add the features [tokens, taps * H] of newly committed tokens."""
        positions = torch.arange(self.length, self.length + len(features), device=features.device)
        new = self.model.context(features.to(self.model.fc.weight.dtype), positions)
        self.length += len(features)
        if not self.layers:
            self.layers = new
            return
        self.layers = [
            (torch.cat([keys, new_keys]), torch.cat([values, new_values]))
            for (keys, values), (new_keys, new_values) in zip(self.layers, new, strict=True)
        ]


class SpeculativeDecoder:
    """Greedy speculative decoding, one prompt at a time."""

    def __init__(self, target: PreTrainedModel, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter
        self.taps = TapRecorder(decoder_layers(target), drafter.model.config.dflash_config["target_layer_ids"])

    @torch.no_grad()
    def generate(self, prompt: Tensor, *, max_new_tokens: int, stop_ids: Sequence[int]) -> Generation:
        """Continue `prompt` (int64 [length]) until a token of `stop_ids` or `max_new_tokens`."""
        cache = DynamicCache(config=self.target.config.get_text_config())
        context = _Context(self.drafter.model)
        logits, features = self._forward(prompt, cache)
        if cache.is_croppable:  # known after the first forward; layers with a window then keep what a crop brings back
            cache.activate_past_recording()
        context.append(features)
        ids = torch.cat([prompt, logits[-1:].argmax(-1)])
        acceptance_lengths: list[int] = []
        limit = len(prompt) + max_new_tokens
        while len(ids) < limit and not _has_stopped(ids[len(prompt) :], stop_ids):
            committed, features = self._step(ids, cache, context)
            context.append(features)
            ids = torch.cat([ids, committed])
            acceptance_lengths.append(len(committed))
        output = _cut(ids[:limit], len(prompt), stop_ids)
        return Generation(output, np.array(acceptance_lengths, np.int64), np.zeros(0))

    def _step(self, ids: Tensor, cache: DynamicCache, context: _Context) -> tuple[Tensor, Tensor]:
        """Newly committed tokens [1 + accepted], and the features of the block's committed slots (the same number)."""
        proposal = self.drafter.logits(ids[-1], len(ids) - 1, context.layers).argmax(-1)
        block = torch.cat([ids[-1:], proposal])
        snapshot = None if cache.is_croppable else copy.deepcopy(cache)
        logits, features = self._forward(block, cache)
        chosen = logits.argmax(-1)
        accepted = int((chosen[:-1] == proposal).cumprod(0).sum())
        self._keep(cache, snapshot, block, 1 + accepted)
        return chosen[: 1 + accepted], features[: 1 + accepted]

    def _keep(self, cache: DynamicCache, snapshot: DynamicCache | None, block: Tensor, kept: int) -> None:
        """Put the cache back to `kept` tokens of the block."""
        if snapshot is None:
            cache.crop(kept - len(block))
        elif kept < len(block):
            cache.layers = snapshot.layers
            self._forward(block[:kept], cache)

    def _forward(self, ids: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Logits [tokens, V] and features [tokens, taps * H] of `ids` after what is cached."""
        with self.taps as recorded:
            logits = self.target(input_ids=ids[None], cache=cache, use_cache=True).logits[0]
            return logits, torch.cat([tap[0] for tap in recorded.hidden()], dim=-1)


@torch.no_grad()
def greedy(target: PreTrainedModel, prompt: Tensor, *, max_new_tokens: int, stop_ids: Sequence[int]) -> Generation:
    """The target's own greedy continuation of `prompt` (int64 [length]), one token a forward."""
    cache = DynamicCache(config=target.config.get_text_config())
    ids, step, margins = prompt, prompt, []
    while len(ids) < len(prompt) + max_new_tokens and not _has_stopped(ids[len(prompt) :], stop_ids):
        logits = target(input_ids=step[None], cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        top, second = logits.double().topk(2).values.tolist()
        margins.append((top - second) / abs(top))
        step = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, step])
    return Generation(ids, np.zeros(0, np.int64), np.array(margins))


TIE_MARGINS = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative distance of the two largest logits below which block and one-token forwards may round differently."""


def compare(output: Generation, reference: Generation, prompt_length: int, dtype: torch.dtype) -> str:
    """ "equal", "tie" (the first difference sits on a tie of the target's logits) or "different"."""
    new, expected = output.output_ids[prompt_length:], reference.output_ids[prompt_length:]
    shared = min(len(new), len(expected))
    differs = (new[:shared] != expected[:shared]).nonzero()
    if not len(differs):
        return "equal" if len(new) == len(expected) else "different"
    return "tie" if reference.tie_margins[int(differs[0])] <= TIE_MARGINS[dtype] else "different"


def _has_stopped(new: Tensor, stop_ids: Sequence[int]) -> bool:
    return any(bool((new == stop).any()) for stop in stop_ids)


def _cut(ids: Tensor, prompt_length: int, stop_ids: Sequence[int]) -> Tensor:
    """`ids` up to and with the first new token that stops."""
    stops = [int(found[0]) for stop in stop_ids if len(found := (ids[prompt_length:] == stop).nonzero()[:, 0])]
    return ids[: prompt_length + min(stops) + 1] if stops else ids
