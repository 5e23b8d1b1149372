"""A launcher's environment that does not fit together is refused at once: the other ranks would wait for a minute and more."""

import pytest

from ztk.runtime import Process


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5: must be a whole number, 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: must be a whole number, 0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: must be"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be a whole number, 1 or more"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "-2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=-2: must be"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: must be"),
    ],
)
def test_odd_ranks_are_refused(variables, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Process.start(device="cpu")
