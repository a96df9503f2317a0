"""Speculative decoding with target and drafter, and the target's own decoding to compare with; prompts in batches.

Prefill the target; it gives the first token. Then again and again, for all rows at once: the drafter proposes the B - 1
tokens after the last committed one in one forward; the target forwards that block; of the proposals the leading ones
that `sampling` accepts are committed, and one token of the target's after them; the caches go back to what is committed
(`caches`), and the features of the newly committed tokens join the drafter's context. The acceptance length of a step
is 1 + accepted. Rows advance by different numbers of tokens, and leave the batch when they end.

A row's tokens are those that it would get alone, up to rounding: no row sees another one or its padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds_dflash.attention import BlockLayout
from ds_dflash.caches import TargetRows, check_finite, join
from ds_dflash.drafter import DFlashDraftModel, LayerContext
from ds_dflash.sampling import Chooser, Greedy
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


@dataclass
class DraftContext:
    """The drafter's cache of one row: keys and values of its committed tokens only, never of block slots."""

    layers: list[LayerContext] = field(default_factory=list)
    length: int = 0


class Drafter:
    """A drafter with the target's embedding and head, as serving engines run it."""

    def __init__(self, model: DFlashDraftModel, target: PreTrainedModel) -> None:
        self.model = model
        self.embedding: Tensor = target.get_input_embeddings().weight  # type: ignore[assignment]
        self.head: Tensor = target.get_output_embeddings().weight  # type: ignore[assignment]
        self.block_size = model.config.block_size
        self.mask_token_id = model.config.dflash_config["mask_token_id"]
        self.layer_ids: list[int] = model.config.dflash_config["target_layer_ids"]

    def extend(self, contexts: Sequence[DraftContext], features: Sequence[Tensor]) -> None:
        """Add the features [tokens, taps * H] of each row's newly committed tokens to its context."""
        counts = [len(tokens) for tokens in features]
        positions = [
            torch.arange(context.length, context.length + count, device=self.embedding.device)
            for context, count in zip(contexts, counts, strict=True)
        ]
        packed = self.model.context(torch.cat(list(features)).to(self.model.fc.weight.dtype), torch.cat(positions))
        by_layer = [(keys.split(counts), values.split(counts)) for keys, values in packed]
        for row, context in enumerate(contexts):
            new = [(keys[row], values[row]) for keys, values in by_layer]
            old = context.layers
            context.layers = [_concatenated(pair) for pair in zip(old, new, strict=True)] if old else new
            context.length += counts[row]

    def logits(self, anchor_tokens: Tensor, contexts: Sequence[DraftContext]) -> Tensor:
        """Logits [rows, B - 1, V] of the tokens after each row's `anchor_tokens` (int64 [rows]).

        contexts: those of the tokens before the anchors.
        """
        lengths = torch.tensor([context.length for context in contexts])
        offsets = [0, *lengths.cumsum(0).tolist()]
        layout = BlockLayout(
            tuple(offsets),
            tuple(range(len(contexts) + 1)),
            lengths.to(anchor_tokens.device),
            self.block_size,
        )
        layers = [_concatenated(layer) for layer in zip(*(context.layers for context in contexts), strict=True)]
        block = torch.full((len(contexts), self.block_size), self.mask_token_id, device=anchor_tokens.device)
        block[:, 0] = anchor_tokens
        embeddings = self.embedding[block].to(self.model.norm.weight.dtype)
        hidden = self.model.draft(embeddings, layers, layout)
        logits = hidden[:, 1:].to(self.head.dtype) @ self.head.T
        check_finite(logits, "drafter")
        return logits


def _concatenated(parts: Sequence[LayerContext]) -> LayerContext:
    return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])


@dataclass
class _Row:
    """A prompt that is being decoded."""

    prompt: Tensor
    chooser: Chooser
    max_new_tokens: int
    stop_ids: frozenset[int]
    new: list[int] = field(default_factory=list)
    context: DraftContext = field(default_factory=DraftContext)
    acceptance_lengths: list[int] = field(default_factory=list)
    tie_margins: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.new) >= self.max_new_tokens or not self.stop_ids.isdisjoint(self.new)

    def generation(self) -> Generation:
        """With what was committed, up to the limit and with the first token that stops."""
        stops = [index for index, token in enumerate(self.new) if token in self.stop_ids]
        end = min([self.max_new_tokens, *(index + 1 for index in stops)])
        new = torch.tensor(self.new[:end], dtype=torch.int64, device=self.prompt.device)
        return Generation(
            torch.cat([self.prompt, new]), np.array(self.acceptance_lengths, np.int64), np.array(self.tie_margins)
        )


def _make_rows(
    prompts: Sequence[Tensor],
    choosers: Sequence[Chooser] | None,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> list[_Row]:
    choosers = choosers or [Greedy() for _ in prompts]
    stops = frozenset(stop_ids)
    return [_Row(prompt, chooser, max_new_tokens, stops) for prompt, chooser in zip(prompts, choosers, strict=True)]


_Batch = tuple[list[_Row], TargetRows]
"""The rows that are being decoded, and what the target has seen of them, in the same order."""


def _by_length(rows: list[_Row]) -> list[list[_Row]]:
    """Rows whose prompts are equally long can be prefilled together."""
    groups: dict[int, list[_Row]] = {}
    for row in rows:
        groups.setdefault(len(row.prompt), []).append(row)
    return list(groups.values())


def _unfinished(rows: list[_Row], seen: TargetRows) -> _Batch | None:
    going = [index for index, row in enumerate(rows) if not row.is_done]
    if not going:
        return None
    return [rows[index] for index in going], seen if len(going) == len(rows) else seen.select(going)


def _joined(batches: Sequence[_Batch | None]) -> _Batch | None:
    parts = [batch for batch in batches if batch]
    return ([row for rows, _ in parts for row in rows], join([seen for _, seen in parts])) if parts else None


class SpeculativeDecoder:
    """Decodes prompts with target and drafter."""

    def __init__(self, target: PreTrainedModel, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter
        self.taps = TapRecorder(decoder_layers(target), drafter.layer_ids)

    def generate(self, prompt: Tensor, *, max_new_tokens: int, stop_ids: Sequence[int]) -> Generation:
        """Continue `prompt` (int64 [length]) greedily until a token of `stop_ids` or `max_new_tokens`."""
        return self.generate_batch([prompt], max_new_tokens=max_new_tokens, stop_ids=stop_ids)[0]

    @torch.no_grad()
    def generate_batch(
        self,
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        choosers: Sequence[Chooser] | None = None,
    ) -> list[Generation]:
        """Continue every prompt (int64 [length]) until a token of `stop_ids` or `max_new_tokens`.

        choosers: how each prompt's tokens are chosen; None: greedily. Raises UserError for several prompts where the
        target's cache cannot hold them.
        """
        rows = _make_rows(prompts, choosers, max_new_tokens, stop_ids)
        batch = _joined([self._prefill(group) for group in _by_length(rows)])
        while batch:
            batch = self._step(*batch)
        return [row.generation() for row in rows]

    def _prefill(self, rows: list[_Row]) -> _Batch | None:
        """The first tokens of prompts of one length."""
        seen = TargetRows.empty(self.target, len(rows))
        logits, features = self._forward(seen, torch.stack([row.prompt for row in rows]), logits_to_keep=1)
        self.drafter.extend([row.context for row in rows], list(features))
        for row, row_logits in zip(rows, logits[:, -1], strict=True):
            row.new.append(row.chooser.first(row_logits))
        return _unfinished(rows, seen)

    def _step(self, rows: list[_Row], seen: TargetRows) -> _Batch | None:
        """One block of every row."""
        anchors = torch.tensor([row.new[-1] for row in rows], device=self.target.device)
        draft_logits = self.drafter.logits(anchors, [row.context for row in rows])
        proposals = torch.stack([row.chooser.propose(slots) for row, slots in zip(rows, draft_logits, strict=True)])
        block = torch.cat([anchors[:, None], proposals], dim=1)
        before = seen.snapshot()
        logits, features = self._forward(seen, block)
        for index, row in enumerate(rows):
            committed = row.chooser.commit(proposals[index], draft_logits[index], logits[index])
            row.acceptance_lengths.append(len(committed))
            row.new += committed
        kept = sorted((row.acceptance_lengths[-1], index) for index, row in enumerate(rows) if not row.is_done)
        if not kept:
            return None
        going = [rows[index] for _, index in kept]
        self.drafter.extend([row.context for row in going], [features[index, :count] for count, index in kept])
        return going, seen.keep(before, block, kept)

    def _forward(self, seen: TargetRows, ids: Tensor, **options: int) -> tuple[Tensor, Tensor]:
        """Logits [rows, tokens, V] and features [rows, tokens, taps * H] of `ids` after what the target has seen."""
        with self.taps as recorded:
            logits = seen.forward(ids, **options)
            return logits, torch.cat(recorded.hidden(), dim=-1)


def greedy(target: PreTrainedModel, prompt: Tensor, *, max_new_tokens: int, stop_ids: Sequence[int]) -> Generation:
    """The target's own greedy continuation of `prompt` (int64 [length]), one token a forward."""
    return plain(target, [prompt], max_new_tokens=max_new_tokens, stop_ids=stop_ids)[0]


@torch.no_grad()
def plain(
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    choosers: Sequence[Chooser] | None = None,
) -> list[Generation]:
    """The target's own continuation of every prompt, one token a forward; arguments as of `generate_batch`."""
    rows = _make_rows(prompts, choosers, max_new_tokens, stop_ids)
    batch = _joined([_plain_prefill(target, group) for group in _by_length(rows)])
    while batch:
        last = torch.tensor([[row.new[-1]] for row in batch[0]], device=target.device)
        batch = _plain_step(*batch, last)
    return [row.generation() for row in rows]


def _plain_prefill(target: PreTrainedModel, rows: list[_Row]) -> _Batch | None:
    prompts = torch.stack([row.prompt for row in rows])
    return _plain_step(rows, TargetRows.empty(target, len(rows)), prompts)


def _plain_step(rows: list[_Row], seen: TargetRows, ids: Tensor) -> _Batch | None:
    """The next token of every row by those after what the target has seen, `ids` (int64 [rows, tokens])."""
    for row, logits in zip(rows, seen.forward(ids, logits_to_keep=1)[:, -1], strict=True):
        _append(row, logits)
    return _unfinished(rows, seen)


def _append(row: _Row, logits: Tensor) -> None:
    """The row's next token by `logits` [V]."""
    top, second = logits.topk(2).values.double().tolist()
    row.tie_margins.append((top - second) / abs(top) if top else 0.0)
    row.new.append(row.chooser.first(logits))


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
