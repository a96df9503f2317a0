"""The drafter's work on one micro-batch: from sample ids and features to losses.

Used the same way by training and validation. Ids and masks come from the prepared dataset, anchors from the seed; only
the features come from the target. Memory is bounded by slices of `slice_tokens` block tokens, whatever the number of
anchors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_dflash.anchors import Blocks, count_anchors, make_blocks, sample_anchors
from ds_dflash.attention import BlockLayout
from ds_dflash.data.subset import Rows
from ds_dflash.loss import BlockResult, Objective, block_loss
from ds_dflash.sections import TrainingSettings

Model = Callable[[Tensor, Tensor, BlockLayout], Tensor]
"""(target_hidden [tokens, taps * H], block_embeddings [blocks, B, H], layout) -> hidden [blocks, B, H]."""


@dataclass(frozen=True, eq=False)
class DrafterStep:
    """What is the same for every micro-batch.

    embedding, head: the target's, [V, H], on the drafter's device in its dtype.
    """

    embedding: Tensor
    head: Tensor
    mask_token_id: int
    objective: Objective
    training: TrainingSettings

    def blocks(self, dataset: Rows, samples: np.ndarray, epoch: int) -> Blocks:
        """The blocks of `samples` (ids int [rows]) with the anchors of `epoch`."""
        rows = dataset.rows(samples)
        training = self.training
        anchors = [
            sample_anchors(
                mask,
                count_anchors(len(mask), training.num_anchors, training.anchors_per_1000_tokens),
                seed=training.seed,
                epoch=epoch,
                sample_id=int(sample),
            )
            for sample, (_, mask) in zip(samples, rows, strict=True)
        ]
        return make_blocks(rows, anchors, self.objective.block_size)

    def results(self, model: Model, features: Tensor, blocks: Blocks) -> Iterator[tuple[Blocks, BlockResult]]:
        """Forward slice after slice; the caller runs each slice's backward before it asks for the next.

        features: [tokens, taps * H] of the rows of `blocks`, packed, as captured.
        """
        for tokens, part in blocks.slices(self.training.slice_tokens):
            if len(part.anchors):
                yield part, self._result(model, features[tokens], part)

    def _result(self, model: Model, features: Tensor, blocks: Blocks) -> BlockResult:
        device = features.device
        labels = torch.from_numpy(blocks.labels).to(device)
        ids = torch.full_like(labels, self.mask_token_id)
        ids[:, 0] = labels[:, 0]
        hidden = model(features.to(self.head.dtype), self.embedding[ids], blocks.layout(device))
        supervised = torch.from_numpy(blocks.supervised).to(device)
        row_blocks = torch.from_numpy(blocks.row_blocks).to(device)
        return block_loss(hidden, self.head, labels, supervised, row_blocks, self.objective)
