"""Memory of the device for answers: what only an update reads leaves while they are drawn and scored."""

from collections.abc import Iterator
from contextlib import contextmanager

from ztk.train.engine import Engine
from ztk.zero.state.offload import StateKind

_KINDS = (StateKind.optim_states, StateKind.hp_params)


@contextmanager
def states_away(*engines: Engine) -> Iterator[None]:
    """Inside, optimizer states and master weights of `engines` are in main memory, and no engine may step or save. Where the device is the CPU
    nothing is copied; what is offloaded anyway stays where it is. Every rank must enter."""
    for engine in engines:
        engine.zero.offloader.offload(_KINDS, pin_memory=True, non_blocking=False)
    try:
        yield
    finally:
        for engine in engines:
            engine.zero.offloader.reload(non_blocking=True)
