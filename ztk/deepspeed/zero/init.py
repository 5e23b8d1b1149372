"""`zero.Init`: builds a model larger than any rank's memory in sharded form. `initialize` takes it over."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from ztk.core.policies.offload import MIN_BUFFER_COUNT
from ztk.core.runtime import MemoryLedger, Process, Tier
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.store import DeviceStore, Store
from ztk.deepspeed.config.keys import Findings
from ztk.deepspeed.config.source import read_source
from ztk.deepspeed.config.zero import Zero
from ztk.deepspeed.start.process import this_process
from ztk.deepspeed.zero.parameter import name_parameter
from ztk.zero.offload import NvmeStore, OffloadPolicy
from ztk.zero.parameters.construction import construction, shard_module
from ztk.zero.parameters.partitioned import ZeroInitContext

_BLOCK_BYTES = 1 << 20
_orig_torch_arange = (
    torch.arange
)  # transformers compares with it when it replaces `zero_wrapper_for_fp_tensor_constructor`
_OF_OPTIMIZER = ("offload_optimizer", "cpu_offload")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, None)


class DeepSpeedTensorOverride(Enum):
    """Changes of new tensors in DeepSpeed's Init. ztk makes none of them: a model is built unchanged."""

    dtype = 1
    device = 2


class Init:
    """`with zero.Init(config_dict_or_path=...): model = Model()` shards every parameter as soon as its module is built.

    Every rank builds the same model, and rank 0's values count. With the same seed on all ranks, the values are bitwise equal to a model
    built without Init, even if a parent changes its children's parameters. At most one module's own parameters are unsharded at a time.
    Buffers are not sharded. Inside another Init this one has no effect.

    module: a module built unsharded, to shard instead.
    config_dict_or_path, config: the location of shards: zero_optimization.offload_param and aio. A batch size is not needed, and values
    of "auto" are ignored.
    remote_device: cpu or nvme; takes precedence over the configuration.
    pin_memory: accepted and ignored; shards are copied once, into the engine's memory.
    dtype: dtype of the shards. By default the model's, so that the engine's fp32 master weights lose no precision, also in 16 bit.
    data_parallel_group, sequence_data_parallel_group: must span all ranks, or be None.
    enabled: with False, Init has no effect.
    mem_efficient_linear, tensor_overrides: accepted and ignored; ztk keeps no gathered weight for a linear layer's backward, and does not
    change new tensors.

    Raises DeepSpeedConfigError for an invalid configuration, and ValueError for other arguments.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: object = None,
        config: object = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        zero_param_parallel_group: object = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: object = None,
        param_swapper: object = None,
        tensor_overrides: object = None,
    ) -> None:
        del mem_efficient_linear, tensor_overrides, pin_memory
        self.enabled = enabled
        self._stack = ExitStack()
        if not enabled:
            return
        if config is not None and config_dict_or_path is not None:
            raise ValueError("config is the old name of config_dict_or_path; give one of them")
        _refuse(
            mpu=mpu,
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights or None,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights or None,
            param_swapper=param_swapper,
        )
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype}: must be torch.float16, torch.bfloat16, torch.float32 or None")
        self._process = this_process()
        for name, group in (
            ("data_parallel_group", data_parallel_group),
            ("sequence_data_parallel_group", sequence_data_parallel_group),
        ):
            _check_group(group, name=name, process=self._process)
        source = config_dict_or_path if config_dict_or_path is not None else config
        policy = _placed(source, remote_device=remote_device)
        self._init_context = ZeroInitContext(
            comm=self._process.comm,
            store=_store(policy, process=self._process),
            dtype=dtype,
            on_partition=name_parameter,
        )
        if module is not None:
            shard_module(module, init_context=self._init_context)
            self._init_context.close()

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.callback(self._init_context.close)
            self._stack.enter_context(construction(self._init_context))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _refuse(**values: object) -> None:
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name}={value!r:.80}: not offered by ztk's zero.Init; leave it out")


def _check_group(group: object, *, name: str, process: Process) -> None:
    if group is not None and dist.get_world_size(group) != process.world_size:
        raise ValueError(
            f"{name}: spans {dist.get_world_size(group)} of {process.world_size} ranks; ztk shards over all, leave it out"
        )


def _placed(source: object, *, remote_device: str | None) -> OffloadPolicy:
    """Returns the location of the shards."""
    given = {} if source is None else read_source(source)
    findings = Findings()
    policy = Zero(given | {"zero_optimization": _filled(given.get("zero_optimization", {}))}, findings=findings).offload
    findings.check()
    if remote_device in (None, str(policy.parameters)):
        return policy
    if remote_device not in ("cpu", "nvme", "none"):
        raise ValueError(f"remote_device={remote_device!r}: must be cpu, nvme, none or None")
    if remote_device == "nvme":
        raise ValueError(
            "remote_device='nvme': needs a folder: give config_dict_or_path with zero_optimization.offload_param "
            '{"device": "nvme", "nvme_path": ...}'
        )
    return OffloadPolicy(parameters=Tier(remote_device))


def _filled(section: object) -> object:
    """Returns the section without values that the Hugging Face Trainer fills in later, and without the optimizer's."""
    if not isinstance(section, dict):
        return section
    return {key: value for key, value in section.items() if value != "auto" and key not in _OF_OPTIMIZER}


def _store(policy: OffloadPolicy, *, process: Process) -> Store:
    ledger = MemoryLedger()
    match policy.parameters:
        case Tier.none:
            return DeviceStore(device=process.device, ledger=ledger)
        case Tier.cpu:  # not pinned: every shard is copied only once, into the engine's own memory
            return DeviceStore(device=torch.device("cpu"), ledger=ledger)
        case Tier.nvme:  # shards stream through the threads' blocks, without the pool
            small = replace(policy, buffer_count=MIN_BUFFER_COUNT, buffer_bytes=_BLOCK_BYTES)
            return NvmeStore(small, rank=process.rank, ledger=ledger, counters=IoCounters())


def zero_wrapper_for_fp_tensor_constructor(fn: Callable, target_fp_dtype: torch.dtype | None) -> Callable:
    """Returns a constructor like `fn` whose floating-point tensors have target_fp_dtype.

    DeepSpeed's Init replaces torch's constructors by such ones, and transformers replaces this function. ztk's Init does not change torch
    and does not call it.
    """

    def wrapped(*args, **kwargs) -> torch.Tensor:
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if target_fp_dtype is not None and tensor.is_floating_point() else tensor

    return wrapped
