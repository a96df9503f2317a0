"""Vocabulary projection and cross-entropy in one sweep over the head's weight, without the logits.

The head is the target's and frozen, so the only gradient needed is that of the hidden states:

    d loss / d hidden = sum_v softmax(hidden @ W.T)_v W_v  -  W_label

It is built in the forward, tile by tile of the vocabulary, with the running maximum and sum of an online softmax
(each tile is multiplied twice: once for logits, once for the gradient), and kept unweighted per row, so weights that
depend on the probabilities need no further pass. Memory: one tile of logits of `ROWS` x `COLUMNS` fp32 numbers and the
gradient [rows, H]. On a CPU tiles are small enough to stay in its cache, which the passes over a tile live on.
"""

import torch
from torch import Tensor

from ds_dflash.pieces import multiplies_in_fp32

ROWS = 1024
COLUMNS = {"cpu": 1024, "cuda": 8192}


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every row against its label, and the most likely id.

    hidden: [rows, H] (fp32 or bf16); weight: [V, H], frozen, of the same dtype; labels: int64 [rows] in [0, V).
    Returns (loss fp32 [rows] in nats, predicted int64 [rows]); the gradient flows to `hidden` only.
    """
    return _CrossEntropy.apply(hidden, weight, labels)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        needs_gradient = ctx.needs_input_grad[0]
        tiles = [
            _sweep(hidden[start : start + ROWS], weight, labels[start : start + ROWS], needs_gradient)
            for start in range(0, len(hidden), ROWS)
        ]
        if not tiles:
            tiles = [(hidden.new_zeros(0, dtype=torch.float32), labels.new_zeros(0), torch.zeros_like(hidden))]
        loss, predicted, gradient = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(predicted)
        return loss, predicted

    @staticmethod
    def backward(ctx, grad_loss, _):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss[:, None].to(gradient.dtype), None, None


def _sweep(hidden: Tensor, weight: Tensor, labels: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [rows], predicted [rows], unweighted gradient [rows, H]) of one chunk of rows."""
    rows = len(hidden)
    highest = hidden.new_full((rows,), -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(highest)
    predicted = torch.zeros_like(labels)
    label_logit = torch.zeros_like(highest)
    expected = hidden.new_zeros(hidden.shape, dtype=torch.float32)  # sum_v exp(logit_v - highest) W_v
    columns = COLUMNS[hidden.device.type]
    in_fp32 = multiplies_in_fp32(hidden.device.type, hidden.dtype)
    factor = hidden.float() if in_fp32 else hidden
    for start in range(0, len(weight), columns):
        tile = weight[start : start + columns].to(factor.dtype)
        logits = (factor @ tile.T).float()
        column = (labels - start).clamp(0, len(tile) - 1)
        # from the tile, so that the label's logit is rounded as it is in the sum: a sure token then loses nothing
        label_logit = torch.where(column == labels - start, logits.gather(1, column[:, None])[:, 0], label_logit)
        tile_highest = logits.amax(-1)
        _update_best(predicted, logits, tile_highest > highest, start)
        new_highest = torch.maximum(highest, tile_highest)
        shrink = (highest - new_highest).exp_()
        logits.sub_(new_highest[:, None]).exp_()
        total.mul_(shrink).add_(logits.sum(-1))
        if needs_gradient:
            expected.mul_(shrink[:, None]).add_(logits.to(tile.dtype) @ tile)
        highest = new_highest
    loss = highest - label_logit + total.log()
    gradient = (expected / total[:, None] - weight[labels]).to(hidden.dtype) if needs_gradient else hidden[:, :0]
    return loss, predicted, gradient


def _update_best(predicted: Tensor, logits: Tensor, rises: Tensor, start: int) -> None:
    """Set `predicted` to the best id of this tile in the rows where it `rises` above the former ones."""
    if logits.is_cuda:  # picking rows would wait for the device
        predicted.copy_(torch.where(rises, logits.argmax(-1) + start, predicted))
        return
    rows = rises.nonzero()[:, 0]  # few after the first tiles, and argmax is slow there
    predicted[rows] = logits[rows].argmax(-1) + start
