"""DistributedDataParallel and fully_shard in their usual configuration, and formulas for their traffic.

[Note: Counting a peer's traffic]
`Comm` does not count torch's own collectives, so each peer computes the traffic of one pass by formula, in the units of `CommCounters`.
The tests compare the formulas with the collectives that a dispatch mode records.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """One kind of collective in one pass. numel: the total over all `calls`, counted as in `CommCounters`."""

    kind: str
    numel: int
    itemsize: int
    calls: int = 1


class DataParallelPeer:
    """DistributedDataParallel: fp32 parameters, `torch.autocast` for 16 bit, gradients as views of its buckets.

    Gradients are reduced in fp32, or in `precision.reduce_dtype` by torch's compression hooks. Accumulated micro-batches are reduced
    once, after the last.
    """

    name = "ddp"
    reduces_every_backward = False

    def __init__(self, module: nn.Module, *, process: Process, precision: PrecisionPolicy) -> None:
        device_ids = [process.device.index] if process.device.type == "cuda" else None
        # The model's only buffers are constant tables, so there is no need to broadcast them in every forward.
        self._ddp = DistributedDataParallel(
            module, device_ids=device_ids, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self._module = module
        self._wire = precision.reduce_dtype or torch.float32
        if self._wire is torch.bfloat16:
            self._ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif self._wire is torch.float16:
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        self._device_type, self._dtype = process.device.type, precision.dtype

    def forward(self, args: tuple, kwargs: dict, *, synchronise: bool):
        """Runs the module's forward. The backward reduces gradients if `synchronise`."""
        reduction = nullcontext() if synchronise else self._ddp.no_sync()
        half = self._dtype is not torch.float32
        with reduction, torch.autocast(self._device_type, dtype=self._dtype if half else None, enabled=half):
            return self._ddp(*args, **kwargs)

    def forward_traffic(self, *, trains: bool) -> Iterable[Traffic]:
        return ()

    def backward_traffic(self, *, synchronise: bool) -> Iterable[Traffic]:
        """One all-reduce of all gradients. torch chooses the number of buckets at run time, so this counts as one call."""
        if synchronise:
            numel = sum(parameter.numel() for parameter in self._module.parameters() if parameter.requires_grad)
            yield Traffic(kind="all_reduce", numel=2 * numel, itemsize=self._wire.itemsize)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        yield

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield name, parameter.data


class FullyShardedPeer:
    """fully_shard (FSDP2) on each block and on the root: fp32 shards, compute in `precision.dtype`.

    Every backward reduces gradients in `precision.reduce_dtype`, which defaults to the compute dtype, as in ztk. All other settings are
    torch's defaults.
    """

    name = "fsdp2"
    reduces_every_backward = True

    def __init__(self, module: nn.Module, *, process: Process, precision: PrecisionPolicy) -> None:
        half = precision.dtype is not torch.float32
        mixed = MixedPrecisionPolicy(
            param_dtype=precision.dtype if half else None,
            reduce_dtype=precision.reduce_dtype,
            cast_forward_inputs=False,  # a cast would round the fp32 rotary tables that the blocks receive
        )
        mesh = init_device_mesh(process.device.type, (process.world_size,))
        blocks = [child for part in module.modules() if isinstance(part, nn.ModuleList) for child in part]
        blocks = [block for block in blocks if next(block.parameters(), None) is not None]
        self._groups = []  # elements per gathered group with fully_shard's padding: (all, trained); the root is last
        seen: set[nn.Parameter] = set()
        for unit in [*blocks, module]:
            parameters = [parameter for parameter in unit.parameters() if parameter not in seen]
            seen.update(parameters)
            self._groups.append(_Group.of(parameters, world_size=process.world_size))
        for unit in [*blocks, module]:
            fully_shard(unit, mesh=mesh, mp_policy=mixed)
        self._module: Any = module  # both FSDPModule and nn.Module at run time
        self._dtype, self._wire = precision.dtype, precision.reduce_dtype or precision.dtype
        self._root_is_full = False

    def forward(self, args: tuple, kwargs: dict, *, synchronise: bool):
        """Runs the module's forward. The backward reduces gradients if `synchronise`."""
        self._module.set_requires_gradient_sync(synchronise)
        return self._module(*args, **kwargs)

    def forward_traffic(self, *, trains: bool) -> Iterable[Traffic]:
        """Gathers every group. The root stays gathered until the end of the next backward."""
        groups = self._groups[:-1] if self._root_is_full else self._groups
        self._root_is_full = True
        yield self._gathers(groups)

    def backward_traffic(self, *, synchronise: bool) -> Iterable[Traffic]:
        """Gathers all groups except the root again, and reduce-scatters all."""
        yield self._gathers(self._groups[:-1])
        self._root_is_full = False
        if synchronise:
            trained = [group.trained for group in self._groups if group.trained]
            yield Traffic(kind="reduce_scatter", numel=sum(trained), itemsize=self._wire.itemsize, calls=len(trained))

    def _gathers(self, groups: list["_Group"]) -> Traffic:
        numel = sum(group.numel for group in groups)
        return Traffic(kind="all_gather", numel=numel, itemsize=self._dtype.itemsize, calls=len(groups))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        sharded = [module for module in self._module.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()
            self._root_is_full = False

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        self._module.reshard()  # a forward without a backward leaves the root gathered
        self._root_is_full = False
        for name, parameter in self._module.named_parameters():
            yield name, parameter.full_tensor().detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Elements of a parameter group as fully_shard sends them: each parameter padded along dim 0 to a multiple of the number of ranks."""

    numel: int
    trained: int

    @staticmethod
    def of(parameters: list[nn.Parameter], *, world_size: int) -> "_Group":
        sizes = [-(-p.shape[0] // world_size) * world_size * (p.numel() // p.shape[0]) for p in parameters]
        trained = [size for size, parameter in zip(sizes, parameters, strict=True) if parameter.requires_grad]
        return _Group(numel=sum(sizes), trained=sum(trained))
