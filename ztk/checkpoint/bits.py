"""Checksums of bytes, and the dtype names of the safetensors format."""

import zlib

import torch

# Bytes per checksum. A reader verifies data in blocks of this size.
BLOCK_BYTES = 1 << 20

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
