"""`zero=ddp` and `zero=fsdp2`: the same experiment through torch's own data parallelism, to compare with.

Same model, data, first weights, schedule and dtypes: 16-bit parameters and gradients with fp32 master weights. DDP
knows no master weights, so they are kept beside it here; fully_shard keeps fp32 shards and gathers them in 16 bits.
What torch moves by itself is not in `comm.counters`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from experiments import policies
from ztk.config import Config
from ztk.engine import StepMetrics
from ztk.nn import Decoder, initialise
from ztk.optim import OptimizerPolicy, group_parameters
from ztk.precision import LossScalePolicy
from ztk.runtime import MemoryLedger, PhaseClock, Process, Tier
from ztk.runtime.io import IoCounters


class PeerEngine:
    """Trains a decoder by DDP or FSDP2 behind the methods of `ztk.engine.Engine` that a training loop calls."""

    def __init__(self, config: Config, *, process: Process) -> None:
        """Raises ValueError for options of ztk's own engine that would do nothing."""
        if config.checkpoint.every or config.checkpoint.resume:
            key = "every" if config.checkpoint.every else "resume"
            raise ValueError(
                f"checkpoint.{key}: zero={config.zero.engine} is there to compare with and neither saves nor loads; "
                "leave it out, or use zero=stage0 to stage3"
            )
        self.process, self.comm = process, process.comm
        self.memory, self.clock, self.io = MemoryLedger(), PhaseClock(), IoCounters()
        self.accumulation_steps = config.train.accumulation_steps
        self.micro_steps = self.global_steps = 0
        precision = policies.precision_policy(config)
        self._policy, self._rates = policies.optimizer_policy(config), policies.learning_rates(config).tolist()
        self._scale = _LossScale(precision.loss_scale)
        self._wrap = _Ddp if config.zero.engine == "ddp" else _Fsdp2
        self.module = Decoder(policies.decoder_config(config))
        initialise(self.module, seed=config.train.seed, device=process.device)
        self._wrapped = self._wrap(
            self.module, dtype=precision.dtype, reduce_dtype=precision.reduce_dtype, process=process
        )
        self._optimizer = _optimizer(self._policy, masters=self._wrapped.masters)
        self._base_rates = [group["lr"] for group in self._optimizer.param_groups]
        self._norm = torch.zeros(())
        self._skipped = self._skipped_total = 0
        self._book("parameters", tensors=list(self.module.parameters()))

    def __call__(self, *args: Tensor) -> Tensor:
        self._wrapped.synchronise(self._is_boundary or not torch.is_grad_enabled())
        with self.clock.phase("forward"):
            return self._wrapped.module(*args)

    @property
    def _is_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.accumulation_steps == 0

    def backward(self, loss: Tensor) -> None:
        with self.clock.phase("backward"):
            (loss * (self._scale.value / self.accumulation_steps)).backward()

    def step(self) -> bool:
        """As of `Engine.step`. Only float16 waits for the device: it has to know whether to skip."""
        boundary = self._is_boundary
        self.micro_steps += 1
        if boundary:
            with self.clock.phase("optimizer"):
                self._step()
            self.global_steps += 1
        return boundary

    def _step(self) -> None:
        masters = self._wrapped.masters
        self._wrapped.gradients_to_masters()
        self._norm = _whole(torch.nn.utils.get_total_norm([master.grad for master in masters])) / self._scale.value
        found = self._scale.is_dynamic and not math.isfinite(self._norm.item())
        self._skipped, self._skipped_total = found, self._skipped_total + found
        if not found:
            factor = torch.ones_like(self._norm) / self._scale.value
            if self._policy.clip_grad_norm:
                factor *= (self._policy.clip_grad_norm / (self._norm + 1e-6)).clamp(max=1.0)
            if self._policy.clip_grad_norm or self._scale.value != 1:
                torch._foreach_mul_([_local(master.grad) for master in masters], factor)
            updates = self.global_steps - self._skipped_total
            for group, rate in zip(self._optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = rate * self._rates[updates]
            self._optimizer.step()
            self._wrapped.masters_to_parameters()
            if updates == 0:
                self._book_first_update()
        for tensor in (*masters, *self.module.parameters()):
            tensor.grad = None
        self._scale.update(found)

    def read_metrics(self) -> StepMetrics:
        return StepMetrics(
            grad_norm=self._norm.item(),
            loss_scale=self._scale.value,
            lr=self._optimizer.param_groups[0]["lr"],
            skipped=bool(self._skipped),
            updates=self.global_steps - self._skipped_total,
            skipped_total=self._skipped_total,
        )

    def close(self) -> None:
        """Nothing outlives the process."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def _book_first_update(self) -> None:
        self._book("gradients", tensors=[p.grad for p in self.module.parameters() if p.grad is not None])
        states = [
            value for state in self._optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        parameters = set(map(id, self.module.parameters()))
        masters = [master for master in self._wrapped.masters if id(master) not in parameters]
        self._book("optimizer", tensors=states + masters)

    def _book(self, category: str, *, tensors: list[Tensor]) -> None:
        self.memory.add(tier=Tier.device, category=category, nbytes=sum(_local(tensor).nbytes for tensor in tensors))


class _Ddp:
    """Whole parameters in `dtype` on every rank; fp32 masters beside them if `dtype` has fewer bits."""

    def __init__(
        self, model: Decoder, *, dtype: torch.dtype, reduce_dtype: torch.dtype | None, process: Process
    ) -> None:
        if reduce_dtype not in (None, dtype):
            raise ValueError(
                f"precision.reduce_dtype={reduce_dtype}: zero=ddp reduces in precision.dtype; leave it out"
            )
        values = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self._parameters = list(model.parameters())
        self.masters = self._parameters if dtype is torch.float32 else [nn.Parameter(value) for value in values]
        devices = [process.device] if process.device.type == "cuda" else None
        self.module = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def synchronise(self, on: bool) -> None:
        self.module.require_backward_grad_sync = on

    def gradients_to_masters(self) -> None:
        if self.masters is not self._parameters:
            for master, parameter in zip(self.masters, self._parameters, strict=True):
                master.grad = parameter.grad.float()

    @torch.no_grad()
    def masters_to_parameters(self) -> None:
        if self.masters is not self._parameters:
            torch._foreach_copy_(self._parameters, self.masters)


class _Fsdp2:
    """fp32 shards, gathered in `dtype` block by block."""

    def __init__(
        self, model: Decoder, *, dtype: torch.dtype, reduce_dtype: torch.dtype | None, process: Process
    ) -> None:
        mesh = init_device_mesh(process.device.type, (dist.get_world_size(),))
        # The rotary tables are inputs of a block and stay fp32.
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype or dtype, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=mixed)
        self.module = fully_shard(model, mesh=mesh, mp_policy=mixed)
        self.masters = list(model.parameters())

    def synchronise(self, on: bool) -> None:
        self.module.set_requires_gradient_sync(on)

    def gradients_to_masters(self) -> None:
        pass

    def masters_to_parameters(self) -> None:
        pass


class _LossScale:
    """`LossScalePolicy` on the host."""

    def __init__(self, policy: LossScalePolicy) -> None:
        self.value, self.is_dynamic = policy.initial, policy.dynamic
        self._policy, self._good_steps, self._left = policy, 0, policy.hysteresis

    def update(self, found_inf: bool) -> None:
        policy = self._policy
        if not policy.dynamic:
            return
        self._good_steps = 0 if found_inf else self._good_steps + 1
        if found_inf and self._left > 1:
            self._left -= 1
        elif found_inf:
            if self.value <= policy.floor:
                raise FloatingPointError(
                    f"gradients are not finite at precision.loss_scale.floor={policy.floor:g}; use precision=bf16"
                )
            self.value = max(self.value * policy.backoff_factor, policy.floor)
        elif self._good_steps == policy.window:
            self.value, self._left = min(self.value * policy.growth_factor, policy.maximum), policy.hysteresis
            self._good_steps = 0


def _optimizer(policy: OptimizerPolicy, *, masters: list[Tensor]) -> Optimizer:
    """torch's fused optimizer of the same name, with the same groups."""
    shapes = {str(number): master.shape for number, master in enumerate(masters)}
    table = group_parameters(policy, shapes=shapes)
    groups = [{"params": [], "lr": row.lr, "weight_decay": row.weight_decay} for row in table.rows]
    for number, master in enumerate(masters):
        groups[table.row_of[str(number)]]["params"].append(master)
    match policy.name:
        case "adamw":
            return torch.optim.AdamW(groups, betas=policy.betas, eps=policy.eps, fused=True)
        case "adam":
            return torch.optim.Adam(groups, betas=policy.betas, eps=policy.eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, momentum=policy.momentum, nesterov=policy.nesterov, fused=True)
    raise ValueError(f"optimizer={policy.name}: torch has none; use optimizer=adamw, or zero=stage0 to stage3")


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
