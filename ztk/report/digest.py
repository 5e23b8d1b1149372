"""One hash over all losses of a run."""

import hashlib
import struct


class LossDigest:
    """A hash chain over the bits of every step's float32 loss.

    Two runs have equal digests if and only if all their losses are bitwise equal. `value` is the complete state: a resumed run that
    starts from it ends with the digest of an uninterrupted run.
    """

    def __init__(self, value: str = "") -> None:
        self.value = value

    def update(self, loss: float) -> None:
        """Adds a loss. loss: a float32 value, so packing it is exact."""
        bits = struct.pack("<f", loss)
        self.value = hashlib.sha256(bytes.fromhex(self.value) + bits).hexdigest()
