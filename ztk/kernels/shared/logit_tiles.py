"""How kernels over rows of logits of any dtype are launched: the tile that the threads of a program walk along a row."""

from dataclasses import dataclass

from ztk.kernels.launch.grids import next_power_of_2

VECTOR_BYTES, CHUNKS = 16, 4  # four 16-byte loads in flight per thread
LONG_ROW = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Tile of a row: `chunks` vectors of 16 bytes, `vector` elements each, in each of `lanes` threads."""

    chunks: int
    lanes: int
    vector: int
    num_warps: int

    @staticmethod
    def for_row(V: int, *, itemsize: int, warp_size: int, smoothing: bool = False) -> "LaunchConfig":
        """For rows of V elements of `itemsize` bytes: the longer the row, the more warps, so that the rows in flight stay in the second-level
        cache for their second read: one row of 131072 16-bit logits per processor is 34 MB, of at least 50. Smoothing keeps
        a third number per lane, and half the logits, so that 1024 threads do not spill.
        """
        vector = VECTOR_BYTES // itemsize
        threads = 1024 if V >= LONG_ROW else 512 if V >= LONG_ROW // 4 else 256
        lanes = max(warp_size, min(threads, next_power_of_2(V) // vector))
        chunks = max(1, min(CHUNKS // 2 if smoothing else CHUNKS, next_power_of_2(V) // (vector * lanes)))
        return LaunchConfig(chunks=chunks, lanes=lanes, vector=vector, num_warps=lanes // warp_size)

    @property
    def block(self) -> int:
        """Elements of the tile."""
        return self.chunks * self.lanes * self.vector
