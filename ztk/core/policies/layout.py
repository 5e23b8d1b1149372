"""Rules between policies and the topology.

Each function yields one line per fault. `ztk.parallelize` raises the first, `run.py` prints them all. Arguments are policies, or sections
of the configuration with the same fields.
"""

from collections.abc import Iterator

from ztk.core.policies.offload import OffloadChoices
from ztk.core.policies.tier import Tier
from ztk.core.policies.zero import ZeroChoices


def offload_faults(offload: OffloadChoices, *, zero: ZeroChoices) -> Iterator[str]:
    """Only sharded parameters can be offloaded."""
    if offload.parameters in (Tier.cpu, Tier.nvme) and zero.stage != 3:
        yield (
            f"offload.parameters={offload.parameters.value} needs sharded parameters and zero.stage is {zero.stage}: use "
            "zero=stage3, or offload.parameters=none"
        )


def recompute_faults(*, partition_inputs: bool | None, sequence_parallel: bool | None) -> Iterator[str]:
    """A block's input is partitioned once."""
    if partition_inputs and sequence_parallel:
        yield (
            "recompute.partition_inputs=true needs blocks whose input is the same on all tensor-parallel ranks; with "
            "topology.sequence_parallel=true each rank has its own part already: leave partition_inputs out"
        )


def hpz_faults(size: int, *, data_ranks: int, model_ranks: int) -> Iterator[str]:
    """size: `zero.hpz_partition_size`, ranks. data_ranks: ranks over which ZeRO shards. model_ranks: ranks per data-parallel rank."""
    if data_ranks % size:
        divisor = next(number for number in range(min(size, data_ranks), 0, -1) if data_ranks % number == 0)
        yield (
            f"zero.hpz_partition_size={size} does not divide the {data_ranks} data-parallel ranks: use "
            f"zero.hpz_partition_size={divisor}, or launch.ranks={size * model_ranks}"
        )


def hpz_topology_faults(size: int, *, intra_node: int) -> Iterator[str]:
    """size: `zero.hpz_partition_size`, ranks. intra_node: ranks of one node in the process's topology."""
    if size not in (1, intra_node):
        yield f"zero.hpz_partition_size={size}: arrange the process with Topology(intra_node={size})"
