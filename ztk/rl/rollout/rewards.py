"""The reward of an answer: a Python function of the user's, called under guard."""

import importlib.util
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# score(prompt=, answer=, record=) -> the reward, or None to leave the sample out.
RewardFunction = Callable[..., float | None]


class RewardError(RuntimeError):
    """The reward function failed; the text has the record and the answer."""


def load_reward(name: str) -> RewardFunction:
    """The function that `name`, `FILE.py:FUNCTION`, names.

    Raises:
        ValueError: another form, no such file, a file that cannot be imported, or no such function in it.
    """
    path, _, function = name.rpartition(":")
    file = Path(path).expanduser()
    if not path.endswith(".py") or not function.isidentifier():
        raise ValueError(f"reward.function={name}: must be FILE.py:FUNCTION, such as reward.function=mine.py:score")
    if not file.is_file():
        raise ValueError(f"reward.function={name}: there is no file {file.absolute()}; give its path")
    spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"reward.function={name}: {type(error).__name__} while {file} was imported: {error}"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"reward.function={name}: {file} has no function {function!r}; name one that it has")
    return found


def score(
    function: RewardFunction, *, prompt: str, answer: str, record: Mapping[str, Any], timeout_seconds: float
) -> float | None:
    """The reward of one answer; None: the sample is left out.

    Raises:
        RewardError: the function raised, took longer than `timeout_seconds`, or returned something else than a finite number or None.
    """
    value = _called(function, prompt=prompt, answer=answer, record=record, timeout_seconds=timeout_seconds)
    where = f"for prompt {prompt!r}, answer {answer!r}, record {dict(record)!r}"
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardError(f"the reward function returned {value!r} {where}: return a number, or None") from None
    if not math.isfinite(number):
        raise RewardError(
            f"the reward function returned {number} {where}: return a finite number, or None to leave the sample out"
        )
    return number


def _called(
    function: RewardFunction, *, prompt: str, answer: str, record: Mapping[str, Any], timeout_seconds: float
) -> Any:
    """What the function returns, called on a thread of its own: whatever it waits for, this call ends in time."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(prompt=prompt, answer=answer, record=dict(record)), None))
        except BaseException as error:  # noqa: BLE001 - reported with the record below
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="ztk-reward", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    where = f"for prompt {prompt!r}, answer {answer!r}, record {dict(record)!r}"
    if not outcome:
        raise RewardError(
            f"the reward function did not return within reward.timeout_seconds={timeout_seconds:g} {where}: make it faster, or "
            "raise reward.timeout_seconds"
        )
    value, error = outcome[0]
    if error is not None:
        raise RewardError(f"the reward function raised {type(error).__name__}: {error}, {where}") from error
    return value
