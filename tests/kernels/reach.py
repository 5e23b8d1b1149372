"""Shapes past every loop and tile that launchers choose for a target; the tests run them on the interpreter, with that target's tiles."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ztk.kernels.ops import segment_scan, sharded_cross_entropy, sum_of_squares


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """A shape that reaches past the tiles and loops that a launcher chooses for one target."""

    shape: tuple[int, ...]
    target: str = "sm_90"
    dtype: torch.dtype = torch.float32
    inputs: Mapping[str, object] = field(default_factory=dict)


REACH: dict[str, tuple[Reach, ...]] = {
    "attention": (
        # every edge of a window against blocks of 32 keys and 16 or 32 queries, before and behind the diagonal
        *(Reach(shape=(1, 100, 1, 16), inputs={"window": w}) for w in (2, 15, 16, 17, 18, 31, 32, 33, 34, 66)),
        Reach(shape=(1, 300, 2, 64), dtype=torch.float16, inputs={"group": 2}),
        Reach(shape=(1, 300, 1, 64), dtype=torch.float16, inputs={"window": 66}),
        Reach(shape=(1, 270, 1, 128), dtype=torch.float16, inputs={"window": 129}),
        Reach(shape=(1, 140, 1, 256), dtype=torch.float16, inputs={"causal": False}),
        *(Reach(shape=(1, 140, 1, 64), dtype=torch.float16, target=target) for target in ("sm_80", "gfx942")),
    ),
    "cross_entropy": (
        Reach(shape=(3, 65537), inputs={"inplace": True}),  # four full tiles of 1024 threads and a tail
        Reach(shape=(3, 65537), inputs={"label_smoothing": 0.1, "z_loss": 1e-2}, target="gfx942"),
        Reach(shape=(2, 32768), inputs={"inplace": True}, dtype=torch.bfloat16),  # no tail
    ),
    "draw_rows": (Reach(shape=(66, 16, 40)),),
    "symmetric_product": (  # tiles on both sides of the diagonal, of both sizes; a sum of three steps
        Reach(shape=(300, 136), dtype=torch.float16),
        Reach(shape=(300, 131), dtype=torch.float16),  # without descriptors
        Reach(shape=(300, 72), dtype=torch.float16, target="gfx942"),
        Reach(shape=(300, 300), dtype=torch.float16, inputs={"polynomial": True}),
    ),
    "float8_largest": (Reach(shape=(300, 200), inputs={"factor": True}),),  # three by four tiles
    "float8_codes": (
        Reach(shape=(300, 200), inputs={"factor": True}),
        Reach(shape=(300, 200), dtype=torch.bfloat16, inputs={"columns": False, "turned": True}),
    ),
    "grouped_matmul": (  # past tiles of 128 x 128 x 64 in slots, columns, and steps of either sum
        Reach(shape=(200, 3, 150, 200), dtype=torch.float16),
        Reach(shape=(200, 3, 150, 203), dtype=torch.float16),  # without descriptors
        Reach(shape=(200, 3, 150, 200), dtype=torch.float16, target="gfx942", inputs={"gather": False}),
    ),
    "layer_norm": (
        Reach(shape=(300, 2100), inputs={"residual": True}),  # 264 programs and partial sums
        Reach(shape=(3, 8200)),  # rows that are read twice
        Reach(shape=(60, 16400), inputs={"residual": True}),  # 58 programs per stripe, five pieces of a row
        Reach(shape=(3, 16400), dtype=torch.bfloat16, target="gfx942", inputs={"bias": False}),
    ),
    "linear_rows": (  # tiles of a GPU: 16 outputs, 128 inputs
        Reach(shape=(3, 300, 150), dtype=torch.float16, inputs={"kind": "int8"}),
    ),
    "moe_route": (  # 133 blocks of tokens: more than one step of the scan
        Reach(shape=(530, 600), inputs={"top_k": 3}),
    ),
    # two segments; the last row that a segment stores is a head's, as 4 heads share a key head
    "paged_attention": (Reach(shape=(1, 600, 4, 1, 16), inputs={"split": True}),),
    "rms_norm": (
        Reach(shape=(600, 2100), inputs={"with_residual": True}),  # 528 programs and partial sums
        Reach(shape=(60, 16400), inputs={"with_residual": True}),  # 58 programs per stripe, five pieces of a row
        Reach(shape=(3, 16400), dtype=torch.bfloat16, target="gfx942"),
    ),
    "rope": (  # more heads than a program rotates, some of their dimensions copied
        Reach(shape=(2, 9, 7, 64), inputs={"partial": True}),
        Reach(shape=(2, 9, 7, 64), inputs={"partial": True, "interleaved": True, "per_row": True}),
    ),
    "router_losses": (Reach(shape=(2100, 6)),),  # tokens for three rounds of the adding program
    "segment_scan": (Reach(shape=(2, 2 * segment_scan.BLOCK + 3)),),  # a second and a third tile of the loop
    "select_rows": (Reach(shape=(3, 2100)),),
    "sharded_cross_entropy": (
        # a second round of the joining program
        Reach(shape=(sharded_cross_entropy.JOINED_ROWS + 70, 16), inputs={"z_loss": 1e-2}),
        Reach(shape=(3, 65537)),  # four full tiles of 1024 threads and a tail
    ),
    "sum_of_squares": (  # a second round of every program's loop
        Reach(shape=(sum_of_squares.MAX_PROGRAMS * sum_of_squares.BLOCK + 9001,)),
    ),
}
REACH["grouped_matmul_pair"] = REACH["grouped_matmul"]
