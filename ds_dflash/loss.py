"""The objective: token-weighted cross-entropy of block slots, and the metrics that fall out of the same sweep.

Loss of an optimizer update = sum over everything in it of weight * cross-entropy / sum of weight. Here are the sums;
whoever runs an update divides.

    dflash  weight of slot k >= 1 is supervised * exp(-(k - 1) / gamma)          (arXiv 2602.06036)
    dpace   weight of slot j is the sum over supervised m >= j of prod_{i <= m} q_i, where
            q = (1 - alpha) p(label) + alpha, detached, 1 where unsupervised     (arXiv 2605.18810)
            and the update's weight is the number of sequences with an anchor
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_dflash.head import cross_entropy

DPACE_ALPHA = 0.5
_GAMMA_BLOCK_SIZES, _GAMMAS = (8, 10, 16), (4.0, 5.0, 7.0)


def resolve_gamma(gamma: float | None, block_size: int) -> float:
    """The decay length in slots: as configured, else 4 / 5 / 7 for B = 8 / 10 / 16 and between; 0: no decay."""
    if gamma is not None:
        return gamma
    slope = _GAMMAS[0] / _GAMMA_BLOCK_SIZES[0]
    if block_size < _GAMMA_BLOCK_SIZES[0]:
        return slope * block_size
    if block_size > _GAMMA_BLOCK_SIZES[-1]:
        return _GAMMAS[-1] / _GAMMA_BLOCK_SIZES[-1] * block_size
    return float(np.interp(block_size, _GAMMA_BLOCK_SIZES, _GAMMAS))


@dataclass(frozen=True)
class Objective:
    """Which loss; `gamma` in slots (0: no decay), used by "dflash" only."""

    kind: str
    block_size: int
    gamma: float

    @property
    def slot_weights(self) -> np.ndarray:
        """float64 [B]: the weight of a supervised slot under "dflash"; slot 0 weighs nothing."""
        slots = np.arange(self.block_size, dtype=np.float64)
        decay = np.exp(-(slots - 1) / self.gamma) if self.gamma else np.ones(self.block_size)
        return np.where(slots > 0, decay, 0.0)

    def weight(self, supervised: np.ndarray, block_offsets: np.ndarray) -> float:
        """The `loss_weight` of blocks, known before any forward: supervised [blocks, B], block_offsets [rows + 1]."""
        if self.kind == "dpace":
            return float((np.diff(block_offsets) > 0).sum())
        return float((supervised.sum(0) * self.slot_weights).sum())


@dataclass(frozen=True, eq=False)
class BlockResult:
    """What the sweep over some blocks gave; every tensor but `loss_sum` is detached.

    loss_sum: fp32 scalar, the weighted sum that is differentiated.
    block_loss: fp32 [blocks], its parts; block_weight: fp32 [blocks], their parts of the update's weight.
    correct, supervised: bool [blocks, B]; predicted: int64 [blocks, B], -1 where not supervised.
    accepted: int64 [blocks], 1 + leading right slots; unsupervised slots neither stop the run nor count.
    """

    loss_sum: Tensor
    block_loss: Tensor
    block_weight: Tensor
    predicted: Tensor
    correct: Tensor
    supervised: Tensor
    accepted: Tensor


def block_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    supervised: Tensor,
    row_blocks: Tensor,
    objective: Objective,
) -> BlockResult:
    """Loss and metrics of blocks. Slots of weight zero never reach the head.

    hidden: [blocks, B, H]; head_weight: [V, H]; labels: int64 [blocks, B]; supervised: bool [blocks, B];
    row_blocks: int64 [blocks], how many blocks the row of each block has.
    """
    losses, predicted = cross_entropy(hidden[supervised], head_weight, labels[supervised])
    slot_loss = torch.zeros(labels.shape, device=losses.device).masked_scatter(supervised, losses)
    weights = _slot_weights(slot_loss.detach(), supervised, objective)
    weighted = slot_loss * weights
    all_predicted = torch.full_like(labels, -1).masked_scatter(supervised, predicted)
    correct = all_predicted == labels
    correct &= supervised
    leading = (correct | ~supervised).cumprod(-1).bool()
    return BlockResult(
        loss_sum=weighted.sum(),
        block_loss=weighted.detach().sum(-1),
        block_weight=weights.sum(-1) if objective.kind == "dflash" else 1.0 / row_blocks,
        predicted=all_predicted,
        correct=correct,
        supervised=supervised,
        accepted=1 + (leading & supervised).sum(-1),
    )


def _slot_weights(slot_loss: Tensor, supervised: Tensor, objective: Objective) -> Tensor:
    if objective.kind == "dflash":
        decay = torch.from_numpy(objective.slot_weights).to(slot_loss.device, torch.float32)
        return supervised * decay
    confidence = (1 - DPACE_ALPHA) * (-slot_loss).exp() + DPACE_ALPHA
    reach = torch.where(supervised, confidence, 1.0).cumprod(-1) * supervised
    return reach.flip(-1).cumsum(-1).flip(-1) * supervised
