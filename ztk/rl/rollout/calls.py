"""Calls users' functions with time limits.

Coroutines run on one event loop that lives as long as the process, so that clients can keep their connections. A plain function runs on a
separate thread, so that a call that never returns still times out.
"""

import asyncio
import functools
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

NUMBER = "a finite number, or None"
_GRACE_SECONDS = 1.0  # time for the loop to report a late coroutine; without a report, something blocks the loop


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a user's function.

    said: the subject of an error, such as "the reward function score". where: the data of the call, for an error.
    """

    said: str
    where: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function; none if it is implemented in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def asked(function: Callable[..., Any], *, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a function takes: all of them with `**kwargs`, otherwise those that it names. A bound one keeps its value."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    given = {name: value for name, value in given.items() if name not in bound}
    parameters = parameters_of(function)
    if not parameters or any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether a call returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def values_of(returned: Any) -> list[Any]:
    """Returns the elements of a list, a tuple, or a tensor or array of one dimension. Raises TypeError for anything else, such as a dict,
    a text or a generator.
    """
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes | bytearray):
        return list(returned)
    tolist = getattr(returned, "tolist", None)
    if getattr(returned, "ndim", None) == 1 and callable(tolist):
        return tolist()
    shape = f" of shape {tuple(returned.shape)}" if hasattr(returned, "shape") else ""
    raise TypeError(f"a {type(returned).__name__}{shape}")


def number_of(value: Any) -> float:
    """Returns a real number, or the value of a tensor or array without dimensions, as a float; NaN for None. A bool counts as 1 or 0.

    Raises TypeError for anything else, such as a text, and for a number that is not finite.
    """
    if value is None:
        return math.nan
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise TypeError(f"a {type(value).__name__}{shape}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise TypeError("a number that is not finite")
    return number


class Calls:
    """Calls users' functions. fault: raised for a call that raised, or did not return within `seconds`."""

    def __init__(self, *, seconds: float, fault: type[Exception]) -> None:
        self._seconds, self._fault = seconds, fault

    def start(self, calls: Sequence[Call]) -> Callable[[], list[Any]]:
        """Starts coroutines, which run together. The result waits for them, or calls plain functions one after another.

        It returns the values, or raises the fault.
        """
        if not calls or not is_async(calls[0].function):
            return lambda: [self._called(call) for call in calls]

        async def together() -> list[Any]:
            return await asyncio.gather(*map(self._awaited, calls))

        future = asyncio.run_coroutine_threadsafe(together(), _loop())

        def wait() -> list[Any]:
            try:
                return future.result(self._seconds + _GRACE_SECONDS)
            except FutureTimeout:  # something blocks the loop
                raise self._late(calls[0]) from None

        return wait

    def _called(self, call: Call) -> Any:
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((call.function(**call.arguments), None))
            except BaseException as error:  # noqa: BLE001 - whatever the user's function raises
                outcome.append((None, error))

        thread = threading.Thread(target=run, name="ztk-reward", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if not outcome:
            raise self._late(call)
        value, error = outcome[0]
        if error is not None:
            raise self._raised(call, error=error) from error
        return value

    async def _awaited(self, call: Call) -> Any:
        async def run() -> Any:
            return await call.function(
                **call.arguments
            )  # inside the task, so that missing arguments are the task's error

        task = asyncio.ensure_future(run())
        done, _ = await asyncio.wait({task}, timeout=self._seconds)
        if not done:
            task.cancel()
            raise self._late(call)
        try:
            return task.result()
        except (Exception, asyncio.CancelledError) as error:  # any error of the user's function
            raise self._raised(call, error=error) from error

    def _raised(self, call: Call, *, error: BaseException) -> Exception:
        return self._fault(f"{call.said} raised {type(error).__name__}: {error}, {call.where}")

    def _late(self, call: Call) -> Exception:
        return self._fault(
            f"{call.said} did not return within reward.timeout_seconds={self._seconds:g}, {call.where}: make it faster, or raise "
            "reward.timeout_seconds"
        )


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ztk-reward-loop", daemon=True).start()
    return loop
