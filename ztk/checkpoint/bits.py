"""Checksums of bytes."""

import zlib

# Bytes per checksum. A reader verifies data in blocks of this size.
BLOCK_BYTES = 1 << 20


class BlockChecksums:
    """Computes the crc32 of every block of BLOCK_BYTES of a byte stream that arrives in parts."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._current, self._filled = 0, 0

    def add(self, data: memoryview) -> None:
        while len(data):
            part = data[: BLOCK_BYTES - self._filled]
            self._current = zlib.crc32(part, self._current)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._done.append(self._current)
                self._current, self._filled = 0, 0

    @property
    def values(self) -> list[int]:
        """Returns one checksum per block. The last block may be short."""
        return [*self._done, self._current] if self._filled else list(self._done)
