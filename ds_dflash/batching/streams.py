"""Random streams of a plan, each a pure function of (seed, epoch, block, generation, name).

Everything is derived from the raw output of PCG64, which numpy keeps the same from version to version (unlike
the methods of `numpy.random.Generator`), and from sorts of distinct keys, whose result no sorting algorithm can
change: a plan is the same on every machine.
"""

from typing import NamedTuple

import numpy as np

STREAMS = ("grouping", "windows", "rounds")


class PlanKey(NamedTuple):
    """Names one stretch of an epoch: a block of samples, and how often what was left of it was replanned."""

    seed: int
    epoch: int
    block: int = 0
    generation: int = 0

    def stream(self, name: str) -> "Stream":
        """The random stream `name` of this stretch, at its beginning."""
        spawn_key = (self.epoch, self.block, self.generation, STREAMS.index(name))
        return Stream(np.random.SeedSequence(self.seed, spawn_key=spawn_key))


class Stream:
    """Random draws, in the order in which they are asked for."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._bits = np.random.PCG64(seed)

    def raw(self, *shape: int) -> np.ndarray:
        """uint64 of the given shape, all 64 bits random."""
        return np.asarray(self._bits.random_raw(int(np.prod(shape))), np.uint64).reshape(shape)

    def orders(self, *shape: int) -> np.ndarray:
        """int32 of the given shape: along the last axis, random permutations of 0 .. shape[-1] - 1.

        Sorts random keys that hold the index in their low bits (three times as fast as a swap shuffle; the high
        bits tie so seldom, 2^-(64 - bits) a pair, that the order is uniform for every purpose here).
        """
        bits = np.uint64(max(shape[-1] - 1, 1).bit_length())
        keys = self.raw(*shape)
        keys >>= bits
        keys <<= bits
        keys |= np.arange(shape[-1], dtype=np.uint64)
        keys.sort(axis=-1)
        keys &= (np.uint64(1) << bits) - np.uint64(1)
        return keys.astype(np.int32)

    def coins(self, *shape: int) -> np.ndarray:
        """bool of the given shape, fair."""
        return (self.raw(*shape) >> np.uint64(63)).astype(bool)

    def below(self, limit: int) -> int:
        """A number of 0 .. limit - 1."""
        return int(self._bits.random_raw()) % limit
