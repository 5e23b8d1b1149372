"""The second item that `initialize` returns: what a script sees of the sharded optimizer."""

from collections.abc import Container, Iterable

import torch
from torch import Tensor

from ztk.deepspeed.gradients import forget_gradients
from ztk.deepspeed.groups import TrainedGroups, hyper_row
from ztk.deepspeed.loss_scaler import EngineLossScale
from ztk.deepspeed.offloading import OffloadDeviceEnum, StateOffload
from ztk.deepspeed.zero.hooks import DeepSpeedZeRoOffload
from ztk.engine import Engine
from ztk.kernels import State
from ztk.zero.state.offload import StateKind


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer in its `param_groups`: schedulers and scripts write rates there, and the next step uses them.

    Its states are sharded and live in the engine: they are saved by `engine.save_checkpoint`.
    """

    def __init__(self, trained: TrainedGroups, *, engine: Engine, moving: StateOffload) -> None:
        super().__init__([dict(group) for group in trained.groups], dict(trained.defaults))
        if trained.client is not None:
            self.param_groups = trained.client.param_groups  # a scheduler made of the client's optimizer writes there
        self.optimizer = trained.client or self
        self._policy, self._engine, self.moving = trained.policy, engine, moving
        self._row_of_group = [engine.control.row_of[own[0]] if own else None for own in trained.names]
        self._hyper = engine.control.hyper.cpu()  # what the device has
        if engine.zero.policy.shards_parameters:
            self.parameter_offload = DeepSpeedZeRoOffload(engine.module)

    @torch.no_grad()
    def step(self, closure: None = None, *, of_engine: bool = False) -> None:
        """The engine calls it at a boundary. Raises RuntimeError if a script does, ValueError for a hook that returns arguments."""
        if not of_engine:
            raise RuntimeError("optimizer.step(): call engine.step() instead; it knows where an accumulated step ends")
        assert closure is None
        client = self.optimizer if self.optimizer is not self else None
        for hook in _hooks(client, kind="pre"):
            if hook(client, (), {}) is not None:
                raise ValueError(
                    "a pre-step hook of the optimizer returned other arguments, and the engine's step has none"
                )
        self._write_hyper()
        self._engine.step()
        self._mark_stepped()
        for hook in _hooks(client, kind="post"):
            hook(client, (), {})

    def train_batch(self, micro_batches: Iterable) -> Tensor:
        """The engine's full step, for a pipeline; returns its loss, a scalar."""
        self._write_hyper()
        loss = self._engine.train_batch(micro_batches)
        self._mark_stepped()
        return loss

    def _mark_stepped(self) -> None:
        if self.optimizer is not self:
            # pyrefly: ignore[missing-attribute]  # torch's own mark
            self.optimizer._opt_called = True  # a torch scheduler warns if its optimizer has not stepped before it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`DeepSpeedEngine.zero_grad`."""
        if self._engine.zero.reduction.has_gradients:
            self._engine.discard_gradients()
            forget_gradients(self._engine)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self._engine.zero.policy.stage

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the model's parameters."""
        return self._engine.zero.dtype

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite. On a GPU this waits for the device."""
        return self._engine.control.scaling.dynamic and bool(self._engine.control.state[State.found_inf])

    @property
    def cur_scale(self) -> float:
        """The loss scale in use. On a GPU this waits for the device."""
        return float(self._engine.control.loss_scale)

    loss_scale = cur_scale

    @property
    def loss_scaler(self) -> EngineLossScale:
        """The loss scale as an object: `optimizer.loss_scaler.loss_scale`."""
        return EngineLossScale(lambda: self.cur_scale, dynamic=self._engine.control.scaling.dynamic)

    def offload_states(
        self,
        include: Container[StateKind] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """`DeepSpeedEngine.offload_states`, which some call here."""
        self.moving.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """`DeepSpeedEngine.reload_states`."""
        self.moving.reload(non_blocking=non_blocking)

    def state_dict(self) -> dict:
        """Refused: raises RuntimeError, always. The states are sharded."""
        raise RuntimeError("the optimizer's states are sharded: engine.save_checkpoint(folder) saves them")

    def load_state_dict(self, state_dict: dict) -> None:
        """Refused: raises RuntimeError, always. The states are sharded."""
        raise RuntimeError("the optimizer's states are sharded: engine.load_checkpoint(folder) loads them")

    def groups_state(self) -> list[dict]:
        """The groups without their parameters, for a checkpoint."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    def load_groups_state(self, state: list[dict]) -> None:
        """Rates and other numbers as they were; the parameters of the groups are the model's now.

        Raises ValueError for another number of groups.
        """
        if len(state) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has {len(state)} parameter groups, this optimizer {len(self.param_groups)}; group alike, "
                "or load with load_optimizer_states=False"
            )
        for group, saved in zip(self.param_groups, state, strict=True):
            group.update(saved)

    def _write_hyper(self) -> None:
        """Numbers that changed go to the device in one copy, which is not waited for."""
        before, table = self._hyper.clone(), self._engine.control.hyper
        for group, row in zip(self.param_groups, self._row_of_group, strict=True):
            if row is None:
                continue
            values = hyper_row(group, policy=self._policy)
            self._hyper[row, : len(values)] = torch.tensor(values, dtype=table.dtype)
        if torch.equal(self._hyper, before):
            return
        # Only from pinned memory a copy is asynchronous; torch gives these bytes to nobody else before it is done.
        table.copy_(self._hyper.pin_memory() if table.is_cuda else self._hyper, non_blocking=True)


def _hooks(client: torch.optim.Optimizer | None, *, kind: str) -> list:
    """The client's own step hooks. Its step is replaced by the engine's, so torch calls none; those of `self` it calls by itself."""
    return [] if client is None else list(getattr(client, f"_optimizer_step_{kind}_hooks", {}).values())
