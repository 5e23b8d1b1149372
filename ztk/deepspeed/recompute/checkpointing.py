"""`deepspeed.checkpointing`: activation recomputation with DeepSpeed's interface, on top of `ztk.parallel.recompute`.

    deepspeed.checkpointing.configure(None, deepspeed_config="ds_config.json")
    y = deepspeed.checkpointing.checkpoint(block, x, mask)

`initialize` configures it from the section activation_checkpointing; call `configure` for other settings. Reentrant autograd is not used:
inputs need not require gradients, and keyword arguments and any structure are allowed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ztk.core.runtime import Comm
from ztk.deepspeed.config import read_source
from ztk.deepspeed.config.keys import Findings
from ztk.deepspeed.config.modules import ActivationCheckpointing, read_activation_checkpointing
from ztk.deepspeed.start.process import this_process
from ztk.deepspeed.tools.device import get_accelerator
from ztk.deepspeed.tools.log import logger
from ztk.parallel.recompute import RecomputePolicy, Regions

_OFFSET = 2718  # between the seeds of the default generator and of MODEL_PARALLEL, as in Megatron
MODEL_PARALLEL = (
    "model-parallel-rng"  # name in DeepSpeed and Megatron for the state that differs between tensor-parallel ranks
)


class CudaRNGStatesTracker:
    """Named random states of the GPU's generator, or of the CPU's without a GPU."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Removes all states."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Returns the states by name, uint8 [n] each."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replaces all states, uint8 [n] each."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state that starts from `seed`. Raises ValueError if name or seed are in use."""
        if seed in self.seeds_:
            raise ValueError(
                f"seed {seed} already exists: two states of one seed would draw the same numbers; use another"
            )
        if name in self.states_:
            raise ValueError(f"cuda rng state {name} already exists: use another name, or reset()")
        self.seeds_.add(seed)
        accelerator = get_accelerator()
        before = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self.states_[name] = accelerator.get_rng_state()
        accelerator.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draws random numbers inside from the state `name`, which advances. The default state does not change.

        Raises ValueError for a name that was not added.
        """
        if name not in self.states_:
            raise ValueError(f"cuda rng state {name} is not added: call add({name!r}, seed) before")
        accelerator = get_accelerator()
        before = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Returns this process's tracker."""
    return _tracker


class _Checkpointing:
    """The settings of `configure`. There is one instance per process, as in DeepSpeed."""

    def __init__(self) -> None:
        self.options = ActivationCheckpointing()
        self.is_configured = False
        self.comm: Comm | None = None  # of the tensor-parallel ranks
        self._regions: Regions | None = None

    @property
    def regions(self) -> Regions:
        if self._regions is None:
            options = self.options
            policy = RecomputePolicy(
                mode="full",
                inputs_on_cpu=options.cpu_checkpointing,
                partition_inputs=options.partition_activations,
                contiguous=options.buffer_size is not None,
                num_checkpoints=options.buffer_size,
            )
            self._regions = Regions(policy, comm=self.comm, around=self._around)
        return self._regions

    def set(self, options: ActivationCheckpointing) -> None:
        self.options = options
        self.forget_buffers()

    def forget_buffers(self) -> None:
        """Makes the next checkpoint allocate new buffers. Live graphs keep theirs."""
        self._regions = None

    def _around(self) -> tuple[Any, Any]:
        """Returns contexts for a forward and its repetition: named random states, synchronization and timing."""
        states = _tracker.get_states()
        return self._observed("forward"), self._repeated(states)

    @contextmanager
    def _repeated(self, states: dict[str, Tensor]) -> Iterator[None]:
        now = _tracker.get_states()
        _tracker.set_states(states)
        try:
            with self._observed("recomputed forward"):
                yield
        finally:
            _tracker.set_states(now)

    @contextmanager
    def _observed(self, name: str) -> Iterator[None]:
        options, accelerator = self.options, get_accelerator()
        waits = options.synchronize_checkpoint_boundary or options.profile
        if waits:
            accelerator.synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            if waits:
                accelerator.synchronize()
            if options.profile:
                logger.info("checkpointing: %s: %.2f ms", name, 1000 * (time.perf_counter() - start))


_checkpointing = _Checkpointing()


def configure(
    mpu_: object,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configures `checkpoint`. Arguments take precedence over the section activation_checkpointing of `deepspeed_config`.

    A collective call if mpu_ is given. Options without effect are logged.

    mpu_: provides the tensor-parallel ranks by get_tensor_model_parallel_group() or get_model_parallel_group(). If omitted, they do not
    change.
    partition_activations: each tensor-parallel rank keeps its part of the inputs. No effect without such ranks.
    contiguous_checkpointing: stores the inputs of `num_checkpoints` calls in one buffer. Without that number, every input is stored
    separately.
    checkpoint_in_cpu: stores inputs in main memory. Like contiguous_checkpointing, it does not need partition_activations.
    synchronize, profile: synchronizes with the GPU at every boundary; logs milliseconds.

    Raises DeepSpeedConfigError for a section with faults.
    """
    if mpu_ is not None:
        _checkpointing.comm = _tensor_parallel_comm(mpu_)
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    given = {name: value for name, value in given.items() if value is not None}
    options = replace(_section_of(deepspeed_config), **given)
    for note in options.notes():
        logger.info("checkpointing: %s", note)
    _checkpointing.set(options)
    _checkpointing.is_configured = True


def configure_from(section: ActivationCheckpointing, *, comm: Comm | None = None) -> None:
    """Called by `initialize` if the configuration has the section. comm: communicates between the tensor-parallel ranks."""
    _checkpointing.comm = comm if comm is not None else _checkpointing.comm
    _checkpointing.set(section)
    _checkpointing.is_configured = True


def is_configured() -> bool:
    """Returns whether `configure` was called, or `initialize` found the section."""
    return _checkpointing.is_configured


def checkpoint(function: Callable, *args, **kwargs) -> Any:
    """Returns `function(*args, **kwargs)`. Recomputes it in the backward instead of storing its activations.

    A list or tuple of results is returned as a tuple, and a tuple of length one as its element.
    """
    result = _checkpointing.regions.run(function, args=args, kwargs=kwargs)
    if not isinstance(result, (list, tuple)):
        return result
    return result[0] if len(result) == 1 else tuple(result)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """For scripts that call `CheckpointFunction.apply(function, all_outputs, *args)`."""

    @staticmethod
    def apply(run_function: Callable, all_outputs: list, *args) -> Any:
        """Same as `checkpoint`; also appends the results to `all_outputs`."""
        result = checkpoint(run_function, *args)
        all_outputs += result if isinstance(result, tuple) else [result]
        return result


def reset() -> None:
    """Drops the contiguous buffer, for evaluations whose forwards have no backward."""
    _checkpointing.forget_buffers()


def set_num_layers(nlayers: int) -> None:
    """Sets the number of checkpoints in the contiguous buffer."""
    _checkpointing.set(replace(_checkpointing.options, number_checkpoints=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Changes only this option."""
    _checkpointing.set(replace(_checkpointing.options, partition_activations=partition_activation))


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default generator with `seed`, and the state "model-parallel-rng" with a different seed on each tensor-parallel rank."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + _OFFSET + _tensor_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seeds the state "model-parallel-rng" again."""
    with _tracker.fork():
        get_accelerator().manual_seed(seed + _OFFSET + _tensor_parallel_rank())


def _tensor_parallel_rank() -> int:
    return 0 if _checkpointing.comm is None else _checkpointing.comm.rank


def _section_of(config: object) -> ActivationCheckpointing:
    if config is None:
        return ActivationCheckpointing()
    findings = Findings()
    section = read_activation_checkpointing(read_source(config).get("activation_checkpointing"), findings=findings)
    findings.check()
    return section or ActivationCheckpointing()


def _tensor_parallel_comm(mpu: object) -> Comm:
    """Returns the communicator of the ranks of `mpu`. A collective call of all ranks."""
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            group = getattr(mpu, name)()
            break
    else:
        raise ValueError(f"mpu_={mpu!r:.80}: must have get_tensor_model_parallel_group() or get_model_parallel_group()")
    if isinstance(group, Comm):
        return group
    process = this_process()
    groups = process.comm.gather_objects(tuple(dist.get_process_group_ranks(group)))
    return process.connect(list(dict.fromkeys(groups)))
