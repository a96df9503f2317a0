"""The drafter in training form on answers that it helped to decode: what training would count for them.

Features by one forward of the target over prompt and answer, blocks by `make_blocks`, the answer as the loss mask, and
`block_loss`: the code that training runs. A walk through an answer by these counts alone, as decoding walks (the first
token, then the last one that each block would commit), has to come to decoding's acceptance length; if it does not,
decoding and training disagree about what a block sees. The mean over every token of the answers is another figure:
decoding skips the inside of easy runs and stands more often behind a rejection.

What is accepted at an anchor is the same in both but at the answer's end: training does not count
slots past it, while a step of decoding commits whole, and its answer is cut afterwards. `within_answer` cuts a
step's accepted proposals as training does, so that the two are equal where nothing is wrong (up to ties of logits).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds_dflash.anchors import make_blocks
from ds_dflash.decode import Drafter
from ds_dflash.loss import Objective
from ds_dflash.sections import TrainingSettings
from ds_dflash.step import DrafterStep
from ds_dflash.target import Target


class TeacherForcing:
    """Runs a drafter on finished answers as training runs it on data."""

    def __init__(self, target: PreTrainedModel, drafter: Drafter) -> None:
        self._drafter = drafter
        self._target = Target(target.base_model, drafter.layer_ids, target.device)
        objective = Objective("dflash", drafter.block_size, gamma=0.0)
        self._step = DrafterStep(drafter.embedding, drafter.head, drafter.mask_token_id, objective, TrainingSettings())

    @torch.no_grad()
    def accepted(self, outputs: Sequence[Tensor], prompt_lengths: Sequence[int]) -> list[np.ndarray]:
        """1 + leading right slots at every anchor of each answer, int64 [max(0, new - 1)].

        outputs: int64 [prompt + new] each. Entry i is that of the answer's token i as the anchor.
        """
        rows = [
            (output.cpu().numpy(), np.arange(len(output)) >= length)
            for output, length in zip(outputs, prompt_lengths, strict=True)
        ]
        anchors = [np.arange(length, len(ids) - 1) for (ids, _), length in zip(rows, prompt_lengths, strict=True)]
        blocks = make_blocks(rows, anchors, self._drafter.block_size)
        features = self._target.capture([ids for ids, _ in rows])
        results = self._step.results(self._drafter.model, features, blocks)
        accepted = [np.zeros(0, np.int64), *(result.accepted.cpu().numpy() for _, result in results)]
        return np.split(np.concatenate(accepted), blocks.block_offsets[1:-1])


def walked(forced: np.ndarray) -> np.ndarray:
    """What `forced` (as `TeacherForcing.accepted` gives it) counts at the anchors of a walk by it, int64 [steps]."""
    counts, token = [], 0
    while token < len(forced):
        counts.append(forced[token])
        token += int(forced[token])
    return np.array(counts, np.int64)


def visited(acceptance_lengths: np.ndarray) -> np.ndarray:
    """Which tokens of the answer were the anchors of decoding's steps, int64 [steps], counted from its first."""
    return np.cumsum(acceptance_lengths) - acceptance_lengths


def within_answer(acceptance_lengths: np.ndarray, new_tokens: int) -> np.ndarray:
    """1 + accepted of each step, proposals past the answer's end not counted: int64 [steps]."""
    following = new_tokens - 1 - visited(acceptance_lengths)
    return 1 + np.minimum(acceptance_lengths - 1, following)
