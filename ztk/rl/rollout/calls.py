"""Calls users' functions with time limits.

Coroutines run on one event loop that lives as long as the process, so that clients can keep their connections. A plain function runs on a
separate thread, so that a call that never returns still times out.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

_GRACE_SECONDS = 1.0  # time for the loop to report a late coroutine; without a report, something blocks the loop


class CallFailed(Exception):
    """error: the exception of the call, or None if it exceeded its time limit."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(error)
        self.error = error


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function; none if it is implemented in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def asked(function: Callable[..., Any], *, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a function takes: all of them with `**kwargs`, otherwise those that it names."""
    parameters = parameters_of(function)
    if not parameters or any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether a call returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call_in_time(function: Callable[..., Any], *, arguments: Mapping[str, Any], seconds: float) -> Any:
    """Returns the value of a plain function. Raises CallFailed."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(**arguments), None))
        except BaseException as error:  # noqa: BLE001 - whatever the user's function raises
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="ztk-reward", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise CallFailed
    value, error = outcome[0]
    if error is not None:
        raise CallFailed(error)
    return value


async def await_in_time(function: Callable[..., Any], *, arguments: Mapping[str, Any], seconds: float) -> Any:
    """Returns the value of a coroutine function. Raises CallFailed."""

    async def run() -> Any:
        return await function(**arguments)  # called inside the task, so that missing arguments are the task's error

    task = asyncio.ensure_future(run())
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
        raise CallFailed
    try:
        return task.result()
    except (Exception, asyncio.CancelledError) as error:  # any error of the user's function
        raise CallFailed(error) from error


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future:
    """Starts a coroutine on the loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def result_in_time(future: Future, *, seconds: float) -> Any:
    """Returns the result of a coroutine whose own calls end within `seconds`. Raises CallFailed if something blocks the loop."""
    try:
        return future.result(seconds + _GRACE_SECONDS)
    except FutureTimeout:
        raise CallFailed from None


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ztk-reward-loop", daemon=True).start()
    return loop
