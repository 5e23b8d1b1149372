"""A computed shuffle that needs no memory.

A balanced Feistel network is a bijection of the numbers with 2k bits for any round function (Luby and Rackoff 1988,
https://doi.org/10.1137/0217022). Applying it repeatedly until the result is below `size` restricts it to [0, size) (cycle walking). Any
element of a shuffle of any length thus takes a few multiplications, and every rank computes only its own elements.
"""

from ztk.core.runtime.seed import derive_seed

_ROUNDS = 4
_MIX = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: odd, bits well spread


class Permutation:
    """A pseudo-random bijection of the numbers in [0, size). It depends only on the seed parts."""

    def __init__(self, size: int, *, seed: tuple[object, ...]) -> None:
        assert size > 0
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = [derive_seed(*seed, "permutation", i) for i in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        """Returns the element at `index`, 0 <= index < size."""
        assert 0 <= index < self.size
        value = self._encipher(index)
        while value >= self.size:  # fewer than 4 rounds on average: the network's domain is below 4 * size
            value = self._encipher(value)
        return value

    def _encipher(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            mixed = ((right ^ key) * _MIX) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 29)) * _MIX) & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed >> 32) & self._half_mask)
        return (left << self._half_bits) | right
