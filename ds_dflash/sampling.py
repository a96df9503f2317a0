"""How next tokens are chosen, of the target alone and of what a drafter proposes for it.

Greedy: the largest logit; a proposal is accepted where it is the target's own choice.

Sampled at temperature T (lossless, arXiv 2211.17192): with the target's p = softmax(logits / T) and the drafter's q of
a slot, a token x drawn from q is accepted with probability min(1, p(x) / q(x)); the first rejected slot draws from
max(p - q, 0), normalised, in its place; where all are accepted the target's next token is drawn from p. Every committed
token then has the target's own distribution, whatever q is. The drafter's slots are independent of one another, and
the p of a slot is conditioned on the proposals before it, all of which were accepted when it counts.

Probabilities are float64, [B, V] at a time. The random numbers of a prompt come from a generator of its own, and as
many are drawn a step whatever is accepted: neither the batch nor the device changes them.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Chooser(Protocol):
    """Chooses the tokens of one prompt; sampling has a state."""

    def first(self, logits: Tensor) -> int:
        """The next token by the target's logits [V] alone."""

    def propose(self, draft_logits: Tensor) -> Tensor:
        """The drafter's tokens int64 [B - 1] by its logits [B - 1, V]."""

    def commit(self, proposal: Tensor, draft_logits: Tensor, logits: Tensor) -> list[int]:
        """The accepted proposals and one token more (1 to B in all).

        proposal: int64 [B - 1], as `propose` gave it for draft_logits [B - 1, V]; logits: the target's [B, V].
        """


class Greedy:
    """The largest logit."""

    def first(self, logits: Tensor) -> int:
        return int(logits.argmax(-1))

    def propose(self, draft_logits: Tensor) -> Tensor:
        return draft_logits.argmax(-1)

    def commit(self, proposal: Tensor, draft_logits: Tensor, logits: Tensor) -> list[int]:
        chosen = logits.argmax(-1)
        accepted = int((chosen[:-1] == proposal).cumprod(0).sum())
        return chosen[: 1 + accepted].tolist()


class Sampler:
    """Draws at `temperature` > 0; the numbers follow from `seed` and the prompt's `index`, both at least 0."""

    def __init__(self, temperature: float, seed: int, index: int) -> None:
        self.temperature = temperature
        self._generator = np.random.default_rng((seed, index))

    def first(self, logits: Tensor) -> int:
        return int(draw(probabilities(logits[None], self.temperature), self._uniforms(1, logits)))

    def propose(self, draft_logits: Tensor) -> Tensor:
        return draw(probabilities(draft_logits, self.temperature), self._uniforms(len(draft_logits), draft_logits))

    def commit(self, proposal: Tensor, draft_logits: Tensor, logits: Tensor) -> list[int]:
        target = probabilities(logits, self.temperature)
        draft = probabilities(draft_logits, self.temperature)
        slots = len(proposal)
        uniforms = self._uniforms(slots + 1, logits)
        passed = uniforms[:-1] < acceptance(target[:-1], draft).gather(1, proposal[:, None])[:, 0]
        accepted = int(passed.cumprod(0).sum())
        rest = target[slots] if accepted == slots else residual(target[accepted], draft[accepted])
        return [*proposal[:accepted].tolist(), int(draw(rest[None], uniforms[-1:]))]

    def _uniforms(self, count: int, like: Tensor) -> Tensor:
        """Float64 [count] in [0, 1), on the device of `like`."""
        return torch.from_numpy(self._generator.random(count)).to(like.device)


def make_chooser(temperature: float, seed: int, index: int) -> Chooser:
    """Greedy at temperature 0."""
    return Sampler(temperature, seed, index) if temperature else Greedy()


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float64, [..., V]; safe for tiny temperatures."""
    logits = logits.double()
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index a row of `weights` [rows, V] (float64, at least 0, of any sum), by uniforms [rows]: int64 [rows].

    What weighs nothing is never drawn.
    """
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulated, uniforms[:, None] * total, right=True)
    last = torch.searchsorted(cumulated, total)  # the last with a weight: uniform * total may round up to the total
    return torch.minimum(drawn, last)[:, 0]


def acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """min(1, p / q) for every token, [..., V]; 1 where neither has any probability."""
    return torch.where(target < draft, target / draft, 1.0)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """The weights max(p - q, 0) [V] that a rejected slot is drawn from; p itself if that leaves nothing.

    It leaves nothing only where p and q are equal up to rounding, and so are their draws.
    """
    rest = (target - draft).clamp_min(0.0)
    return rest if bool(rest.any()) else target
