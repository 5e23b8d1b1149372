"""Frees device memory for generation: moves tensors that only updates need to main memory during sampling and scoring."""

from collections.abc import Iterator
from contextlib import contextmanager

from ztk.train.engine import Engine
from ztk.zero.state.offload import StateKind

_KINDS = (StateKind.optim_states, StateKind.hp_params)


@contextmanager
def states_away(*engines: Engine) -> Iterator[None]:
    """Moves optimizer states and master weights of `engines` to main memory inside the context. A collective call.

    No engine may step or save inside. Nothing is copied if the device is the CPU, and offloaded tensors stay in their tier.
    """
    for engine in engines:
        engine.zero.offloader.offload(_KINDS, pin_memory=True, non_blocking=False)
    try:
        yield
    finally:
        for engine in engines:
            engine.zero.offloader.reload(non_blocking=True)
