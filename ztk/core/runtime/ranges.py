"""Named ranges of a profile: phases, modules, collectives, updates of buckets. Without a recording they cost one comparison.

torch's profiler records the thread that started it and autograd's threads. Ranges of ztk's other threads (collectives on the CPU, the
update during the forward) are recorded here and returned in `Recording.elsewhere`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadRange:
    """A range of a thread that torch's profiler does not record. start, stop: nanoseconds of the Unix epoch."""

    name: str
    thread: str
    start: int
    stop: int


@dataclass(kw_only=True, slots=True)
class Recording:
    """elsewhere: ranges of other threads, ordered by their end."""

    elsewhere: list[ThreadRange] = field(default_factory=list)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Inside, this thread is in the range `name`."""
        if torch.autograd._profiler_enabled():  # on this thread
            with torch.autograd.profiler.record_function(name):
                yield
            return
        start = time.time_ns()
        try:
            yield
        finally:
            thread = threading.current_thread().name
            self.elsewhere.append(ThreadRange(name=name, thread=thread, start=start, stop=time.time_ns()))


class _Active:
    """The recording in progress."""

    recording: Recording | None = None


def named(name: str) -> AbstractContextManager[None]:
    """Context that records a range `name` of this thread, if a recording is active."""
    recording = _Active.recording
    return _NOTHING if recording is None else recording.named(name)


@contextmanager
def recorded(model: nn.Module | None) -> Iterator[Recording]:
    """Context in which ranges are recorded. Every forward of a module of `model` is a range with the module's name, in recomputation too.

    Raises RuntimeError inside another recording.
    """
    if _Active.recording is not None:
        raise RuntimeError("ranges are being recorded already")
    recording = Recording()
    names = {} if model is None else {module: name or "model" for name, module in model.named_modules()}
    running = threading.local()

    def enter(module: nn.Module, args: object) -> None:
        stack = running.__dict__.setdefault("stack", [])
        entered = ExitStack()
        entered.enter_context(recording.named(f"module {names.get(module, type(module).__name__)}"))
        stack.append(entered)

    def leave(module: nn.Module, args: object, output: object) -> None:
        if stack := running.__dict__.get("stack"):  # empty for a module whose forward began before the recording
            stack.pop().close()

    hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    _Active.recording = recording
    try:
        yield recording
    finally:
        _Active.recording = None
        for hook in hooks:
            hook.remove()
