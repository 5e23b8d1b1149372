"""The engine's interface on top of torch's data parallelism. Losses and parameters have the model's compute dtype."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from ztk.core.runtime import MemoryLedger, PhaseClock, Process, Tier
from ztk.core.runtime.io import IoCounters
from ztk.train.engine.batches import BatchEngine
from ztk.train.engine.control import StepMetrics
from ztk.train.engine.full import NO_GRADIENT
from ztk.train.engine.peers.wrap import DataParallelPeer, FullyShardedPeer, Traffic


class PeerEngine(BatchEngine):
    """Trains `module` with torch and the interface of `ztk.train.engine.Engine`; built by `parallelize_peer`.

    memory: bytes of this rank's tensors after every step. Buffers that torch allocates temporarily are not included.
    clock: forward, backward and optimizer. torch communicates during the backward, so that phase includes communication.
    comm: counters by formula; see [Note: Counting a peer's traffic] in `wrap.py`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        peer: DataParallelPeer | FullyShardedPeer,
        optimizer: torch.optim.Optimizer,
        schedule: LambdaLR,
        scaler: torch.amp.GradScaler | None,
        clip_grad_norm: float,
        process: Process,
        memory: MemoryLedger,
        clock: PhaseClock,
        io: IoCounters,
        accumulation_steps: int = 1,
    ) -> None:
        self.module, self.peer, self.process = module, peer, process
        self.memory, self.clock, self.io, self.comm = memory, clock, io, process.comm
        self.accumulation_steps = accumulation_steps
        self.micro_steps = 0
        self.global_steps = 0
        self.optimizer, self._schedule, self._scaler, self._clip = optimizer, schedule, scaler, clip_grad_norm
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._fresh = True  # whether the next backward starts a step
        self.before_update: Callable[[], None] | None = (
            None  # called by `step` at a boundary, when gradients are complete
        )
        self._norm: Tensor | None = None
        self._lr, self._skipped, self._skipped_total = 0.0, False, 0
        self._book()

    def __call__(self, *args, **kwargs):
        """Runs the module's forward. Unlike with ztk's engine, `no_sync` must also enclose the forward."""
        trains = torch.is_grad_enabled()
        with self.clock.phase("forward"):
            out = self.peer.forward(args, kwargs, synchronise=self._reduces)
        self._count(self.peer.forward_traffic(trains=trains))
        return out

    @property
    def is_accumulation_boundary(self) -> bool:
        """Whether the optimizer steps after this micro-batch."""
        return self._synchronise and (self.micro_steps + 1) % self.accumulation_steps == 0

    @property
    def _reduces(self) -> bool:
        return self._synchronise and (self.peer.reduces_every_backward or self.is_accumulation_boundary)

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss, a scalar, divided by the number of micro-batches and times the loss scale: for
        `engine.scale(loss).backward()`.
        """
        if self._fresh:  # not at the end of the step, because `read_metrics` may still need the norm
            self.optimizer.zero_grad()
            self._fresh = False
        self._count(self.peer.backward_traffic(synchronise=self._reduces))
        loss = loss / self.accumulation_steps if self.accumulation_steps > 1 else loss
        return loss if self._scaler is None else self._scaler.scale(loss)

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of a scalar loss, in which torch reduces the gradients."""
        with self.clock.phase("backward"):
            self.scale(loss).backward()

    def step(self) -> bool:
        """Ends a micro-batch. Returns True at a boundary, where the optimizer steps; also if an overflow made it skip."""
        boundary = self.is_accumulation_boundary
        self.micro_steps += 1
        if not boundary:
            return False
        if self.before_update is not None:
            self.before_update()
        self._lr = float(self._schedule.get_last_lr()[0])
        with self.clock.phase("optimizer"):
            self._skipped = not self._update()
        self._skipped_total += self._skipped
        self.global_steps += 1
        self._fresh = True
        self._book()
        return True

    def _update(self) -> bool:
        """Unscales, clips, updates and advances the learning rate. Returns False if the scaler skipped the step."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        self._norm = None
        if self._clip:
            self._norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        if self._scaler is None:
            self.optimizer.step()
        else:
            before = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            if self._scaler.get_scale() < before:
                return False
        self._schedule.step()
        return True

    def full_grad(self, name: str) -> Tensor:
        """Returns the same as `Engine.full_grad`. Raises RuntimeError without a gradient, and ValueError for an unknown name."""
        found = self._named(name).grad
        if found is None or self._fresh:
            raise RuntimeError(NO_GRADIENT.format(name=name))
        return _whole(found) / (1.0 if self._scaler is None else self._scaler.get_scale())

    def full_parameter(self, name: str) -> Tensor:
        """Returns the same as `Engine.full_parameter`. Raises ValueError for an unknown name."""
        return _whole(self._named(name))

    def _named(self, name: str) -> nn.Parameter:
        found = dict(self.module.named_parameters()).get(name)
        if found is None:
            raise ValueError(f"{name!r}: the model has no parameter of this name")
        return found

    def read_metrics(self) -> StepMetrics:
        """Returns the last step's scalars. Without clipping this computes the norm, which is a collective call."""
        norm = self._norm
        if norm is None:
            norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return StepMetrics(
            grad_norm=float(norm),
            loss_scale=1.0 if self._scaler is None else self._scaler.get_scale(),
            lr=self._lr,
            skipped=self._skipped,
            updates=self.global_steps - self._skipped_total,
            skipped_total=self._skipped_total,
        )

    def read_module_metrics(self) -> dict[str, object]:
        """Returns no metrics: peers train dense models only."""
        return {}

    def close(self) -> None:
        """Does nothing; present for the interface of `Engine`."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of the model, including frozen parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def _count(self, traffic: Iterable[Traffic]) -> None:
        for item in traffic:
            self.comm.counters.count(item.kind, numel=item.numel, itemsize=item.itemsize)
            self.comm.counters.calls[item.kind] += item.calls - 1

    def _book(self) -> None:
        """Updates the ledger to the existing tensors."""
        existing = {
            "parameters": [p.data for p in self.module.parameters()],
            "gradients": [p.grad for p in self._parameters if p.grad is not None],
            "optimizer": [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)],
        }
        booked = self.memory.by_category(Tier.device)
        for category, tensors in existing.items():
            more = sum(_local(tensor).nbytes for tensor in tensors) - booked.get(category, 0)
            if more > 0:
                self.memory.add(tier=Tier.device, category=category, nbytes=more)
            elif more < 0:
                self.memory.remove(tier=Tier.device, category=category, nbytes=-more)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(value: Tensor) -> Tensor:
    """Returns fp32, gathered over ranks if it is cut."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).to(torch.float32, copy=True)
