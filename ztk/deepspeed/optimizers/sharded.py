"""The second value of `initialize`: the sharded optimizer as a torch optimizer. Losses have the model's output dtype."""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.checkpoint.full import is_cut
from ztk.deepspeed.engine.gradients import forget_gradients, take_assigned, take_changes
from ztk.deepspeed.engine.offloading import StateOffload
from ztk.deepspeed.engine.owners import Owner, owner_of
from ztk.deepspeed.optimizers.groups import FixedOptions, TrainedGroups, hyper_row
from ztk.deepspeed.optimizers.loss_scaler import EngineLossScale
from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.zero.gathered import DeepSpeedZeRoOffload
from ztk.kernels import State
from ztk.optim import TorchStep, WholeStep
from ztk.optim.script_optimizer import FixedGroups, ScriptOptimizer, StateElsewhere, check_same, inside_hooks
from ztk.optim.torch_step import Progress
from ztk.train.engine import Engine

_AGAIN = "destroy() the engine and initialize again"
_STATES = (
    "Use deepspeed.utils.safe_get_full_optimizer_state(p, name) and safe_set_full_optimizer_state(p, value, name), or "
    "engine.optimizer.state_dict() and load_state_dict(), on every rank; to begin with new states " + _AGAIN
)
_NOT_HERE = (
    "the optimizer that was passed to initialize: its states are the engine's. Call it, on every rank, of the optimizer that "
    "initialize returned (engine.optimizer), or use engine.save_checkpoint and load_checkpoint"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """Parameters by their numbers in a state_dict, the groups with these numbers, and the names of the states."""

    owners: dict[int, Owner]
    groups: list[dict]
    names: tuple[str, ...]


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer through its `param_groups`: schedulers and scripts write rates there, and the next step uses them.

    Its states are sharded and belong to the engine; `engine.save_checkpoint` saves them.
    """

    def __init__(self, trained: TrainedGroups, *, engine: Engine, moving: StateOffload) -> None:
        self._is_built = False
        super().__init__([dict(group) for group in trained.groups], dict(trained.defaults))
        self._is_built = True
        if trained.client is not None:
            self.param_groups = trained.client.param_groups  # a scheduler of the client's optimizer writes there
        self.optimizer = trained.client or self
        warn = logger.warning if engine.process.rank == 0 else None
        self.state = self._no_state = StateElsewhere(way=_STATES, warn=warn)
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._whole = engine.zero.optimizer if isinstance(engine.zero.optimizer, WholeStep) else None
        self._groups = FixedGroups(self, names=names, build="initialize", again=_AGAIN)
        self._options = FixedOptions(self.param_groups, policy=trained.policy)
        self._script = self._take(trained.client, engine=engine)
        self._policy, self._engine, self.moving = trained.policy, engine, moving
        self.offload_states, self.reload_states = moving.offload, moving.reload  # as the engine's methods
        self._row_of_group = [engine.control.row_of[own[0]] if own else None for own in trained.names]
        self._hyper = engine.control.hyper.cpu()  # the values on the device
        self.skip_step = False  # set by a script: the next step drops its gradients, because another model's overflowed
        self._was_skipped = self._is_called = False
        self.before_drop: Callable[[], None] = lambda: None  # called before `zero_grad` drops gradients
        if engine.zero.policy.shards_parameters:
            self.parameter_offload = DeepSpeedZeRoOffload(engine.module)

    def _take(self, client: torch.optim.Optimizer | None, *, engine: Engine) -> ScriptOptimizer | None:
        if client is None:
            return None
        engine.release_optimizer()  # `parallelize` has converted it to a policy
        groups = None
        if self._whole is None:
            groups = FixedGroups(client, names=self._groups.names, build="initialize", again=_AGAIN)
        return ScriptOptimizer(client, groups=groups, state=self._no_state, instead=_NOT_HERE, zero_grad=self.zero_grad)

    def step_of_engine(self) -> None:
        """Calls `step`, which a script may have wrapped. Raises RuntimeError if the wrapper does not call it."""
        self._is_called = True
        try:
            self.step()
            if self._is_called:
                raise RuntimeError(
                    "engine.optimizer.step was replaced by a function that does not call the step it replaces: call that, once"
                )
        finally:
            self._is_called = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Called by the engine at a boundary. Raises RuntimeError if a script calls it, and ValueError for a hook that returns
        arguments.
        """
        if not self._is_called:
            raise RuntimeError("optimizer.step(): call engine.step() instead; it knows where an accumulated step ends")
        self._is_called = False
        assert closure is None
        self._was_skipped, self.skip_step = self.skip_step, False
        if self._was_skipped:
            self._engine.skip_step()
            forget_gradients(self._engine)
            return
        with self._script.inside_hooks() if self._script else nullcontext():
            self._write_hyper()
            take_assigned(self._engine)  # a hook may have changed p.grad
            take_changes(self._engine)
            self._engine.step()
        self._no_state.has_stepped = True

    def train_batch(self, micro_batches: Iterable) -> Tensor:
        """Runs the engine's full step, for a pipeline, inside the step hooks. Returns its loss, a scalar."""
        with inside_hooks(self), self._script.inside_hooks() if self._script else nullcontext():
            self._write_hyper()
            loss = self._engine.train_batch(micro_batches)
        self._no_state.has_stepped = True
        return loss

    def add_param_group(self, param_group: dict) -> None:
        """Raises ValueError: groups are fixed at `initialize`."""
        if self._is_built:
            self._groups.refuse_group()
        super().add_param_group(param_group)

    def leave_client(self) -> None:
        """Gives the client's optimizer back when the engine ends."""
        if self._script is not None:
            self._script.release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Runs `DeepSpeedEngine.zero_grad`."""
        if self._engine.has_gradients:
            self.before_drop()
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
        """Whether the last step was skipped because of a non-finite gradient, or by `skip_step`. On a GPU this waits for the device."""
        return self._was_skipped or (
            self._engine.control.scaling.dynamic and bool(self._engine.control.state[State.found_inf])
        )

    @property
    def cur_scale(self) -> float:
        """The current loss scale. On a GPU this waits for the device."""
        return float(self._engine.control.loss_scale)

    loss_scale = cur_scale

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before its backward: `engine.scale(loss).backward()`."""
        return self._engine.scales_loss

    @property
    def loss_scaler(self) -> EngineLossScale:
        """The loss scale as an object: `optimizer.loss_scaler.loss_scale`."""
        return EngineLossScale(self._engine)

    loss_scale_config = loss_scaler  # DeepSpeed's name at stage 0

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self._engine.control.scaling.dynamic

    def quantize_nontrainable_params(self) -> None:
        """Does nothing: with `zero_quantized_nontrainable_weights`, every gather sends frozen parameters as int8.

        Raises RuntimeError without that key.
        """
        if not self._engine.zero.policy.quantized_nontrainable_weights:
            raise RuntimeError(
                "quantize_nontrainable_params(): set zero_optimization.zero_quantized_nontrainable_weights, at stage 3"
            )

    def check_overflow(self, partition_gradients: bool = True, external: bool = False) -> bool:
        """Returns whether a gradient for the next step is not finite on any rank. A collective call, which waits for the device.

        Raises RuntimeError unless a step is due. partition_gradients, external: accepted and ignored.
        """
        del partition_gradients, external
        return self._engine.zero.has_overflow()

    def state_dict(self) -> dict:
        """Returns torch.optim's format: full fp32 states in main memory of every rank, and the groups with parameter numbers.

        A collective call.

        Master weights are not included. `engine.save_checkpoint` saves everything, without gathering.
        """
        packed, step = self._packed(), self._engine.zero.optimizer
        if isinstance(step, WholeStep):
            return self._state_of_whole_step(packed)
        if isinstance(step, TorchStep):
            return self._state_of_torch_step(step, packed=packed)
        steps, missed = self._engine.control.state[State.step].cpu(), self._engine.zero.missed_updates.counts
        state = {
            number: {"step": steps - missed.get(owner.name, 0), **self._states_of(owner, names=packed.names)}
            for number, owner in packed.owners.items()
        }
        return {"state": state if packed.names else {}, "param_groups": packed.groups}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores states, groups and the number of steps from a result of `state_dict`, at any stage and number of ranks.

        A collective call.

        Raises ValueError for groups or states of another optimizer.
        """
        packed = self._packed()
        given, state = state_dict["param_groups"], state_dict["state"]
        if [group["params"] for group in given] != [group["params"] for group in packed.groups]:
            raise ValueError("load_state_dict: the groups hold other parameters than this optimizer's; group alike")
        step = self._engine.zero.optimizer
        if isinstance(step, WholeStep):
            self._load_into_whole_step(packed, state=state)
        elif isinstance(step, TorchStep):
            self._load_into_torch_step(step, packed=packed, state=state, groups=given)
        elif state:
            self._load(packed, state=state)
        for group, saved in zip(self.param_groups, given, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _load(self, packed: "_Packed", *, state: dict) -> None:
        if set(state) != set(packed.owners) or any(set(packed.names) - set(own) for own in state.values()):
            raise ValueError(f"load_state_dict: needs {', '.join(packed.names)} of every trained parameter")
        for number, owner in packed.owners.items():
            self._write_states(owner, values={key: state[number][key] for key in packed.names})
        steps = {number: float(own.get("step", 0.0)) for number, own in state.items()}
        last = max(steps.values())
        missed = {packed.owners[number].name: int(last - own) for number, own in steps.items() if own < last}
        self._engine.restore_updates(int(last), missed=missed)

    def _state_of_whole_step(self, packed: "_Packed") -> dict:
        """Returns the state_dict of the optimizer's class, with copies in main memory."""
        numbers = {owner.name: number for number, owner in packed.owners.items()}
        names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
        with self._engine.zero.whole_states() as step:
            state = {
                numbers[names[id(key)]] if isinstance(key, Tensor) else key: _copy_on_host(value)
                for key, value in step.state.items()
            }
        return {"state": state, "param_groups": copy.deepcopy(packed.groups)}

    def _load_into_whole_step(self, packed: "_Packed", *, state: dict) -> None:
        parameters = dict(self._engine.module.named_parameters())
        with self._engine.zero.whole_states() as step:
            device = self._engine.zero.whole_device
            step.state.clear()
            for number, own in state.items():
                key = parameters[packed.owners[number].name] if number in packed.owners else number
                if isinstance(key, int):
                    raise ValueError(
                        f"load_state_dict: has a state of parameter {number}, which this optimizer does not train"
                    )
                step.state[key] = {
                    name: value.to(device, copy=True)
                    if isinstance(value, Tensor) and value.dim()
                    else copy.deepcopy(value)
                    for name, value in own.items()
                }

    def _state_of_torch_step(self, step: TorchStep, *, packed: "_Packed") -> dict:
        """Returns the state_dict of the optimizer's class: the states of every parameter that has made a step, and its groups."""
        progress, group_values = self._gathered(step)
        state = {}
        for number, owner in packed.owners.items():
            if (own := progress.get(owner.name)) is not None:
                scalars = {
                    key: value.cpu() if isinstance(value, Tensor) else value for key, value in own.scalars.items()
                }
                state[number] = {**copy.deepcopy(scalars), **self._states_of(owner, names=own.rows)}
        groups = [{**group, **group_values.get(number, {})} for number, group in enumerate(packed.groups)]
        return {"state": state, "param_groups": groups}

    def _load_into_torch_step(self, step: TorchStep, *, packed: "_Packed", state: dict, groups: list[dict]) -> None:
        if unknown := [number for number in state if number not in packed.owners]:
            raise ValueError(
                f"load_state_dict: has a state of parameter {unknown[0]}, which this optimizer does not train"
            )
        progress = {}
        for number, own in state.items():
            owner, rows = packed.owners[number], tuple(key for key in packed.names if key in own)
            self._write_states(owner, values={key: own[key] for key in rows})
            scalars = {key: value for key, value in own.items() if key not in rows}
            progress[owner.name] = Progress(scalars=copy.deepcopy(scalars), rows=rows)
        values = {
            number: {key: group[key] for key in keys if key in group}
            for number, (keys, group) in enumerate(zip(step.changing_values, groups, strict=True))
        }
        step.restore(progress, group_values=values, keep=frozenset())

    def _gathered(self, step: TorchStep) -> tuple[dict[str, Progress], dict[int, dict]]:
        """Gathers progress from all ranks, because each updates only its own parameters. A collective call."""
        self._engine.zero.finish_update()
        progress: dict[str, Progress] = {}
        values: dict[int, dict] = {}
        for progress_of_rank, values_of_rank in self._engine.process.comm.gather_objects(
            (step.progress(), step.group_values())
        ):
            progress, values = {**progress_of_rank, **progress}, {**values_of_rank, **values}
        return progress, values

    def _packed(self) -> "_Packed":
        """Returns the parameters with their numbers. Raises ValueError if ranks hold parts of the model."""
        if is_cut(self._engine):
            raise ValueError(
                "the optimizer's state_dict, where ranks hold parts of the model: engine.save_checkpoint and load_checkpoint do it"
            )
        numbers, owners, groups = 0, {}, []
        for group in self.param_groups:
            first = numbers
            for parameter in group["params"]:
                owner = owner_of(parameter)
                if owner is not None and owner.is_trained:
                    owners[numbers] = owner
                numbers += 1
            plain = {key: value for key, value in group.items() if key != "params"}
            groups.append({**plain, "params": list(range(first, numbers))})
        return _Packed(owners=owners, groups=groups, names=tuple(self._engine.zero.optimizer.state_names))

    @staticmethod
    def _states_of(owner: Owner, *, names: Iterable[str]) -> dict[str, Tensor]:
        named = owner.engine.zero.named_state
        found = {key: named.read(owner.bucket, name=owner.name, kind=key) for key in names}
        return {key: value.cpu() for key, value in found.items() if value is not None}

    @staticmethod
    def _write_states(owner: Owner, *, values: dict[str, Tensor]) -> None:
        for key, value in values.items():
            owner.engine.zero.named_state.write(owner.bucket, values={owner.name: value}, kind=key)

    def groups_state(self) -> list[dict]:
        """Returns the groups without their parameters, for a checkpoint."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    def load_groups_state(self, state: list[dict]) -> None:
        """Restores rates and other values. The parameters of the groups do not change.

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
        """Copies changed values to the device in one asynchronous copy."""
        if self._whole is None:
            self._groups.check()
        elif self._script is not None:
            self.param_groups = self._script.optimizer.param_groups  # its step may change groups
        check_same(self.state, expected=self._no_state)
        if self._script is not None:
            self._script.check()
        self._options.check()
        before = self._hyper.clone()
        for group, row in zip(self.param_groups, self._row_of_group, strict=self._whole is None):
            if row is None:
                continue
            values = hyper_row(group, policy=self._policy)
            self._hyper[row, : len(values)] = torch.tensor(values, dtype=self._hyper.dtype)
        if torch.equal(self._hyper, before):
            return
        self._engine.control.set_hyper(self._hyper)


def _copy_on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_on_host(item) for key, item in value.items()}
    return copy.deepcopy(value)


class _Kind(type):
    """A class whose instances are the engine's optimizers with one of `stages` and `dtypes`. An empty tuple matches all."""

    stages: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, ShardedOptimizer):
            return False
        stage, dtype = instance.stage, instance.compute_dtype
        return (not cls.stages or stage in cls.stages) and (not cls.dtypes or dtype in cls.dtypes)


def _kind(name: str, *, module: str, stages: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()) -> _Kind:
    return _Kind(name, (), {"__module__": f"deepspeed.runtime.{module}", "stages": stages, "dtypes": dtypes})


DeepSpeedOptimizer = _kind("DeepSpeedOptimizer", module="base_optimizer", stages=())
ZeROOptimizer = _kind("ZeROOptimizer", module="base_optimizer", stages=(1, 2, 3))
DeepSpeedZeroOptimizer = _kind("DeepSpeedZeroOptimizer", module="zero.stage_1_and_2", stages=(1, 2))
DeepSpeedZeroOptimizer_Stage3 = _kind("DeepSpeedZeroOptimizer_Stage3", module="zero.stage3", stages=(3,))
BF16_Optimizer = _kind("BF16_Optimizer", module="bf16_optimizer", stages=(0,), dtypes=(torch.bfloat16,))
FP16_Optimizer = _kind("FP16_Optimizer", module="fp16.fused_optimizer", stages=(0,), dtypes=(torch.float16,))
FP16_UnfusedOptimizer = _kind(
    "FP16_UnfusedOptimizer", module="fp16.unfused_optimizer", stages=(-1,)
)  # matches nothing, because there is no LAMB
