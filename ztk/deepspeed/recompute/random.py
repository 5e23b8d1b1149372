"""Named random states, so that tensor-parallel ranks draw the same dropout at some places and different dropout at others."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ztk.deepspeed.tools.device import get_accelerator

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


def seed_model_parallel(seed: int, *, rank: int) -> None:
    """Seeds all states with `seed`, and MODEL_PARALLEL depending on the tensor-parallel `rank`."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + _OFFSET + rank)


def reseed_model_parallel(seed: int, *, rank: int) -> None:
    """Seeds only the state MODEL_PARALLEL again."""
    with _tracker.fork():
        get_accelerator().manual_seed(seed + _OFFSET + rank)


_OFFSET = 2718  # as in Megatron


@contextmanager
def repeating(states: dict[str, Tensor]) -> Iterator[None]:
    """Restores the named states `states`, uint8 [n] each, inside."""
    now = _tracker.get_states()
    _tracker.set_states(states)
    try:
        yield
    finally:
        _tracker.set_states(now)
