"""A callback that keeps a run of few steps alive for a test's signal."""

import time
from dataclasses import dataclass
from typing import Any


@dataclass
class Pause:
    """Waits after every step."""

    seconds: float

    def after_step(self, loop: Any, *, loss: Any) -> None:
        time.sleep(self.seconds)
